"""The recipe of a run of reinforcement learning, with the checks across its sections, and the loader of recipes of any job."""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from tandem.config.agent import check_agent
from tandem.config.algorithm import AlgorithmConfig, AlgorithmName
from tandem.config.backends import check_backends, with_backend_defaults
from tandem.config.bundled import recipe_file
from tandem.config.checkpoint import CheckpointConfig
from tandem.config.cluster import ClusterConfig
from tandem.config.coordination import CoordinationConfig
from tandem.config.critic import CriticConfig
from tandem.config.draft import DraftConfig, check_predictor_of, check_trained_draft
from tandem.config.evaluation import EvaluationConfig
from tandem.config.health import HealthConfig
from tandem.config.kubernetes import KubernetesConfig
from tandem.config.load import apply_overrides, build, read_yaml
from tandem.config.lora import check_rollout_lora
from tandem.config.machine import MachineConfig
from tandem.config.metrics import MetricsConfig
from tandem.config.model import ModelConfig
from tandem.config.parallel import ParallelConfig, check_mesh
from tandem.config.pods import PodsConfig, check_pods
from tandem.config.pretrain import PretrainRecipe, with_joining_pods
from tandem.config.ray import RayConfig
from tandem.config.reference import ReferenceConfig, check_reference
from tandem.config.registry import RegistryConfig
from tandem.config.residents import ResidentsConfig
from tandem.config.reward_model import RewardModelConfig
from tandem.config.rewards import COMPARING, RewardsConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.run import RunConfig
from tandem.config.sft import SFTConfig
from tandem.config.slurm import SlurmConfig
from tandem.config.staleness import check_one_step_off, check_partial
from tandem.config.task import TaskConfig, check_environment
from tandem.config.traces import TracesConfig
from tandem.config.trackers import TrackersConfig
from tandem.config.trainer import TrainerConfig
from tandem.config.transformers_module import check_transformers_module, of_rollouts
from tandem.config.watchdog import WatchdogConfig
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of ``tandem train`` for reinforcement learning. Each package receives its own section only."""

    model: ModelConfig
    task: TaskConfig
    run: RunConfig = field(default_factory=RunConfig)
    sft: SFTConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    draft: DraftConfig | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    residents: ResidentsConfig = field(default_factory=ResidentsConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    coordination: CoordinationConfig = field(default_factory=CoordinationConfig)
    pods: PodsConfig = field(default_factory=PodsConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    metrics: MetricsConfig | None = None
    traces: TracesConfig | None = None

    refused_keys: ClassVar[Mapping[str, str]] = {
        "run.elastic": "the trainer of a pod is always restarted with all of its ranks",
        "rollout.sleep_mode": "it is residents.plan now, where 'keep' and 'terminate' are two of five plans",
        "pods.deadline_factor": "it is watchdog.deadline_factor now, which holds for every wait",
        "pods.min_deadline_s": "it is watchdog.min_deadline_s now, which holds for every wait",
        "trainer.sleep_offload": "it is residents.plan now: 'offload', with residents.to memory ('cpu') or disk ('nvme')",
    }

    def check(self) -> None:
        """Raises ``UserError`` for invalid combinations of sections; each section has checked its own values."""
        create = self.model.create
        longest = self.model.max_length or (create.max_position_embeddings if create else 0)
        if longest and self.rollout.max_tokens >= longest:
            raise UserError(
                f"'rollout.max_tokens' is {self.rollout.max_tokens}, which leaves no room for a prompt in a context of {longest} "
                "tokens; lower it or raise model.max_length"
            )
        if create and self.model.max_length > create.max_position_embeddings:
            raise UserError(
                f"'model.max_length' is {self.model.max_length}, more than model.create.max_position_embeddings ({create.max_position_embeddings})"
            )
        filtered = self.rollout.top_p < 1 or self.rollout.top_k > 0 or self.rollout.min_p > 0
        if filtered and self.algorithm.tis_cap is None and not self.algorithm.learns_from_pairs:
            raise UserError(
                "rollout.top_p, top_k and min_p draw from another distribution than the trainer's; set "
                "algorithm.tis_cap (2.0 is usual) or turn them off"
            )
        if filtered and self.rollout.temperature != 1 and self.algorithm.old_logprobs == "rollout" and not self.algorithm.learns_from_pairs:
            # At another temperature the rollout reports pi_old in its sampling distribution, which a filter has renormalised.
            raise UserError(
                f"'algorithm.old_logprobs' is 'rollout' with rollout.temperature {self.rollout.temperature:g} and top_p, top_k or "
                "min_p: the rollout reports the filtered distribution, which is not pi_old; set algorithm.old_logprobs to recompute"
            )
        if (self.rollout.multi_turn is None) != (not self.task.tools) and not (self.task.tools and self.rollout.agent):
            given, missing = ("rollout.multi_turn", "task.tools") if self.rollout.multi_turn else ("task.tools", "rollout.multi_turn")
            raise UserError(f"'{given}' is given and '{missing}' is not; episodes need both the tools and the section (an empty one uses the defaults)")
        check_pods(self)
        check_environment(self)
        check_agent(self)
        if self.task.name == "programs" and (reading := [function.label for function in self.rewards.composition if function.function in COMPARING]):
            raise UserError(
                f"reward function '{reading[0]}' compares texts, and task 'programs' has tests in place of an answer; write function: code_executor with "
                "code: {extract: whole} in rewards.functions"
            )
        self._check_engine(longest)
        if self.algorithm.name != "ppo" and self.critic != CriticConfig():
            raise UserError(
                f"section 'critic' is given and algorithm.name is '{self.algorithm.name}', which has no critic; remove it, or set algorithm.name to ppo"
            )
        if self.reward_model.path and any(function.label == "reward_model" for function in self.rewards.composition):
            raise UserError("a reward function is named 'reward_model', which is the name of the score of section 'reward_model'; give it another 'name'")
        self._check_needs()
        if self.algorithm.name == "ppo" and self.critic.warmup_steps >= self.run.max_steps:
            raise UserError(
                f"'critic.warmup_steps' is {self.critic.warmup_steps} and run.max_steps {self.run.max_steps}, so the actor would never learn; lower it"
            )
        check_reference(self)
        check_partial(self)
        check_one_step_off(self)
        if create and self.sft is None:
            raise UserError("the model of 'model.create' is untrained; add a section 'sft' (an empty one uses the defaults)")
        self._check_attention()
        self._check_weights()
        self.machine.check_dtype(self.trainer.dtype)
        self.trainer.check_schedule(self.run.max_steps, self.sft.schedule if self.sft is not None else "constant")
        self.trainer.check_offload_folder(self.residents.offloads)
        check_mesh(self.parallel, self.trainer)
        check_predictor_of(self)
        check_trained_draft(self)
        check_backends(self)
        if self.trainer.lora is not None and not self.model.implemented_by.is_transformers:
            self.trainer.lora.check_names()
        check_transformers_module(self.model, self.trainer, self.parallel, of_rollouts(self))
        self._check_tiers()
        self.trainer.check_share_prompts(self.parallel.context)
        check_rollout_lora(self)

    def _check_tiers(self) -> None:
        """Checks that the ranks reach what the tiers of checkpoints before the run's folder are written to."""
        for key in ("memory_every_steps", "local_directory"):
            value = getattr(self.checkpoint, key)
            if value and self.trainer.backend != "tandem":
                raise UserError(
                    f"'checkpoint.{key}' is {value!r} with trainer.backend {self.trainer.backend}, whose checkpoints are in the run's folder alone in this "
                    "version; leave it out"
                )

    def _check_needs(self) -> None:
        """Checks that the models that reward functions need are there."""
        for function in self.rewards.composition:
            what = f"reward function '{function.label}' needs"
            if "reference" in function.needs and not self.algorithm.needs_reference:
                raise UserError(f"{what} the reference model, and algorithm.kl_coef is 0, so there is none; set it above 0, or remove 'needs'")
            if "reward_model" in function.needs and not self.reward_model.path:
                raise UserError(f"{what} the reward model, and section 'reward_model' names none; set 'reward_model.path', or remove 'needs'")

    @property
    def ranks_here(self) -> int:
        """The trainer's ranks on the machine of the run: those of the pods that it starts itself. Pods that joined have the others."""
        return self.parallel.world * min(self.pods.count, self.pods.trainer_count) // self.pods.trainer_count

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic that is a model of its own."""
        return self.algorithm.name == "ppo" and not self.critic.shared

    @property
    def has_shared_critic(self) -> bool:
        """Whether the actor has a value head."""
        return self.algorithm.name == "ppo" and self.critic.shared

    @property
    def holds_reference(self) -> bool:
        """Whether there is a reference model that is not the actor without its adapter."""
        return self.algorithm.needs_reference and (self.trainer.lora is None or bool(self.reference.path))

    @property
    def has_inference(self) -> bool:
        """Whether other models than the actor have a pass over the samples of a step."""
        return self.algorithm.has_inference or bool(self.reward_model.path)

    @property
    def rewards_need_models(self) -> bool:
        """Whether rewards depend on passes of other models, which each round of a step's rollout then needs."""
        return bool(self.reward_model.path or self.rewards.needs)

    @property
    def shares_weights(self) -> bool:
        """Whether engines compute with the published weights where they are, if trainer and engine have the kernels for it."""
        return self.rollout.weights != "copied" and not self.why_copied

    @property
    def why_copied(self) -> str:
        """The key with whose value engines must copy the weights; empty if there is none."""
        rollout, trainer, engine = self.rollout, self.trainer, self.rollout.engine
        needs: tuple[tuple[str, object, object], ...] = (
            ("machine.device", self.machine.device == "cuda", False),
            ("trainer.precision", self.rollout_precision, "fp32"), ("trainer.lora", trainer.lora is None, True),
            ("rollout.backend", rollout.backend, "tandem"), ("rollout.engine.quantization", engine.quantization, None),
            # In another dtype the kernels may give a stack other bits than its parts, which are what is published for a rank.
            ("rollout.engine.tensor_parallel_size", 1 if trainer.dtype == "float32" else engine.tensor_parallel_size, 1),
        )  # fmt: skip
        return next((name for name, value, needed in needs if value != needed), "")

    @property
    def rollout_precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The precision of the engine's products: the trainer's, unless another option makes the engine's log-probabilities differ anyway."""
        precision = self.trainer.precision
        return "fp32" if precision == "fp8" or self.rollout.differs_from_trainer() else precision

    def _check_weights(self) -> None:
        if self.rollout.weights == "shared" and self.why_copied:
            raise UserError(
                f"'rollout.weights' is 'shared', and with this '{self.why_copied}' engines must copy and pack the weights; set rollout.weights to auto, or "
                f"leave {self.why_copied} out"
            )

    def _check_attention(self) -> None:
        name = self.machine.attention
        if name != "auto" and self.machine.device != "cuda":
            raise UserError(
                f"'machine.attention' is '{name}', which needs a GPU; a pod uses one only with machine.device cuda: set it so, or machine.attention "
                "to auto"
            )
        if name != "auto" and self.trainer.dtype != "bfloat16":
            # The bits of a backend are compared, and refused, in the dtype of the engine's weights.
            raise UserError(
                f"'machine.attention' is '{name}', which in a pod needs an engine in 16 bits, and trainer.dtype is '{self.trainer.dtype}'; set "
                "trainer.dtype to bfloat16, or machine.attention to auto"
            )

    @property
    def has_rounds(self) -> bool:
        """Whether a step may need several rounds of rollout: with dynamic sampling."""
        return self.algorithm.filter_groups is not None

    def replays_routing(self, has_experts: bool) -> bool:
        """Whether the engine records the routing of a model that ``has_experts``, and the trainer replays it."""
        return has_experts and self.rollout.backend != "tandem" and self.trainer.router_replay != "disabled"

    @property
    def is_exact(self) -> bool:
        """Whether rollout and trainer compute the same log-probabilities bit for bit, so that ``mismatch_kl`` is exactly 0."""
        is_deterministic = self.parallel.tensor == 1 or self.parallel.deterministic is not False
        # Megatron-Core's network is another than the engine's: equal but for the last bits.
        return is_deterministic and self.trainer.backend != "megatron" and not self._difference()

    def _difference(self) -> str:
        """Returns the option that makes the engine's log-probabilities differ from the trainer's; empty if there is none."""
        different = self.rollout.differs_from_trainer()
        if not different and self.trainer.precision != self.rollout_precision:
            different = f"'trainer.precision' is '{self.trainer.precision}' and the rollout computes in {self.rollout_precision}"
        if not different and self.trainer.dtype == "float64":
            different = "'trainer.dtype' is 'float64', whose sums depend on the other requests of a batch in their last bits"
        return different

    def _check_engine(self, max_model_len: int) -> None:
        """Checks the options of the engine. ``max_model_len``: the context in tokens, 0 if only the model's folder defines it."""
        different = self._difference()
        # The loss of pairs does not need to know the distribution that they were drawn from.
        is_corrected = self.algorithm.learns_from_pairs or (self.algorithm.tis_cap is not None and self.algorithm.old_logprobs == "recompute")
        if different and not is_corrected:
            raise UserError(
                f"{different}, so samples come from another distribution than the trainer's; set algorithm.tis_cap (2.0 is usual) and "
                "algorithm.old_logprobs to recompute, or remove the option"
            )
        if self.algorithm.group_size > self.rollout.engine.max_num_seqs:
            raise UserError(
                f"'algorithm.group_size' is {self.algorithm.group_size}, more than rollout.engine.max_num_seqs "
                f"({self.rollout.engine.max_num_seqs}); a group is sampled at once"
            )
        if max_model_len:
            self.rollout.engine.check_length(max_model_len)


IN_A_POD = typing.get_args(AlgorithmName)
"""Algorithms that train on rollouts."""
ON_DATA = ("pretrain", "sft", "dpo", "reward_model", "draft")
"""Algorithms that train on data and not on rollouts."""
AnyRecipe = Recipe | PretrainRecipe


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Returns the recipe in the file ``path``, or of this name among those that come with Tandem, with ``--key.sub=value`` overrides.
    Raises ``UserError``."""
    return recipe_of(apply_overrides(read_yaml(recipe_file(path)), overrides))


def recipe_of(data: Mapping[str, Any]) -> AnyRecipe:
    """Returns the recipe with the sections ``data``; ``algorithm.name`` selects its class. Raises ``UserError``."""
    algorithm = data.get("algorithm")
    name = algorithm.get("name", IN_A_POD[0]) if isinstance(algorithm, Mapping) else IN_A_POD[0]
    if name not in (*IN_A_POD, *ON_DATA):
        # Its sections would be checked against the wrong class.
        raise UserError(f"'algorithm.name' is {name!r}; it must be one of {', '.join((*IN_A_POD, *ON_DATA))}")
    return build(PretrainRecipe, with_joining_pods(data)) if name in ON_DATA else build(Recipe, with_backend_defaults(data))
