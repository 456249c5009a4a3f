"""A recipe for training on data without a rollout: pretraining, supervised fine-tuning, DPO, reward models and draft heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.cluster import ClusterConfig
from tandem.config.coordination import CoordinationConfig
from tandem.config.draft import check_draft_steps
from tandem.config.health import HealthConfig
from tandem.config.kubernetes import KubernetesConfig
from tandem.config.limits import check_at_least_one, check_float32
from tandem.config.machine import MachineConfig
from tandem.config.metrics import MetricsConfig
from tandem.config.model import ModelConfig
from tandem.config.parallel import ParallelConfig, check_mesh
from tandem.config.pods import PodsConfig, check_joining_pods, check_trainer_pods
from tandem.config.preference import PreferenceLoss, check_preference
from tandem.config.ray import RayConfig
from tandem.config.registry import RegistryConfig
from tandem.config.run import RunConfig
from tandem.config.sft import DemonstrationsConfig
from tandem.config.slurm import SlurmConfig
from tandem.config.task import TaskConfig
from tandem.config.traces import TracesConfig
from tandem.config.trackers import TrackersConfig
from tandem.config.trainer import TrainerConfig
from tandem.config.transformers_module import Refusal, check_transformers_module
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One dataset of the mixture."""

    path: str
    """Folder or URL of a dataset written by `tandem tokenize`."""
    weight: float = 1.0
    """Weight in the mixture, relative to the other datasets."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The training data. Documents are concatenated and split into sequences; attention does not cross document boundaries. Examples of
    supervised fine-tuning are never split."""

    train: tuple[DatasetConfig, ...] = ()
    """The datasets of the mixture, a list of sections `data.train`."""
    held_out: str = ""
    """Dataset for evaluation only. Empty: none."""
    sequence_length: int = 512
    """Tokens per sequence; in supervised fine-tuning the maximum length of an example, of preference pairs that of a prompt with one of its answers."""
    global_batch_size: int = 8
    """Sequences, examples or preference pairs per optimizer step."""
    too_long: Literal["refuse", "leave_out"] = "refuse"
    """For `sft`, `dpo` and `reward_model`: `refuse` a dataset with longer examples, or `leave_out` those examples, a pair whole."""
    cache: str = ""
    """Folder for downloading and verifying the shards of a URL."""
    read_ahead: int = 4
    """Number of batches to prepare ahead."""
    rollouts: tuple[str, ...] = ()
    """For `draft`: folders of runs of reinforcement learning, whose prompts and completions are one more dataset of the mixture, with weight 1. They are
    copied when the run starts."""
    rollout_steps: int = 0
    """For `draft`: the newest steps of each of these runs to read. 0: all."""

    def check(self) -> None:
        for dataset in self.train:
            if not 0 < dataset.weight < float("inf"):
                raise UserError(f"the weight of '{dataset.path}' in 'data.train' is {dataset.weight}; it must be above 0, and finite")
        for name, least in (("sequence_length", 2), ("global_batch_size", 1), ("read_ahead", 1), ("rollout_steps", 0)):
            if getattr(self, name) < least:
                raise UserError(f"'data.{name}' is {getattr(self, name)}; it must be at least {least}")
        remote = [path for path in (*(dataset.path for dataset in self.train), self.held_out) if "://" in path and not path.startswith("file:")]
        if remote and not self.cache:
            raise UserError(f"'{remote[0]}' is not on this machine; name a folder for its shards in 'data.cache'")


@dataclass(frozen=True, slots=True)
class HeldOutConfig:
    """How often and on how much held-out data the loss is evaluated."""

    every_steps: int = 50
    """Optimizer steps between two evaluations; one more follows at the end."""
    sequences: int = 32
    """Number of held-out sequences, examples or pairs to evaluate."""

    def check(self) -> None:
        check_at_least_one("evaluation", self, "every_steps", "sequences")


@dataclass(frozen=True, slots=True)
class PretrainConfig:
    """What is learned of the data."""

    name: Literal["pretrain", "sft", "dpo", "reward_model", "draft"]
    """`pretrain`: every next token of documents. `sft`: the tokens marked in a dataset of examples (supervised fine-tuning). `dpo`: to prefer
    the chosen to the rejected answers of a dataset of preference pairs (Rafailov et al., 2023), with the initial model as the reference.
    `reward_model`: to score the chosen above the rejected answers of such a dataset (Bradley-Terry; Ouyang et al., 2022); a language model gets a
    value head in place of its own. `draft`: the head of EAGLE-3 (Li et al., 2025), by which the model's tokens are drafted for speculative decoding; the
    model itself stays as it is."""
    loss_type: PreferenceLoss = "sigmoid"
    """For `dpo`: `sigmoid`, `ipo` (Azar et al., 2023), `hinge` (Zhao et al., 2023) or `robust` (Chowdhury et al., 2024)."""
    beta: float = 0.1
    """For `dpo`: the weight of the reference. The larger it is, the less the policy departs from it; for `ipo` it is tau."""
    label_smoothing: float = 0.0
    """For `dpo` with `sigmoid` or `robust`: the share of the pairs that are assumed to be labelled the wrong way, below 0.5."""

    value_head: Literal["sequence", "token"] = "sequence"
    """For `reward_model`: the head that a language model gets, of `*ForSequenceClassification` or `*ForTokenClassification`. A model that has one
    keeps it."""
    center_coef: float = 0.0
    """For `reward_model`: weight of the square of the sum of both scores in the loss, which draws scores to a mean of 0 (0.01 is usual). 0: off."""

    draft_steps: int = 5
    """For `draft`: positions of a draft that the head is trained for. From the second on it reads its own output (training-time test)."""
    draft_vocab_size: int = 0
    """For `draft`: the tokens that a new head can propose, the most frequent ones of the data. 0: all, at most 32000."""
    init_from: str = ""
    """For `draft`: folder of a head to continue from, such as the `model` of an earlier run. Empty: a new one."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_preference(self, "dpo")
        self._check_draft()
        if not 0 <= self.center_coef < float("inf"):
            raise UserError(f"'algorithm.center_coef' is {self.center_coef}; it must be 0 (off) or more, and finite")
        check_float32("algorithm", self, "center_coef")
        if self.name != "reward_model":
            fix = "set algorithm.name to reward_model"
            refuse_unread("algorithm", self, f"algorithm.name is '{self.name}'", "value_head", "center_coef", fix=fix)

    def _check_draft(self) -> None:
        check_draft_steps("algorithm", self.draft_steps)
        if self.draft_vocab_size < 0:
            raise UserError(f"'algorithm.draft_vocab_size' is {self.draft_vocab_size}; it must be 0 (all tokens, at most 32000) or more")
        if self.name != "draft":
            fix = "set algorithm.name to draft"
            refuse_unread("algorithm", self, f"algorithm.name is '{self.name}'", "draft_steps", "draft_vocab_size", "init_from", fix=fix)
        elif self.init_from:
            refuse_unread("algorithm", self, "algorithm.init_from names a head, which has its vocabulary", "draft_vocab_size", fix="remove algorithm.init_from")


@dataclass(frozen=True, slots=True)
class PretrainRecipe:
    """The recipe of ``tandem train`` if ``algorithm.name`` is ``pretrain``, ``sft``, ``dpo``, ``reward_model`` or ``draft``. ``task``: with ``sft``, learns
    the demonstrations of a task, with ``reward_model`` to prefer a right demonstration of each prompt to a wrong one, instead of ``data.train``."""

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
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pods: PodsConfig = field(default_factory=PodsConfig)
    coordination: CoordinationConfig = field(default_factory=CoordinationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    metrics: MetricsConfig | None = None
    traces: TracesConfig | None = None

    refused_keys: ClassVar[Mapping[str, str]] = {
        "run.on_mismatch": "there is no rollout that the trainer could disagree with",
        "trainer.backend": "runs on data are trained by Tandem's own trainer",
        "pods.count": "a run on data has one pod on its own machine, and the others join from elsewhere (pods.trainer_count)",
        **{f"pods.{name}": "there is no rollout that needs the weights" for name in (
            "min_count", "protocols", "peer_to_peer", "pipeline", "elementwise_deltas", "full_update_every", "weights_url",
        )},
        "machine.call_deadline_s": "ranks communicate by collectives, whose timeout is parallel.collective_timeout_s",
    }

    @property
    def ranks_here(self) -> int:
        """The ranks on the machine of the run. Pods that joined have the others."""
        return self.parallel.world // self.pods.trainer_count

    @property
    def learns_from_examples(self) -> bool:
        """Whether the data is examples, which are never split or joined, and not documents."""
        return self.algorithm.name != "pretrain"

    @property
    def learns_from_pairs(self) -> bool:
        """Whether an example is a preference pair: two sequences, which are in one micro-batch."""
        return self.algorithm.name in ("dpo", "reward_model")

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs log-probabilities of the start model."""
        return self.algorithm.name == "dpo"

    @property
    def trains_values(self) -> bool:
        """Whether the model gives numbers and not tokens: it has a value head."""
        return self.algorithm.name == "reward_model"

    @property
    def trains_draft(self) -> bool:
        """Whether a draft head is trained beside the model, which stays as it is."""
        return self.algorithm.name == "draft"

    @property
    def sequences_each(self) -> int:
        """The number of sequences that one of ``data.global_batch_size`` counts for."""
        return 2 if self.learns_from_pairs else 1

    @property
    def step_tokens(self) -> int:
        """The largest number of tokens of an optimizer step."""
        return self.data.global_batch_size * self.sequences_each * self.data.sequence_length

    @property
    def context_tokens(self) -> int:
        """The number of tokens of the longest sequence for which the model is computed."""
        return self.model.max_length or self.data.sequence_length

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens in one forward and backward pass of one data-parallel rank: sequences are not split over
        micro-batches."""
        longest = self.sequences_each * self.data.sequence_length
        return min(max(self.trainer.micro_batch_tokens, longest), longest * -(-self.data.global_batch_size // self.parallel.data))

    def check(self) -> None:
        """Raises ``UserError`` for invalid combinations of sections."""
        self.trainer.check_offload_folder()
        if self.algorithm.name != "dpo":
            refuse_unread("trainer", self.trainer, f"algorithm.name is '{self.algorithm.name}', whose passes share no prompt", "share_prompts")
        refuse_unread("trainer", self.trainer, f"algorithm.name is '{self.algorithm.name}', which has no rollout to replay", "router_replay")
        self.trainer.check_share_prompts(self.parallel.context)
        if not self.trains_draft:
            refuse_unread("data", self.data, f"algorithm.name is '{self.algorithm.name}'", "rollouts", "rollout_steps", fix="set algorithm.name to draft")
        elif not self.data.rollouts:
            refuse_unread("data", self.data, "data.rollouts names no run", "rollout_steps", fix="name a run in data.rollouts")
        if self.task is None and not self.data.train and not self.data.rollouts:
            raise UserError("'data.train' is empty; name at least one dataset that 'tandem tokenize' wrote")
        if self.task is not None and (self.data.train or self.algorithm.name not in ("sft", "reward_model")):
            raise UserError(
                f"section 'task' names the task '{self.task.name}', whose demonstrations replace data.train and need algorithm.name sft or reward_model; "
                "remove 'task' or 'data.train'"
            )
        if self.trains_values:
            reason = "a pair is a right demonstration and a wrong one"
            refuse_unread("demonstrations", self.demonstrations, reason, "corrupted_share")
        if self.task is None and self.demonstrations != DemonstrationsConfig():
            raise UserError("section 'demonstrations' is given and there is no section 'task' to demonstrate; remove it, or name a task")
        if self.data.too_long != "refuse" and not self.learns_from_examples:
            raise UserError(
                f"'data.too_long' is '{self.data.too_long}', which belongs to algorithm.name sft, dpo and reward_model; pretraining splits documents and "
                "leaves none out: remove the key"
            )
        if self.task is not None:
            refuse_unread("data", self.data, "task.name takes the place of the datasets", "held_out", "cache")
            refuse_unread("evaluation", self.evaluation, "there is no held-out data beside the demonstrations of a task", "every_steps", "sequences")
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
        if self.machine.attention != "auto" and self.trainer.multiplies_in == "fp32":
            raise UserError(
                f"'machine.attention' is '{self.machine.attention}', which computes in 16 bits, and trainer.precision is 'fp32'; set trainer.precision to "
                "bf16 or fp16, or machine.attention to auto"
            )
        self.machine.check_dtype(self.trainer.dtype)
        self.trainer.check_schedule(self.run.max_steps)
        check_mesh(self.parallel, self.trainer)
        values: tuple[Refusal, ...] = (("algorithm.name", self.algorithm.name if self.trains_values else None, (None,), "has no value head"),)
        if self.trainer.lora is not None and not self.model.implemented_by.is_transformers:
            self.trainer.lora.check_names()
        check_transformers_module(self.model, self.trainer, self.parallel, values)
        self._check_memory()
        self._check_machines()
        self._check_lora()
        if self.trains_draft:
            self._check_draft()

    def _check_memory(self) -> None:
        if self.checkpoint.memory_every_steps and self.parallel.world == 1:
            raise UserError(
                f"'checkpoint.memory_every_steps' is {self.checkpoint.memory_every_steps} and the run is one process, with which its memory ends; set it to 0 "
                "or raise 'parallel'"
            )

    def _check_machines(self) -> None:
        """Checks that ranks on several machines find each other, and what they cannot be combined with."""
        pods, given = self.pods, f"'pods.trainer_count' is {self.pods.trainer_count}"
        if pods.trainer_count == 1:
            fix = "set pods.trainer_count to the number of machines"
            reason = "all ranks of the run are on one machine, on whose disk checkpoint.local_directory outlives them"
            refuse_unread("checkpoint", self.checkpoint, reason, "memory_directory", fix=fix)
            for name, section in (("pods", pods), ("coordination", self.coordination), ("cluster", self.cluster)):
                refuse_unread(name, section, "all ranks of the run are on one machine", *type(section).__dataclass_fields__, fix=fix)
            return
        check_trainer_pods(pods, self.parallel, divides_replicas=True)
        check_joining_pods(pods, self.coordination, self.run.name)
        if self.run.elastic:
            raise UserError(f"{given} with run.elastic: a mesh over several machines keeps its ranks; set run.elastic to false")

    def _check_lora(self) -> None:
        if self.trainer.lora is None:
            return
        if self.trains_values:
            raise UserError("section 'trainer.lora' is given and algorithm.name is 'reward_model', whose new head has to be trained too; remove the section")
        if self.model.create is not None:
            raise UserError("section 'trainer.lora' is given and the model of 'model.create' is untrained; remove the section, or set model.path")

    def _check_draft(self) -> None:
        """Checks what a run of ``draft`` cannot have."""
        if self.model.create is not None:
            raise UserError("section 'model.create' is given and algorithm.name is 'draft', which learns what a trained model says; set model.path")
        plain = "trains plain weights in memory"
        refusals: tuple[Refusal, ...] = (
            ("model.implementation", self.model.implementation, ("auto", "tandem"), "reads hidden states of Tandem's own decoder"),
            ("pods.trainer_count", self.pods.trainer_count, (1,), "begins with a head and rollouts in the folder of the run, on its own machine"),
            ("parallel.context", self.parallel.context, (1,), "trains a head on whole sequences"),
            ("parallel.zero", self.parallel.zero, (0, 1, 2), "reads whole weights of the model"),
            ("trainer.lora", None if self.trainer.lora is None else "given", (None,), plain),
            ("trainer.optimizer", self.trainer.optimizer, ("adamw", "adamw8bit"), "has no hidden matrices in the sense of Muon"),
            ("trainer.offload", self.trainer.offload, ("none",), plain),
            ("trainer.offload_parameters", self.trainer.offload_parameters, ("none",), plain),
            ("trainer.offload_activations", self.trainer.offload_activations, ("none",), plain),
            ("trainer.recompute", self.trainer.recompute, ("none",), "has one layer"),
        )
        for key, value, possible, reason in refusals:
            if value not in possible:
                fix = "remove it" if possible == (None,) else f"set it to {' or '.join(str(each) for each in possible)}"
                raise UserError(f"'{key}' is {value} and algorithm.name is 'draft', which {reason}; {fix}")


def with_joining_pods(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the sections ``data`` of a recipe on data with room for the pods that train: all but the run's own join from elsewhere."""
    pods = data.get("pods")
    if not isinstance(pods, Mapping) or not isinstance(count := pods.get("trainer_count"), int) or count < 2 or pods.get("max_count"):
        return data
    return {**data, "pods": {**pods, "max_count": count}}
