"""The hardware that ``--gpu`` names: a file, the GPUs of this machine, or what is measured here."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tandem.cli.plan import hardware_named
from tandem.estimate.hardware.load import load_hardware
from tandem.jobs.checks import planned_machine as planned
from tandem.runtime.machine.available_memory import total_bytes
from tandem.runtime.machine.gpus import Gpu, Probe, probe
from tandem.types.errors import UserError


def test_a_machine_with_gpus_of_a_known_kind_is_planned_with_their_file_and_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("NVIDIA H200", 1, 150_000_000_000), Gpu("NVIDIA H200", 1, 149_000_000_000))
    monkeypatch.setattr(planned, "chosen_device", lambda machine, ranks: "cuda")
    monkeypatch.setattr(planned, "probe", lambda: Probe(gpus))
    assert hardware_named("This-Machine") == replace(load_hardware("H200"), gpus_per_node=2, memory_bytes=149_000_000_000)


def test_unknown_gpus_are_measured_and_a_file_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "chosen_device", lambda machine, ranks: "cuda")
    monkeypatch.setattr(planned, "probe", lambda: Probe((Gpu("GPU of tomorrow", 1, 2),)))
    monkeypatch.setattr(planned, "this_machine", lambda machine: "measured")
    assert hardware_named("this-machine") == "measured"  # type: ignore[comparison-overlap]
    assert hardware_named("h100-80gb") == load_hardware("H100-80GB")
    with pytest.raises(UserError, match="name it with --gpu alone"):
        load_hardware("this-machine")


@pytest.mark.full
def test_a_plan_for_this_machine_has_what_is_measured_on_it() -> None:
    if probe().gpus:
        pytest.skip("this machine has a GPU: its CPU is not what is planned for")
    sizes = "--hidden 512 --layers 4 --heads 8 --kv-heads 8 --ffn 2048 --vocab 8192 --seq 512 --global-batch 8 --precision fp32 --dp 2 --gpus 2"
    command = [sys.executable, "-m", "tandem", "plan", "--json", "--gpu", "this-machine", *sizes.split()]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert answer["gpu"] == "this-machine" and 0.05 < answer["step_seconds"] < 300
    serving = [sys.executable, "-m", "tandem", "plan", "serving", "--json", "--gpu", "this-machine", *sizes.split()[:12], "--requests-per-s", "0.1"]
    pool = json.loads(subprocess.run(serving, check=True, capture_output=True, text=True).stdout)
    assert pool["gpu"] == "this-machine"
    hardware = hardware_named("this-machine")
    assert hardware.memory_bytes == total_bytes() and hardware.sources["memory_bandwidth"].startswith("measured")
