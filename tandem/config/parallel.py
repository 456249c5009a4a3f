"""Section ``parallel``: how many processes train one model, and what each of them holds."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.limits import check_at_least_one
from tandem.config.trainer import TrainerConfig
from tandem.types.errors import UserError

ScheduleName = Literal["1f1b", "interleaved", "gpipe"]
AXES = ("data", "tensor", "pipeline", "context", "expert")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many processes train one model, and what each of them holds; `training.md` says how to choose."""

    data: int = 1
    """Ranks between which every batch is divided."""
    tensor: int = 1
    """Ranks between which every matrix is divided."""
    pipeline: int = 1
    """Ranks between which the layers are divided."""
    context: int = 1
    """Ranks between which the tokens of a micro-batch are divided."""
    expert: int = 1
    """Ranks between which the experts of a layer are divided; it divides `data` x `context`."""
    schedule: ScheduleName = "1f1b"
    """`1f1b`, `interleaved` or `gpipe`: the order in which a pipeline works."""
    virtual_stages: int = 1
    """Stages on each rank of an interleaved pipeline, 2 or more there."""
    pipeline_layers: tuple[int, ...] = ()
    """Layers of each stage, the first virtual stage of every rank before the second. Empty: split by cost."""
    sequence_parallel: bool = True
    """Tensor-parallel ranks divide the tokens of the residual stream too."""
    deterministic: bool | None = None
    """Tensor-parallel ranks divide every matrix by its outputs, so that the forward pass has the bits of one process, for one more gather
    of each input. Empty: in reinforcement learning, whose rollout must have the same bits, and not in training on data."""
    zero: Literal[0, 1, 2, 3] = 0
    """What data-parallel ranks divide between them: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    collective_timeout_s: float = 300.0
    """Seconds after which a collective that does not end is a hang."""
    heartbeat_timeout_s: float = 30.0
    """A rank without progress is a hang after 20 times the longest pause of this run, but not before this many seconds."""
    ranks_per_node: int = 0
    """Ranks on one machine. 0: all."""
    across_nodes: bool = False
    """Let ranks along `tensor` and `context`, which communicate in every layer, be on several machines."""

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def ranks_of_a_node(self) -> int:
        """The most ranks that one machine has."""
        return min(self.world, self.ranks_per_node or self.world)

    def nodes(self) -> list[int]:
        """The node of each rank."""
        each = self.ranks_per_node or self.world
        return [rank // each for rank in range(self.world)]

    def check(self) -> None:
        """Raise ``UserError`` for a mesh that cannot be."""
        check_at_least_one("parallel", self, *AXES)
        if self.data * self.context % self.expert:
            raise UserError(f"'parallel.expert' is {self.expert}; it must divide parallel.data x parallel.context = {self.data * self.context}")
        self._check_pipeline()
        for name in ("collective_timeout_s", "heartbeat_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"'parallel.{name}' is {getattr(self, name)}; it must be above 0, and finite")
        if self.ranks_per_node < 0:
            raise UserError(f"'parallel.ranks_per_node' is {self.ranks_per_node}; it must be 0 (all) or more")

    def _check_pipeline(self) -> None:
        check_at_least_one("parallel", self, "virtual_stages")
        if (self.schedule == "interleaved") != (self.virtual_stages > 1):
            raise UserError(
                f"'parallel.schedule' is '{self.schedule}' with parallel.virtual_stages {self.virtual_stages}; 'interleaved' needs 2 or more, "
                "the others have 1"
            )
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise UserError("'parallel.schedule' is 'interleaved' with parallel.pipeline 1; it needs 2 ranks or more")
        stages, counts = self.pipeline * self.virtual_stages, self.pipeline_layers
        if counts and (len(counts) != stages or min(counts) < 1):
            raise UserError(f"'parallel.pipeline_layers' is {list(counts)}; it must name 1 layer or more for each of {stages} stages")


def check_mesh(parallel: ParallelConfig, trainer: TrainerConfig) -> None:
    """Raise ``UserError`` for a mesh that ``trainer`` cannot run on."""
    if parallel.zero and parallel.data * parallel.context == 1:
        raise UserError(f"'parallel.zero' is {parallel.zero}, and there is one rank to shard over; raise parallel.data or set it to 0")
    if trainer.offload_parameters == "nvme" and parallel.world > 1 and parallel.zero != 3:
        raise UserError(
            f"'trainer.offload_parameters' is 'nvme' with {parallel.world} ranks and parallel.zero {parallel.zero}; a rank pages its part of the "
            f"weights, which stage 3 alone shards: set parallel.zero to 3{'' if parallel.data * parallel.context > 1 else ' and parallel.data to 2'}, "
            "or trainer.offload_parameters to none"
        )
    if trainer.offload_activations == "nvme" and parallel.pipeline > 1 and parallel.schedule != "1f1b":
        raise UserError(
            f"'trainer.offload_activations' is 'nvme' with parallel.schedule '{parallel.schedule}', whose backwards are not in the order of their "
            "forwards or wait for all of them: set parallel.schedule to 1f1b, or trainer.offload_activations to none"
        )
