"""The GPUs of this machine, and which device a run computes on. Imports no torch: a controller that asked CUDA itself would hold
memory of every GPU for as long as it lives, so a process of its own is asked."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from tandem.config.machine import MachineConfig
from tandem.types.errors import RunError, UserError

Device = Literal["cpu", "cuda"]
DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""There where NVIDIA's driver is; the second under Windows' Linux."""
PROBE_S = 120.0


class Gpu(NamedTuple):
    """What torch says of one GPU that this process may use."""

    name: str
    free_bytes: int
    total_bytes: int


class Probe(NamedTuple):
    """``why``: what torch lacks where it finds no GPU."""

    gpus: tuple[Gpu, ...]
    why: str = ""


@cache
def probe() -> Probe:
    """The GPUs, in the order in which ranks take them."""
    try:
        done = subprocess.run([sys.executable, "-m", "tandem.runtime.machine.gpus"], capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return Probe((), f"torch did not say within {PROBE_S:.0f} s what GPUs there are")
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Probe((), (done.stderr.strip().splitlines() or ["torch could not be asked"])[-1])
    return Probe(tuple(Gpu(*each) for each in found["gpus"]), found["why"])


def chosen_device(machine: MachineConfig, ranks: int) -> Device:
    """``machine.device`` for a run of so many ranks, all of this machine; each takes a GPU of its own. Raises ``UserError`` where ``cuda`` is
    asked for and there are too few, and where ``machine.attention`` needs a GPU and there is none."""
    device = _device(machine, ranks)
    if device == "cpu" and machine.attention != "auto":
        raise UserError(f"'machine.attention' is '{machine.attention}', which needs a GPU, and none is found; set it to auto")
    return device


def _device(machine: MachineConfig, ranks: int) -> Device:
    if machine.device == "cpu" or (machine.device == "auto" and (machine.kernels == "cpu" or not any(path.exists() for path in DRIVER))):
        return "cpu"
    found = probe()
    if len(found.gpus) >= ranks:
        return "cuda"
    if machine.device == "auto" and not found.gpus:
        return "cpu"
    if not found.gpus:
        raise UserError(f"'machine.device' is 'cuda' and no GPU is found: {found.why}; use a machine with one, or set machine.device to cpu")
    raise UserError(
        f"'machine.device' is '{machine.device}' and this run has {ranks} ranks; torch finds {len(found.gpus)} GPUs, and each rank takes one: lower "
        "the product of section 'parallel', or set machine.device to cpu"
    )


ROOM_SHARE, CONTEXT_BYTES = 0.95, 1 << 30
"""Of a GPU's free memory, what a run may count on: fragments are not usable, and CUDA, its libraries and NCCL's buffers take the rest."""


def check_gpu_memory(needed: int, ranks: int) -> None:
    """Refuse a run of which each rank needs so many bytes of its GPU."""
    for number, gpu in enumerate(probe().gpus[:ranks]):
        free = int(ROOM_SHARE * gpu.free_bytes) - CONTEXT_BYTES
        if needed > free:
            raise RunError(
                f"this run needs {needed / 2**30:.2f} GiB of each GPU and GPU {number} ({gpu.name}) has {max(free, 0) / 2**30:.2f} left for it; lower "
                "trainer.micro_batch_tokens, set trainer.recompute to full, trainer.offload to cpu, or cut the model with section 'parallel'"
            )


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
