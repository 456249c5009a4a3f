"""What is watched of a node while a run works: GPU errors, the memory of processes, and whether processes get their turn."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvidia_programs import NvidiaPrograms
from watched_run import throttled

from tandem.config.health import HealthConfig
from tandem.jobs.exposed.run_metrics import RunMetrics
from tandem.layout.mesh import MeshShape
from tandem.runtime.callback import Callback
from tandem.runtime.health.gauges import METRICS
from tandem.runtime.health.gpu_faults import GpuFaults, boot_s
from tandem.runtime.health.memory_growth import FEWEST, LEAST_BYTES, MemoryGrowth, slope
from tandem.runtime.health.node_watch import NodeReading, NodeWatch
from tandem.runtime.health.run_health import RunHealth

GIB_PER_H = 2**30 / 3600
XID = "NVRM: Xid (PCI:0000:18:00): {}, {}"


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaPrograms:
    programs = NvidiaPrograms(tmp_path / "bin")
    monkeypatch.setenv("PATH", programs.path)
    return programs


# -- GPUs ------------------------------------------------------------------------------------------------------------------


def test_fatal_are_only_errors_that_come_while_the_run_works(nvidia: NvidiaPrograms) -> None:
    nvidia.smi(nvidia.healthy.replace("<dram_uncorrectable>0", "<dram_uncorrectable>2"))
    nvidia.log(f"[{boot_s() - 100:.6f}] {XID.format(79, 'GPU has fallen off the bus.')}", XID.format(119, "of any age"))
    watch = GpuFaults()
    first = watch.look()
    assert first.fatal == [] and first.xids == {} and first.faults == {"GPU 00000000:18:00.0 (NVIDIA H100 80GB HBM3)": "2 uncorrected ECC errors"}
    nvidia.log(f"[{boot_s() - 100:.6f}] {XID.format(79, 'GPU has fallen off the bus.')}", f"[{boot_s() + 1:.6f}] {XID.format(31, 'pid=1')}")
    assert watch.look().fatal == [], "a program's error is none of the machine"
    nvidia.smi(nvidia.healthy.replace("<dram_uncorrectable>0", "<dram_uncorrectable>3"))
    nvidia.log(f"[{boot_s() + 2:.6f}] {XID.format(48, 'double bit error')}")
    found = watch.look()
    assert found.fatal == [
        "XID 48 of GPU 0000:18:00 (double-bit ECC error): double bit error",
        "GPU 00000000:18:00.0 (NVIDIA H100 80GB HBM3) has had 1 uncorrected ECC errors since the last look",
    ]
    assert found.xids == {31: 1, 48: 1} and watch.look().fatal == []


def test_a_row_that_cannot_be_remapped_is_fatal_and_a_program_that_fails_is_a_fault(nvidia: NvidiaPrograms) -> None:
    watch = GpuFaults()
    assert watch.look().faults == {}
    nvidia.smi(nvidia.healthy.replace("<remapped_row_failure>No", "<remapped_row_failure>Yes"))
    assert [text.partition(": ")[2] for text in watch.look().fatal] == ["the remapping of a row failed"]
    (nvidia.folder / "nvidia-smi").write_text("#!/bin/sh\necho 'Unable to determine the device handle'; exit 255\n")
    assert "Unable to determine the device handle" in watch.look().faults["all GPUs"]
    # A machine without GPUs may have the program, which fails there.
    assert GpuFaults().look().faults == {}


# -- memory ----------------------------------------------------------------------------------------------------------------


def grown(sizes: Callable[[int], float], looks: int = 60, limit: float = 1.0) -> bool:
    watch = MemoryGrowth(limit * GIB_PER_H)
    return [watch.look(30.0 * look, {"p": int(sizes(look))}) for look in range(looks)][-1]["p"].is_leak


def test_a_process_that_grows_without_end_is_a_leak_and_a_start_a_jump_or_a_saw_is_none() -> None:
    mib = 2**20
    assert grown(lambda look: 500 * mib + 10 * mib * look)
    assert grown(lambda look: 500 * mib + 10 * mib * look + 50 * mib * (look % 3))
    assert not grown(lambda look: 500 * mib + 10 * mib * look, limit=2.0), "1.17 GiB an hour"
    assert not grown(lambda look: min(2000, 500 + 100 * look) * mib), "a start"
    assert not grown(lambda look: (500 + 3000 * (look > 30)) * mib), "one large batch"
    assert not grown(lambda look: 500 * mib + 100 * mib * (look % 8)), "a cache that is emptied"
    assert not grown(lambda look: 500 * mib + 10 * mib * look, looks=FEWEST - 1), "too few looks"
    assert slope([(0.0, 0), (1.0, 10), (2.0, 20), (3.0, 1000)]) == pytest.approx(10.0, rel=40)


def test_the_memory_of_a_real_process_is_measured_and_named_when_it_leaks(tmp_path: Path) -> None:
    leak = "import time\nheld = []\nprint(1, flush=True)\nwhile True:\n    held.append(bytearray(6 * 2**20))\n    time.sleep(0.05)\n"
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "leaking.out").open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", leak], stdout=subprocess.PIPE, stderr=sink)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        readings = list[NodeReading]()
        with NodeWatch("n1", HealthConfig(every_s=0.1), readings.append, logs_of=tmp_path, own="the test", gpus=None):
            ends = time.monotonic() + 60
            while not any(reading.leaks for reading in readings):
                assert time.monotonic() < ends, readings[-1:]
                time.sleep(0.05)
        name = f"leaking ({process.pid})"
        assert readings[-1].leaks == [name] and readings[-1].processes[name][0] >= LEAST_BYTES and readings[-1].processes[name][1] > 2**20
        assert NodeReading.from_json(readings[-1].to_json()) == readings[-1]
    finally:
        process.kill()
        process.wait()


# -- what becomes of it ----------------------------------------------------------------------------------------------------


class Told(Callback):
    def __init__(self) -> None:
        self.lines = list[str]()
        self.metrics = RunMetrics("r", "grpo", None)

    def message(self, text: str) -> None:
        self.lines.append(text)

    def health(self, readings: Any) -> None:
        self.metrics.health(readings)


def test_faults_become_events_lines_and_metrics_once_and_are_over_once() -> None:
    events, unfit, told = list[tuple[str, dict[str, Any]]](), list[tuple[str, str]](), Told()
    health = RunHealth(MeshShape(), HealthConfig(), lambda kind, detail: events.append((kind, detail)), told, lambda *each: unfit.append(each))
    gpu = {"bus": "0:18", "name": "H100", "temperature_c": 91, "power_w": 700.5, "utilization_percent": 50, "uncorrected": 3}
    bad = {"gpus": [gpu], "faults": {"GPU 0:18 (H100)": "throttled: hardware thermal slowdown"}, "fatal": ["XID 79 of GPU 0:18"], "xids": {"79": 1},
           "processes": {"worker (7)": (2**31, 2**20)}, "leaks": ["worker (7)"], "lag_s": 6.5, "ranks": {"worker (7)": 3}}  # fmt: skip
    for at_s in (1.0, 1.0, 2.0):
        health.reading(NodeReading("n2", at_s, **bad))
        health.look(4, [])
    assert [kind for kind, _ in events] == ["node_unfit", "gpu_fault", "memory_growth"] and unfit == [("n2", "XID 79 of GPU 0:18")]
    assert all(detail["step"] == 4 and detail["node"] == "n2" and "n2" in detail["reason"] for _, detail in events)
    assert told.lines[0] == "step 4: node n2 is not fit any more: XID 79 of GPU 0:18"
    assert told.lines[2].startswith("step 4: node n2: the memory of worker (7) grows without end: 2.00 GiB now, and 3.52 GiB more each hour")
    text = told.metrics.text().decode()
    for line in (
        'tandem_node_unfit{job="grpo",node="n2",run="r"} 1.0', 'tandem_gpu_fault{gpu="0:18",job="grpo",node="n2",run="r"} 1.0',
        'tandem_gpu_temperature_celsius{gpu="0:18",job="grpo",node="n2",run="r"} 91.0', 'tandem_gpu_power_watts{gpu="0:18",job="grpo",node="n2",run="r"} 700.5',
        'tandem_gpu_utilization_ratio{gpu="0:18",job="grpo",node="n2",run="r"} 0.5', 'tandem_gpu_xid_errors{job="grpo",node="n2",run="r",xid="79"} 1.0',
        'tandem_gpu_uncorrected_ecc_errors{gpu="0:18",job="grpo",node="n2",run="r"} 3.0', 'tandem_node_loop_lag_seconds{job="grpo",node="n2",run="r"} 6.5',
        'tandem_process_memory_leak{job="grpo",node="n2",pid="7",process="worker",rank="3",run="r"} 1.0',
        'tandem_process_memory_growth{job="grpo",node="n2",pid="7",process="worker",rank="3",run="r"} 1.048576e+06',
        'tandem_process_resident_memory_bytes{job="grpo",node="n2",pid="7",process="worker",rank="3",run="r"} 2.147483648e+09',
    ):  # fmt: skip
        assert line in text.splitlines() or _same_labels(line, text), line
    for at_s in (3.0, 4.0, 5.0):
        health.reading(NodeReading("n2", at_s, gpus=[gpu], processes=bad["processes"]))
        health.look(5, [])
    assert sorted(kind for kind, _ in events[3:]) == ["gpu_fault_over", "memory_growth_over"]


def test_the_memory_of_a_process_is_one_series_though_two_watches_tell_of_it() -> None:
    told, own = Told(), f"python ({os.getpid()})"
    health = RunHealth(MeshShape(), HealthConfig(), lambda kind, detail: None, told)
    for node in (socket.gethostname(), "n2"):
        health.reading(NodeReading(node, 1.0, processes={own: (1, 0.0)}))
    health.look(0, [])
    series = [line for line in told.metrics.text().decode().splitlines() if line.startswith("tandem_process_resident_memory_bytes{")]
    mine = [line for line in series if f'pid="{os.getpid()}"' in line]
    assert len(mine) == 2 and all('rank=""' in line for line in mine)
    here, there = sorted(mine, key=lambda line: 'node="n2"' in line)
    assert float(here.split()[-1]) > 1e7 and there.endswith(" 1.0"), "of this machine the value of now, of another what its watch told"


def _same_labels(line: str, text: str) -> bool:
    """Returns whether ``text`` has the series of ``line`` with its labels in another order."""

    def parts(one: str) -> tuple[str, frozenset[str], str]:
        name, _, rest = one.partition("{")
        labels, _, value = rest.partition("} ")
        return name, frozenset(labels.split(",")), value

    return parts(line) in {parts(each) for each in text.splitlines() if "{" in each}


def test_every_metric_of_health_is_exposed_under_its_name() -> None:
    metrics = RunMetrics("r", "grpo", None)
    metrics.health([[metric.name, dict.fromkeys(metric.labels, "x"), 1.0] for metric in METRICS])
    shown = metrics.text().decode()
    for metric in METRICS:
        assert f"{metric.name}{'_total' if metric.kind == 'counter' else ''}{{" in shown and f"# TYPE {metric.name}" in shown


def test_a_process_that_does_not_get_its_turn_is_measured(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom tandem.config.health import HealthConfig\nfrom tandem.runtime.health.node_watch import NodeWatch\n"
        "with NodeWatch('n1', HealthConfig(every_s=0.3), lambda reading: print(reading.lag_s, flush=True), logs_of=Path('.'), own='it', gpus=None):\n"
        "    time.sleep(120)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "it looks at once"
        with throttled(process.pid, period_s=1.2, share=0.9):
            assert any(float(process.stdout.readline() or "nan") > 0.5 for _ in range(6))
    finally:
        process.kill()
        process.wait()
