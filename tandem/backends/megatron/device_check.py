"""Whether the environment of the Megatron sidecar has the CUDA device that Megatron-Core takes for granted. Imports neither it nor torch."""

import subprocess

from tandem.backends.environment import python_of
from tandem.types import UserError

PROBE = "import torch; torch.cuda.current_device()"


def check_device() -> None:
    """Raises ``UserError`` before any work unless the environment's torch has a CUDA device. It takes the seconds of an import of torch."""
    probed = subprocess.run([str(python_of("megatron")), "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if probed.returncode:
        raise no_device(([line for line in probed.stderr.splitlines() if line.strip()] or ["torch cannot be imported"])[-1])


def no_device(reason: str) -> UserError:
    """Returns the error of a machine without CUDA; ``reason``: torch's."""
    return UserError(
        f"'trainer.backend' is 'megatron', and Megatron-Core needs a CUDA device ({reason}); set trainer.backend to tandem, which also trains on a CPU"
    )
