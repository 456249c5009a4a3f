"""Section ``machine``: threads, memory, device, kernels and deadlines that a run may use on this machine."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.engine import AttentionBackend
from tandem.config.limits import MOST_GIB, check_seconds
from tandem.config.trainer import TrainDtype
from tandem.types.errors import UserError

MOST_THREADS = 1024
"""With several thousand threads OpenMP cannot start them and aborts the process."""


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """The resources that a run may use on this machine."""

    threads: int = 0
    """Threads of each worker. 0: all cores available to this process (the workers take turns), and half of them with `rollout.max_staleness`, where
    they do not. The ranks of a run in several processes share them."""
    memory_gib: float = 0.0
    """Memory limit of the run on this machine, in GiB. 0: 80 % of the free memory at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cuda` gives each rank a GPU, which in a pod the engine's ranks share. `auto` uses GPUs if there are any, in a pod the CPU. See
    `training.md`, On GPUs."""
    kernels: Literal["auto", "cpu", "reference"] = "auto"
    """`cpu` selects the C++ kernels, `reference` plain torch; `auto` selects the C++ kernels if a compiler is installed, and Triton's on a
    GPU."""
    attention: AttentionBackend = "auto"
    """Attention over packed sequences: `auto` is the kernels' own, or in training on data torch's in 16 bits on a GPU; `torch`, `flash3`,
    `flash4` and `xformers` are those packages' kernels, on a GPU with a 16-bit `trainer.precision` or, in a pod, `trainer.dtype`."""
    fork_workers: bool = True
    """Ranks and workers are forked from a process that has imported torch once, so that a restart imports nothing. That process uses no GPU, and where it has a
    second thread or has opened a GPU's device file it forks none, with a warning. `false`: each is started by itself, and imports for itself."""
    call_deadline_s: float = 1800.0
    """Seconds that one phase of a pod's step may take; then the run names the blocked worker and ends."""

    @property
    def pods_have_cpu_kernels(self) -> bool:
        """Whether a pod computes with the C++ kernels, if a compiler is installed."""
        return self.device != "cuda" and self.kernels != "reference"

    def check(self) -> None:
        if not 0 <= self.threads <= MOST_THREADS:
            raise UserError(f"'machine.threads' is {self.threads}; it must be 0 (all cores) or at most {MOST_THREADS}")
        if not 0 <= self.memory_gib <= MOST_GIB:
            raise UserError(f"'machine.memory_gib' is {self.memory_gib}; it must be 0 (automatic) or more, at most {MOST_GIB}")
        if self.device == "cuda" and self.kernels == "cpu":
            raise UserError("'machine.kernels' is 'cpu' and machine.device is 'cuda'; set machine.kernels to auto or reference")
        if self.device == "cpu" and self.attention != "auto":
            raise UserError(f"'machine.attention' is '{self.attention}', which needs a GPU, and machine.device is 'cpu'; set one of them to auto")
        check_seconds("machine", self, "call_deadline_s")

    def check_dtype(self, dtype: TrainDtype) -> None:
        """Raises ``UserError`` if the kernels cannot compute in ``trainer.dtype``."""
        if self.kernels == "cpu" and dtype != "float32":
            raise UserError(f"'machine.kernels' is 'cpu', which computes in float32, and trainer.dtype is '{dtype}'; set machine.kernels to auto")
