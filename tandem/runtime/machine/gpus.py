"""The GPUs of this machine, and the device of a run. Imports no torch: a controller that initialised CUDA would hold memory on every GPU for
its whole life, so a separate process lists the GPUs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from tandem.config.machine import MachineConfig
from tandem.types.errors import RunError, UserError

Device = Literal["cpu", "cuda"]
DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of NVIDIA's driver; the second one in the Windows Subsystem for Linux."""
PROBE_S = 120.0
PARALLEL = "the product of section 'parallel'"


class Gpu(NamedTuple):
    """A GPU that this process may use, as torch reports it."""

    name: str
    free_bytes: int
    total_bytes: int


class Probe(NamedTuple):
    """The GPUs that torch finds. ``why``: the reason where it finds none."""

    gpus: tuple[Gpu, ...]
    why: str = ""


@cache
def probe() -> Probe:
    """Returns the GPUs, in the order in which ranks take them. Raises ``RunError`` if the process that lists them was killed twice: a run must not
    take another device because of it."""
    for _ in range(2):
        try:
            done = subprocess.run([sys.executable, "-m", "tandem.runtime.machine.gpus"], capture_output=True, text=True, timeout=PROBE_S, check=False)
        except subprocess.TimeoutExpired:
            return Probe((), f"torch did not list the GPUs within {PROBE_S:.0f} s")
        if done.returncode >= 0:
            break
    else:
        raise RunError("the process that lists the GPUs was killed twice; free memory, or set machine.device to cpu")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Probe((), (done.stderr.strip().splitlines() or ["torch could not list the GPUs"])[-1])
    return Probe(tuple(Gpu(*each) for each in answer["gpus"]), answer["why"])


def pod_device(machine: MachineConfig) -> Device:
    """Returns the device of a pod, without a look at the machine: ``auto`` is the CPU."""
    return "cuda" if machine.device == "cuda" else "cpu"


def check_pod_device(machine: MachineConfig, ranks: int, engine_ranks: int) -> Device:
    """Returns ``pod_device`` of a pod of ``ranks`` trainer ranks and ``engine_ranks`` of all its engines, of which rank r uses GPU r in both.
    Raises ``UserError`` if there are too few GPUs."""
    lower = PARALLEL if ranks >= engine_ranks else "rollout.workers or rollout.engine.tensor_parallel_size"
    return chosen_device(replace(machine, device=pod_device(machine)), max(ranks, engine_ranks), lower)


def visible_gpus(first: int, count: int) -> dict[str, str]:
    """Returns the environment of a process that sees only ``count`` of the GPUs that this process may use, from ``first`` on."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = own.split(",") if own else [str(number) for number in range(first + count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + count])}


def chosen_device(machine: MachineConfig, ranks: int, lower: str = PARALLEL) -> Device:
    """Returns the device of a run of ``ranks`` ranks on this machine, each of which takes one GPU. ``lower``: the key that says how many. Raises
    ``UserError`` where ``machine.device`` is ``cuda`` and there are too few GPUs, and where ``machine.attention`` needs a GPU and there is none."""
    device = _device(machine, ranks, lower)
    if device == "cpu" and machine.attention != "auto":
        raise UserError(f"'machine.attention' is '{machine.attention}', which needs a GPU, and none is found; set it to auto")
    return device


def _device(machine: MachineConfig, ranks: int, lower: str) -> Device:
    if machine.device == "cpu" or (machine.device == "auto" and (machine.kernels == "cpu" or not any(path.exists() for path in DRIVER))):
        return "cpu"
    probed = probe()
    if len(probed.gpus) >= ranks:
        return "cuda"
    if machine.device == "auto" and not probed.gpus:
        return "cpu"
    if not probed.gpus:
        raise UserError(f"'machine.device' is 'cuda' and no GPU is found: {probed.why}; use a machine with one, or set machine.device to cpu")
    raise UserError(
        f"'machine.device' is '{machine.device}' and this run has {ranks} ranks; torch finds {len(probed.gpus)} GPUs, and each rank takes one: lower "
        f"{lower}, or set machine.device to cpu"
    )


ROOM_SHARE, CONTEXT_BYTES = 0.95, 1 << 30
"""The share of a GPU's free memory that a run can use, less a constant for CUDA, its libraries and NCCL's buffers; fragments are lost."""


def room(free_bytes: int) -> int:
    """Returns the bytes that one process can use of a GPU with so many free."""
    return int(ROOM_SHARE * free_bytes) - CONTEXT_BYTES


def least_room(ranks: int) -> int:
    """Returns the bytes that a process can use on each of the first ``ranks`` GPUs."""
    return min(room(gpu.free_bytes) for gpu in probe().gpus[:ranks])


FIX = "lower trainer.micro_batch_tokens, set trainer.recompute to full, trainer.offload to cpu, or shard the model with section 'parallel'"


def check_gpu_memory(needed: int, ranks: int, fix: str = FIX) -> None:
    """Raises ``RunError`` where one of the first ``ranks`` GPUs has fewer than ``needed`` bytes free."""
    for number, gpu in enumerate(probe().gpus[:ranks]):
        free = room(gpu.free_bytes)
        if needed > free:
            raise RunError(
                f"this run needs {needed / 2**30:.2f} GiB of each GPU and GPU {number} ({gpu.name}) has {max(free, 0) / 2**30:.2f} GiB free; {fix}"
            )


def describe_gpus(ranks: int, needed: int) -> str:
    """Returns a line on the GPUs of ``ranks`` ranks and the bytes that are predicted of each."""
    names = sorted({gpu.name for gpu in probe().gpus[:ranks]})
    return f"device: {ranks} x {', '.join(names)}, predicted {needed / 2**20:,.0f} MiB of each"


def _main() -> None:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch {torch.__version__} is built for CUDA {built} and sees no device" if built else f"torch {torch.__version__} is built without CUDA"
        print(json.dumps({"gpus": [], "why": why}))
        return
    gpus = [(torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)) for i in range(torch.cuda.device_count())]
    print(json.dumps({"gpus": gpus, "why": ""}))


if __name__ == "__main__":
    _main()
