"""The device of a run, and what is refused before it begins."""

from pathlib import Path

import pytest

from tandem.config.machine import MachineConfig
from tandem.runtime.machine import gpus
from tandem.runtime.machine.gpus import Gpu, Probe, check_gpu_memory, check_pod_device, chosen_device, pod_device
from tandem.types import RunError, UserError

GIB = 1 << 30


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, driver: bool = True, why: str = "") -> None:
    """A machine with the given number of GPUs of 10 GiB, of which 8 are free, and 4 on the last one."""
    free = [8 * GIB] * (count - 1) + [4 * GIB]
    found = Probe(tuple(Gpu("NVIDIA H200", free[i], 10 * GIB) for i in range(count)), why)
    monkeypatch.setattr(gpus, "probe", lambda: found)
    monkeypatch.setattr(gpus, "DRIVER", (tmp_path if driver else tmp_path / "none",))


@pytest.mark.parametrize(
    ("device", "kernels", "count", "ranks", "chosen"),
    [
        ("auto", "auto", 0, 1, "cpu"), ("auto", "auto", 1, 1, "cuda"), ("auto", "auto", 4, 4, "cuda"), ("auto", "cpu", 4, 4, "cpu"),
        ("auto", "reference", 1, 1, "cuda"), ("cpu", "auto", 4, 2, "cpu"), ("cuda", "auto", 4, 2, "cuda"),
    ],
)  # fmt: skip
def test_each_choice_finds_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, kernels: str, count: int, ranks: int, chosen: str
) -> None:
    pretend(monkeypatch, tmp_path, count)
    assert chosen_device(MachineConfig(device=device, kernels=kernels), ranks) == chosen  # type: ignore[arg-type]


def test_without_a_driver_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 0, driver=False)
    monkeypatch.setattr(gpus, "probe", lambda: pytest.fail("torch was asked"))
    assert chosen_device(MachineConfig(), 2) == "cpu"


def test_a_run_takes_no_other_device_because_the_process_that_lists_the_gpus_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count = tmp_path / "count"
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho x >> {count}\nif [ $(wc -l < {count}) -le $KILLED ]; then kill -9 $$; fi\necho \'{{"gpus": [["NVIDIA H200", 1, 2]], "why": ""}}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(gpus.sys, "executable", str(program))
    monkeypatch.setenv("KILLED", "1")
    assert gpus.probe.__wrapped__() == Probe((Gpu("NVIDIA H200", 1, 2),))
    monkeypatch.setenv("KILLED", "9")
    with pytest.raises(RunError, match="killed twice"):
        gpus.probe.__wrapped__()


def test_too_few_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 0, why="torch is built without CUDA")
    with pytest.raises(UserError, match=r"'machine.device' is 'cuda' and no GPU is found: torch is built without CUDA; .* machine.device to cpu$"):
        chosen_device(MachineConfig(device="cuda"), 1)
    pretend(monkeypatch, tmp_path, 2)
    for device in ("cuda", "auto"):
        with pytest.raises(UserError, match=f"^'machine.device' is '{device}' and this run has 4 ranks; torch finds 2 GPUs"):
            chosen_device(MachineConfig(device=device), 4)  # type: ignore[arg-type]


def test_a_pod_uses_gpus_only_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 2)
    for device, expected in (("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")):
        machine = MachineConfig(device=device)  # type: ignore[arg-type]
        assert pod_device(machine) == check_pod_device(machine, 2, 1) == check_pod_device(machine, 1, 2) == expected


def test_a_pod_needs_as_many_gpus_as_its_larger_sidecar_has_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 2)
    for ranks, engine_ranks, key in ((4, 2, "the product of section 'parallel'"), (1, 4, "rollout.workers or rollout.engine.tensor_parallel_size")):
        with pytest.raises(UserError, match=f"this run has 4 ranks; torch finds 2 GPUs, and each rank takes one: lower {key}, or set"):
            check_pod_device(MachineConfig(device="cuda"), ranks, engine_ranks)


def test_kernels_of_the_cpu_are_refused_on_a_gpu() -> None:
    with pytest.raises(UserError, match=r"'machine.kernels' is 'cpu' and machine.device is 'cuda'; set machine.kernels to auto"):
        MachineConfig(device="cuda", kernels="cpu").check()


def test_a_gpu_that_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 2)
    check_gpu_memory(2 * GIB, 2)
    check_gpu_memory(6 * GIB, 1)
    with pytest.raises(RunError, match=r"needs 6.00 GiB of each GPU and GPU 1 \(NVIDIA H200\) has 2.80 GiB free; .*trainer.offload to cpu"):
        check_gpu_memory(6 * GIB, 2)


@pytest.mark.full
def test_torch_is_asked_in_a_process_of_its_own() -> None:
    found = gpus.probe()
    assert found.gpus or "torch" in found.why
