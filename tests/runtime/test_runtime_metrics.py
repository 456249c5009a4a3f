import json
import logging
import math
import os
import re
import struct
import subprocess
import sys
import textwrap
import time
from datetime import datetime

import pytest

from tandem.runtime.machine.numerics import check_numerics, instruction_set, numerics_record
from tandem.runtime.records import logs
from tandem.runtime.records.metrics import MetricsFile, read_rows
from tandem.runtime.traces.context import SpanContext
from tandem.runtime.traces.spans import SPANS, begin_first
from tandem.types import RunError, UserError


def test_floats_come_back_bit_for_bit(tmp_path):
    values = [0.1, 1 / 3, -0.0, 5e-324, math.pi * 1e300, math.inf, math.nan, 2**53 + 1.0]
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, value in enumerate(values):
        metrics.append({"step": step, "kl": value, "reward/mean": 1})
    back = [row["kl"] for row in metrics.rows()]
    assert [struct.pack("<d", v) for v in back] == [struct.pack("<d", v) for v in values]
    assert type(metrics.rows()[0]["reward/mean"]) is int


def test_a_row_is_there_when_append_returns_even_after_kill_9(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = """
        import os, sys
        from pathlib import Path
        from tandem.runtime.records.metrics import MetricsFile
        metrics = MetricsFile(Path(sys.argv[1]))
        for step in range(3):
            metrics.append({"step": step, "kl": 0.0})
        os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=False).returncode == -9
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_torn_last_line_is_cut_and_the_next_row_stands_alone(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 0, "kl": 0.5}\n'
    path.write_bytes(whole + b'{"step": 1, "kl": 0.25}\n'[:-cut])
    assert [row["step"] for row in read_rows(path)] == [0]
    metrics = MetricsFile(path)
    metrics.append({"step": 1, "kl": 1.0})
    assert path.read_bytes() == whole + b'{"step": 1, "kl": 1.0}\n'


def test_a_last_line_of_lost_blocks_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n\0\0\0\0\0\0\0\0\n')
    assert MetricsFile(path).rows() == [{"step": 0}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": \n{"step": 2}\n')
    with pytest.raises(RunError, match=r"line 2 of .*metrics\.jsonl"):
        read_rows(path)


def bytes_read() -> int:
    """Returns what this process has read so far, as the kernel counts it."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


@pytest.mark.parametrize("width", [500, 40_000, 65_536 - 26, 200_000])
def test_the_newest_row_is_that_of_all_rows_and_no_other_is_read(tmp_path, width):
    path = tmp_path / "metrics.jsonl"
    rows = "".join(f'{{"step": {step}, "text": "{"x" * width}"}}\n' for step in range(2_000_000 // (width + 24) + 2))
    path.write_text(rows + '{"step": 7')
    before = bytes_read()
    metrics = MetricsFile(path)
    newest = metrics.last_row()
    assert bytes_read() - before < 4 * (width + 2 * 65_536)
    assert newest == metrics.rows()[-1] == read_rows(path)[-1] and path.read_text() == rows


def test_a_file_without_a_whole_row_has_no_newest_one_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.last_row() is None
    with path.open("a") as file:
        file.write("[1]\n")
    with pytest.raises(RunError, match=r"the last line of .*metrics\.jsonl, at byte 0, is not a metrics row; fix or remove that line"):
        metrics.last_row()


def test_a_cut_keeps_the_bytes_of_the_rows_before_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(6):
        metrics.append({"step": step, "kl": step / 7, "weight_version": step})
    before = path.read_bytes().splitlines(keepends=True)
    metrics.cut_after(4)
    assert path.read_bytes() == b"".join(before[:4])
    metrics.append({"step": 4, "kl": 4 / 7, "weight_version": 4})
    assert path.read_bytes() == b"".join(before[:5])
    assert list(tmp_path.iterdir()) == [path]


def test_a_cut_of_a_run_without_rows_is_empty(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.cut_after(0)
    assert metrics.rows() == []


def test_a_row_without_a_step_or_with_a_tensor_is_refused(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="'step'"):
        metrics.append({"kl": 1.0})
    with pytest.raises(TypeError, match="'kl' is a complex"):
        metrics.append({"step": 0, "kl": 1j})
    assert metrics.rows() == []


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    kept = (root.handlers[:], root.level)
    yield root
    for handler in root.handlers[:]:
        if handler not in kept[0]:
            handler.close()
    root.handlers[:], root.level = kept[0], kept[1]
    logging.captureWarnings(False)


def test_a_log_line_says_when_what_who_and_where(tmp_path, root_logger):
    path = logs.setup("trainer_worker", tmp_path / "logs")
    logging.getLogger("tandem.x").info("hello %d", 3)
    line = path.read_text()
    assert path == tmp_path / "logs" / "trainer_worker.log" and line.count("\n") == 1
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} INFO trainer_worker\[{os.getpid()}\] tandem\.x: hello 3", logs.readable(line[:-1]))


def test_logs_are_an_object_a_line_with_run_rank_step_and_trace_and_the_traceback_inside(tmp_path, root_logger):
    path = logs.setup("trainer_worker", tmp_path / "sort" / "logs", rank=1)
    logs.step_is(7)
    with begin_first("step", SpanContext("a" * 32, "b" * 16)):
        logging.getLogger("tandem.x").warning("in a trace")
    line = json.loads(path.read_text())
    assert abs(datetime.fromisoformat(line.pop("time")).timestamp() - time.time()) < 60
    assert line == {
        "level": "WARNING", "run": "sort", "role": "trainer_worker", "rank": 1, "step": 7, "trace_id": "a" * 32, "span_id": "b" * 16, "pid": os.getpid(),
        "logger": "tandem.x", "message": "in a trace",
    }  # fmt: skip
    SPANS.take()
    path.unlink()
    path = logs.setup("controller", tmp_path)
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logging.getLogger("tandem.x").exception("two\nlines")
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["level"], line["role"], line["message"]) == ("ERROR", "controller", "two\nlines")
    assert "ZeroDivisionError" in line["exception"] and "trace_id" not in line
    assert logs.readable(path.read_text().strip()).endswith("two\nlines\n" + line["exception"])
    for other in ("", "plain text of a reward function", "{", "{}", '{"time": 3}', '{"time": "x", "level": "INFO"}', "[1]", "{" * 100_000):
        assert logs.readable(other) == other


def test_the_instruction_set_names_what_sums_depend_on(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse avx2 avx512f fma nonsense\n")
    assert instruction_set(cpuinfo).split()[1:] == ["avx2", "fma", "avx512f"]


def test_the_record_has_this_machine_and_equals_itself():
    import torch

    record = numerics_record(2, "cpu")
    # The CUDA build from PyPI reports +cu130 itself, but not in its metadata.
    assert str(record["torch"]).partition("+")[0] == torch.__version__.partition("+")[0]
    assert record["threads"] == 2 and record["kernels"] == "cpu"
    check_numerics(record, numerics_record(2, "cpu"))


def test_other_numerics_are_refused_in_one_line_with_every_difference():
    saved = numerics_record(2, "cpu")
    with pytest.raises(UserError) as caught:
        check_numerics(saved, {**saved, "threads": 1, "torch": "1.0"})
    text = str(caught.value)
    assert "threads was '2', now '1' (set machine.threads to 2)" in text and "torch" in text and "\n" not in text
    assert "kernels" not in text
