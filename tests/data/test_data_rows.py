"""Rows of every format are those that were written, and what is wrong with a file is one line."""

import datetime
import gzip
import json
import os
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tandem.data.rows.source import Source, file_rows, read_rows
from tandem.types import UserError

ROWS: list[dict[str, Any]] = [
    {"prompt": f"Größe {i}?\nTwo lines, \"quoted\"", "answer": str(i), "level": i, "meta": {"tags": ["a", "b"], "deep": {"x": i / 4}}} for i in range(7)
]


def values(path: Path) -> list[Any]:
    return [values for _, values in file_rows(str(path)).checked()]


def test_json_lines_an_array_and_gzip_hold_the_same_rows(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "lines.json").write_bytes(lines)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=2, ensure_ascii=False), encoding="utf-8")
    for name in ("a.jsonl", "a.jsonl.gz", "lines.json", "a.json"):
        assert values(tmp_path / name) == ROWS, name
    first_lines = [i + 1 for i, line in enumerate((tmp_path / "a.json").read_text().splitlines()) if line == "  {"]
    assert [row.where for row in file_rows(str(tmp_path / "a.json")).rows] == [f"{tmp_path / 'a.json'}:{line}" for line in first_lines]


def test_csv_is_read_as_python_writes_it_with_every_value_as_text(tmp_path: Path) -> None:
    import csv

    for name, dialect in (("a.csv", "excel"), ("a.tsv", "excel-tab")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["prompt", "answer", "level"], dialect=dialect, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(ROWS)
        assert values(tmp_path / name) == [{"prompt": row["prompt"], "answer": row["answer"], "level": str(row["level"])} for row in ROWS]
    # A row of two lines: the place is its first one.
    assert file_rows(str(tmp_path / "a.csv")).rows[2].where.endswith("a.csv:6")


@pytest.mark.parametrize("write", ["parquet", "feather", "stream"])
def test_tables_hold_the_same_rows_whatever_their_file_is_called(write: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet, feather = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.feather")
    path, table = tmp_path / "named.jsonl", pyarrow.Table.from_pylist(ROWS)
    if write == "parquet":
        parquet.write_table(table, path)
    elif write == "feather":
        feather.write_feather(table, str(path))
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    assert values(path) == ROWS
    assert file_rows(str(path)).rows[6].where == f"{path}, row 7"


def test_values_of_a_table_that_json_does_not_have_become_text_numbers_or_null(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    when = {"when": datetime.datetime(2026, 1, 2, 3, 4), "day": datetime.date(2026, 1, 2)}
    row = {**when, "nan": float("nan"), "whole": Decimal("12.00"), "part": Decimal("0.25")}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == [{"when": "2026-01-02T03:04:00", "day": "2026-01-02", "nan": None, "whole": 12, "part": 0.25}]
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "image": b"\x89PNG"}]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b.parquet, row 1: column 'image' holds bytes.*leave the column out"):
        values(tmp_path / "b.parquet")


def test_a_folder_of_datasets_is_read_with_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    # What was shuffled and selected is saved by indices.
    whole.shuffle(seed=1).select(range(3)).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": whole.select(range(4)), "test": whole.select(range(4, 7))}).save_to_disk(tmp_path / "splits")
    expected = whole.shuffle(seed=1).select(range(3)).to_list()
    assert [row for _, row in read_rows(Source(str(tmp_path / "saved"))).checked()] == expected
    assert [row for _, row in read_rows(Source(str(tmp_path / "splits"))).checked()] == ROWS[:4]
    assert [row for _, row in read_rows(Source(str(tmp_path / "splits"), split="test")).checked()] == ROWS[4:]
    with pytest.raises(UserError, match=r"no split 'dev'; set 'task.split' to one of train, test"):
        read_rows(Source(str(tmp_path / "splits"), split="dev"))
    with pytest.raises(UserError, match=r"no split 'dev'; set 'task.eval_split' to one of"):
        read_rows(Source(str(tmp_path / "splits"), split="dev", key="task.eval_path"))


def test_a_folder_with_the_files_of_a_dataset_of_the_hub_is_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole, folder = datasets.Dataset.from_list(ROWS), tmp_path / "mine" / "data"
    folder.mkdir(parents=True)
    whole.select(range(5)).to_parquet(folder / "train-00000-of-00001.parquet")
    whole.select(range(5, 7)).to_parquet(folder / "test-00000-of-00001.parquet")
    assert [row for _, row in read_rows(Source(str(tmp_path / "mine"))).checked()] == ROWS[:5]
    rows = read_rows(Source(str(tmp_path / "mine"), split="test"))
    assert [row for _, row in rows.checked()] == ROWS[5:] and not rows.is_file
    assert rows.digest == read_rows(Source(str(tmp_path / "mine"), split="test")).digest != read_rows(Source(str(tmp_path / "mine"))).digest


GOOD = '{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "prompt,answer\na,b\nc\n", "a.csv:3: the line has 1 cells and the header names 2 columns"),
        ("a.csv", "prompt,prompt\na,b\n", "a.csv:1: column 'prompt' is named twice"),
        ("a.csv", "prompt,\na,b\n", "a.csv:1: a column has no name"),
        ("a.csv", 'prompt,answer\n"a,b\n', "a.csv:2: not valid CSV: unexpected end of data"),
        ("a.csv", "prompt,answer\n", "a.csv' is empty"),
        ("a.csv", "", "a.csv' is empty"),
        ("a.csv", b"prompt,answer\na,b\n\xff,b\n", "a.csv:3: not UTF-8"),
        ("a.json", "[]", "a.json' is empty"),
        ("a.json", '[\n{"prompt": "a"}\n{"prompt": "b"}]', "a.json:3: not valid JSON: a comma or ] is missing"),
        ("a.json", '[\n{"prompt": "a"},\n{"prompt"}]', "a.json:3: not valid JSON"),
        ("a.json", '[\n{"prompt": "a"},', "the array has no end; the file is cut off"),
        ("a.json", '[\n{"prompt": "a"},\n3]', "a.json:3: an entry of the array is a JSON object, this is a number"),
        ("a.json", '{\n"prompt": "a"\n}', "one JSON object per line is expected"),
        ("a.txt", "prompt,answer\na,b\n", "a.txt:1: not valid JSON: Expecting value at column 1; if it is a table with commas, name it FILE.csv"),
        ("a.parquet", GOOD, "is not a Parquet file: its first bytes are"),
        ("a.parquet", b"PAR1" + b"x" * 50, "is not a whole Parquet file"),
        ("a.arrow", b"ARROW1\0\0" + b"x" * 50, "is not a whole Arrow file"),
        ("a.jsonl.gz", gzip.compress(GOOD.encode() * 1000, mtime=0)[:-9], "is not a whole gzip file"),
        ("a.jsonl", gzip.compress(b"", mtime=0), "is empty"),
        ("a.xlsx", b"PK\x03\x04rest", "a zip or Excel file; save it as CSV or JSON lines"),
        ("a.pkl", b"\x80\x04rest", "a pickle; save it as Parquet"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfdrest", "compressed with zstd; unpack it"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_with_the_fix(name: str, content: str | bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        values(tmp_path / name)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_missing_is_told_with_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"train.jsonl' does not exist; name the file in 'task.path'; the folder has train.parquet"):
        read_rows(Source(str(tmp_path / "train.jsonl")))
    with pytest.raises(UserError, match=r"does not exist; .*there is no folder"):
        read_rows(Source(str(tmp_path / "no" / "train.jsonl")))
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(UserError, match=r"is a file and has no split 'test'"):
        read_rows(Source(str(tmp_path / "a.jsonl"), split="test"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("")
    with pytest.raises(UserError, match="is the folder of a model"):
        read_rows(Source(str(tmp_path / "model")))


def test_a_hub_name_without_a_network_is_told_how_to_bring_the_folder_within_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    import huggingface_hub

    # A closed port of this machine.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    was_offline = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(UserError) as caught:
        read_rows(Source("somebody/questions", key="task.eval_path"))
    assert "'somebody/questions' is neither a file nor a folder here" in str(caught.value) and "\n" not in str(caught.value)
    assert "run 'hf download --repo-type dataset somebody/questions --local-dir questions', bring that folder here" in str(caught.value)
    assert was_offline == datasets.config.HF_HUB_OFFLINE


def test_a_dataset_of_the_hub_is_read_by_name_and_afterwards_from_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    script, root = Path(__file__).with_name("hub_dataset.py"), Path(__file__).parents[2]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    given = json.loads(done.stdout)
    assert given["train"] == given["cached"] == [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(5)]
    assert given["test"] == [{"question": "t", "answer": "#### 1"}]
    assert given["split"] == "'me/mine' has no split 'dev'; set 'task.split' to one of train, test"
    assert given["subset"].endswith("BuilderConfig 'socratic' not found. Available: ['main']; set 'task.subset' to one of 'main'")
    assert "correct 'task.path' (there is no such file or folder here), or log in with 'hf auth login'" in given["missing"]
    assert "run 'hf download --repo-type dataset me/other --local-dir other'" in given["offline"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_flipped_and_cut_bytes_of_a_table_are_one_line_or_rows(kind: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, table, draw = tmp_path / "a", pyarrow.Table.from_pylist(ROWS), random.Random(4)
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    whole, refused = path.read_bytes(), 0
    for number in range(150):
        content = bytearray(whole[: draw.randrange(8, len(whole))] if number % 3 == 0 else whole)
        for _ in range(number % 4):
            content[draw.randrange(8, len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            file_rows(str(path)).checked()
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and str(path) in str(error)
    assert refused > 50
