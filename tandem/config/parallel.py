"""Section ``parallel``: how many processes train one model, and how they divide it."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.limits import check_at_least_one, check_seconds
from tandem.config.lora import LoraConfig
from tandem.config.trainer import TrainerConfig
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

ScheduleName = Literal["1f1b", "interleaved", "gpipe"]
MOST_RANKS = 4096
"""All ranks of a run start on one machine; with more, the process table is full long before a step."""
AXES = ("data", "tensor", "pipeline", "context", "expert")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many processes train one model, and how they divide it; `training.md` says how to choose."""

    layout: Literal["given", "auto"] = "given"
    """Where the ranks come from: the keys below, or the planner (`auto`), which chooses them for the GPUs of this machine, and `trainer.recompute` and
    `trainer.micro_batch_tokens` with them."""
    data: int = 1
    """Data-parallel ranks, which divide every batch."""
    tensor: int = 1
    """Tensor-parallel ranks, which divide every matrix."""
    pipeline: int = 1
    """Pipeline-parallel ranks, which divide the layers."""
    context: int = 1
    """Context-parallel ranks, which divide the tokens of a micro-batch."""
    expert: int = 1
    """Expert-parallel ranks, which divide the experts of a layer; must divide `data` x `context`."""
    schedule: ScheduleName = "1f1b"
    """The pipeline schedule: `1f1b`, `interleaved` or `gpipe`."""
    virtual_stages: int = 1
    """Stages on each rank of an interleaved pipeline, at least 2 there."""
    pipeline_layers: tuple[int, ...] = ()
    """Layers of each stage, the first virtual stage of every rank before the second. Empty: split by cost."""
    sequence_parallel: bool = True
    """Also divide the tokens of the residual stream over tensor-parallel ranks."""
    deterministic: bool | None = None
    """Divide every matrix by its outputs over tensor-parallel ranks, so that the forward pass has the bits of one process, at the cost of
    one more gather of each input. Empty: on in reinforcement learning, whose rollout must have the same bits, and off in training on
    data."""
    zero: Literal[0, 1, 2, 3] = 0
    """What data-parallel ranks shard: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also weights."""
    collective_timeout_s: float = 300.0
    """Seconds after which a collective counts as hung."""
    heartbeat_timeout_s: float = 30.0
    """Minimum seconds without progress after which a rank counts as hung; the timeout is 20 times the longest pause of this run if that is
    longer."""
    ranks_per_node: int = 0
    """Ranks on each machine. 0: all."""
    across_nodes: bool = False
    """Allow `tensor` and `context` ranks, which communicate in every layer, to be on several machines."""

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def ranks_of_a_node(self) -> int:
        """The largest number of ranks on one machine."""
        return min(self.world, self.ranks_per_node or self.world)

    def nodes(self) -> list[int]:
        """Returns the node of each rank."""
        each = self.ranks_per_node or self.world
        return [rank // each for rank in range(self.world)]

    def check(self) -> None:
        """Raises ``UserError`` for an invalid mesh."""
        check_at_least_one("parallel", self, *AXES)
        if self.world > MOST_RANKS:
            largest = max(AXES[:-1], key=lambda axis: int(getattr(self, axis)))
            raise UserError(
                f"'parallel.{largest}' is {getattr(self, largest)}, in a mesh of {self.world} ranks, which all start on this machine; lower it: "
                f"{MOST_RANKS} ranks are the most"
            )
        if self.data * self.context % self.expert:
            raise UserError(f"'parallel.expert' is {self.expert}; it must divide parallel.data x parallel.context = {self.data * self.context}")
        self._check_pipeline()
        check_seconds("parallel", self, "collective_timeout_s", "heartbeat_timeout_s")
        if self.ranks_per_node < 0:
            raise UserError(f"'parallel.ranks_per_node' is {self.ranks_per_node}; it must be 0 (all) or more")
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        if self.layout == "auto":
            chosen = (*AXES, "schedule", "virtual_stages", "pipeline_layers", "zero")
            refuse_unread("parallel", self, "parallel.layout is 'auto', which chooses it", *chosen, fix="set parallel.layout to given")
        if self.pipeline == 1:
            fix = "raise parallel.pipeline"
            refuse_unread("parallel", self, "parallel.pipeline is 1", "schedule", "pipeline_layers", fix=fix)
        if self.tensor == 1:
            refuse_unread("parallel", self, "parallel.tensor is 1", "sequence_parallel", "deterministic", fix="raise parallel.tensor")
        if self.ranks_of_a_node == self.world:
            reason = f"all ranks ({self.world}) are on one machine"
            refuse_unread("parallel", self, reason, "across_nodes", fix="lower parallel.ranks_per_node")

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


def pods_of_a_replica(data: int, pipeline: int, pods: int) -> int:
    """Returns over how many of ``pods`` the pipeline stages of each of ``data`` replicas are divided: 1 where every pod has whole replicas, 0 where neither
    replicas nor stages can be divided evenly."""
    if data % pods == 0:
        return 1
    each, rest = divmod(pods, data)
    return each if rest == 0 and pipeline % each == 0 else 0


def how_to_divide(data: int, pods: int) -> str:
    """Returns what to set so that ``pods`` can divide ``data`` replicas or, where that is possible, the stages of each."""
    each, rest = divmod(pods, data)
    stages = f", or parallel.pipeline to a multiple of {each}, whose stages are then on {each} machines" if rest == 0 else ""
    return f"set parallel.data to a multiple of {pods}{stages}"


def check_mesh(parallel: ParallelConfig, trainer: TrainerConfig) -> None:
    """Raises ``UserError`` for a mesh that does not work with ``trainer``."""
    if parallel.zero and parallel.data * parallel.context == 1 and trainer.backend != "deepspeed":
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
    if trainer.lora is not None:
        _check_lora_mesh(parallel, trainer.lora)


def _check_lora_mesh(parallel: ParallelConfig, lora: LoraConfig) -> None:
    """Raises ``UserError`` for a mesh that an adapter (``trainer.lora``) cannot be trained on."""
    if lora.quantization != "none" and parallel.tensor > 1 and not parallel.deterministic:
        raise UserError(
            f"'parallel.deterministic' is false and trainer.lora.quantization '{lora.quantization}', whose groups of columns would be divided between "
            "tensor-parallel ranks; set parallel.deterministic to true"
        )
    if parallel.zero == 3:
        raise UserError("'parallel.zero' is 3, which would shard the adapter of trainer.lora and not the weights beside it; set it to 2")
