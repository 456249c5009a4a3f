"""Section ``machine``: threads, memory, device, kernels and deadlines: what a run may use of the machine it is on."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.engine import AttentionBackend
from tandem.types.errors import UserError

MOST_THREADS = 1024
"""Past some thousands OpenMP cannot start them and takes the process down."""


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """``threads``: of each worker, 0 takes all cores that this process may use (the workers take turns);
    the ranks of a run in several processes divide them.
    ``memory_gib``: what both sidecars may take together, 0 takes 80 % of what is free at the start.
    ``device``: what a run on data computes on: ``auto`` takes a GPU (``cuda``) where there is one, each rank its own, else the CPU. A pod
    computes on the CPU.
    ``kernels``: ``auto`` takes the C++ kernels where a compiler is found, and Triton's on a GPU. ``call_deadline_s``: the longest that one phase
    of a step may take before the run says who is stuck. ``max_recoveries``: dead workers and shims replaced in one run
    before it gives up."""

    threads: int = 0
    memory_gib: float = 0.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "cpu", "reference"] = "auto"
    attention: AttentionBackend = "auto"
    call_deadline_s: float = 1800.0
    max_recoveries: int = 20

    def check(self) -> None:
        if not 0 <= self.threads <= MOST_THREADS:
            raise UserError(f"'machine.threads' is {self.threads}; it must be 0 (all cores) or at most {MOST_THREADS}")
        if self.memory_gib < 0:
            raise UserError(f"'machine.memory_gib' is {self.memory_gib}; it must be 0 (automatic) or more")
        if self.device == "cuda" and self.kernels == "cpu":
            raise UserError("'machine.kernels' is 'cpu' and machine.device is 'cuda'; set machine.kernels to auto or reference")
        if self.device == "cpu" and self.attention != "auto":
            raise UserError(f"'machine.attention' is '{self.attention}', which needs a GPU, and machine.device is 'cpu'; set one of them to auto")
        if self.call_deadline_s <= 0:
            raise UserError(f"'machine.call_deadline_s' is {self.call_deadline_s}; it must be above 0")
        if self.max_recoveries < 0:
            raise UserError(f"'machine.max_recoveries' is {self.max_recoveries}; it must be 0 or more")
