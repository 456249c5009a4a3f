"""What one rank of a pipeline stage holds, of any trainer. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one rank. ``parameters``, ``gradients``, ``optimizer`` and ``master_weights``: from one step to the next. ``saved``: what one forward pass over
    its layers keeps for its backward pass, and ``most_saved`` what all of them may have in memory. ``working``: beside it while the backward pass is in the
    largest layer. ``reduced``: gradients on their way to other ranks; ``buffers``: of the communication itself. ``kept``: freed memory that the allocator
    keeps, as a share of what comes and goes, or with ``keeps_states`` of everything. ``context``: the process, its libraries and its driver without any
    of this. ``staged``: the copy that a checkpoint is written from. ``holes``: in the allocator's memory, of a known size, beside ``kept``."""

    parameters: int
    gradients: int
    optimizer: int
    master_weights: int
    saved: float
    working: float
    logits: float
    gathered: float
    reduced: float
    buffers: float
    kept: float
    context: int
    keeps_states: bool = False
    most_saved: float = float("inf")
    staged: int = 0
    holes: float = 0.0

    @property
    def states(self) -> int:
        """Bytes from one step to the next."""
        return self.parameters + self.gradients + self.optimizer + self.master_weights
