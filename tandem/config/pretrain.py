"""A recipe for training on data, without a rollout: a model, tokenized data and how long."""

from dataclasses import dataclass, field
from typing import Literal

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.machine import MachineConfig
from tandem.config.model import ModelConfig
from tandem.config.parallel import ParallelConfig, check_mesh
from tandem.config.registry import RegistryConfig
from tandem.config.run import RunConfig
from tandem.config.sft import DemonstrationsConfig
from tandem.config.task import TaskConfig
from tandem.config.trainer import TrainerConfig
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """``path``: what ``tandem tokenize`` wrote, a folder or URL. ``weight``: its share of the mixture, beside the others'."""

    path: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class DataConfig:
    """``train``: the datasets of the mixture. ``held_out``: a dataset that is only measured on; empty measures nothing.

    ``sequence_length``: tokens that are trained on together; documents are laid end to end and cut, and never see each other. In
    supervised fine-tuning: the most that an example may have, which is never cut. ``too_long``: what becomes of longer ones.
    ``global_batch_size``: of one optimizer step; examples in supervised fine-tuning. ``cache``: the folder that shards of a URL are
    brought to. ``read_ahead``: batches that wait ready.
    """

    train: tuple[DatasetConfig, ...] = ()
    held_out: str = ""
    sequence_length: int = 512
    global_batch_size: int = 8
    too_long: Literal["refuse", "leave_out"] = "refuse"
    cache: str = ""
    read_ahead: int = 4

    def check(self) -> None:
        for dataset in self.train:
            if not 0 < dataset.weight < float("inf"):
                raise UserError(f"the weight of '{dataset.path}' in 'data.train' is {dataset.weight}; it must be above 0, and finite")
        for name, least in (("sequence_length", 2), ("global_batch_size", 1), ("read_ahead", 1)):
            if getattr(self, name) < least:
                raise UserError(f"'data.{name}' is {getattr(self, name)}; it must be at least {least}")
        remote = [path for path in (*(dataset.path for dataset in self.train), self.held_out) if "://" in path and not path.startswith("file:")]
        if remote and not self.cache:
            raise UserError(f"'{remote[0]}' is not on this machine; name a folder for its shards in 'data.cache'")


@dataclass(frozen=True, slots=True)
class HeldOutConfig:
    """The loss on ``sequences`` sequences of the held-out data after every ``every_steps`` optimizer steps and at the end."""

    every_steps: int = 50
    sequences: int = 32

    def check(self) -> None:
        for name in ("every_steps", "sequences"):
            if getattr(self, name) < 1:
                raise UserError(f"'evaluation.{name}' is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class PretrainConfig:
    """``name`` says what is learned: every next token of documents, or with ``sft`` those that a dataset of examples marks."""

    name: Literal["pretrain", "sft"]


@dataclass(frozen=True, slots=True)
class PretrainRecipe:
    """What ``tandem train`` is told where ``algorithm.name`` is ``pretrain`` or ``sft``. ``task``: instead of ``data.train``, ``sft`` learns
    the demonstrations of a task."""

    algorithm: PretrainConfig
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig | None = None
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    run: RunConfig = field(default_factory=RunConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(learning_rate=3e-4))
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def learns_from_examples(self) -> bool:
        return self.algorithm.name == "sft"

    @property
    def most_tokens(self) -> int:
        """Tokens in one forward and backward of one data-parallel rank at most: a sequence is not cut for a micro-batch."""
        share = self.data.sequence_length * -(-self.data.global_batch_size // self.parallel.data)
        return min(max(self.trainer.micro_batch_tokens, self.data.sequence_length), share)

    def check(self) -> None:
        """Refuse combinations of sections that cannot work."""
        if self.task is None and not self.data.train:
            raise UserError("'data.train' is empty; name at least one dataset that 'tandem tokenize' wrote")
        if self.task is not None and (self.data.train or not self.learns_from_examples):
            raise UserError(
                f"section 'task' names the task '{self.task.name}', whose demonstrations are learned with algorithm.name sft and instead of "
                "data.train; take one of the two out"
            )
        if self.data.too_long != "refuse" and not self.learns_from_examples:
            raise UserError(
                f"'data.too_long' is '{self.data.too_long}', which is of algorithm.name sft; pretraining cuts documents and leaves none out: "
                "take the key out"
            )
        longest = self.model.max_length or (self.model.create.max_position_embeddings if self.model.create else 0)
        if longest and self.data.sequence_length > longest:
            raise UserError(
                f"'data.sequence_length' is {self.data.sequence_length}, more than the model's context of {longest}; lower it or raise "
                f"{'model.max_length' if self.model.max_length else 'model.create.max_position_embeddings'}"
            )
        if self.parallel.data > self.data.global_batch_size:
            raise UserError(
                f"'parallel.data' is {self.parallel.data} and a step has {self.data.global_batch_size} sequences; raise "
                "data.global_batch_size, so that every rank has one"
            )
        check_mesh(self.parallel, self.trainer)
