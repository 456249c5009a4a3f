"""What the bits of a step depend on besides its inputs: recorded with a run, compared before it goes on."""

from collections.abc import Mapping

import torch

from tandem.types import UserError

NAMES = {
    "torch": "the torch build",
    "instructions": "the processor's instruction set",
    "threads": "the number of threads (machine.threads)",
    "kernels": "the set of kernels (machine.kernels)",
}


def numerics(kernels: str) -> dict[str, str]:
    """This process's numerics; ``kernels`` is the name of the set that the model computes with."""
    return {
        "torch": str(torch.__version__),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "kernels": kernels,
    }


def check_numerics(recorded: Mapping[str, str], present: Mapping[str, str]) -> None:
    """Raise ``UserError`` where a run would go on with other bits than it began with."""
    for key, meaning in NAMES.items():
        if recorded.get(key) != present.get(key):
            raise UserError(
                f"{meaning} was '{recorded.get(key)}' when the run was saved and is '{present.get(key)}' now, "
                "so it would go on with other numbers; restore it, or start a new run from the checkpoint's folder"
            )
