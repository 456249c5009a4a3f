"""Section ``rollout``: sampling parameters and the engine's options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tandem.config.agent import AgentConfig
from tandem.config.engine import EngineArgs
from tandem.config.limits import check_at_least_one
from tandem.config.multi_turn import MultiTurnConfig
from tandem.config.prompt_order import PromptOrderConfig
from tandem.config.repetition_detection import RepetitionDetectionParams
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Sampling parameters and the engine's options."""

    backend: Literal["tandem", "vllm"] = "tandem"
    """What draws the samples: Tandem's engine, or `vllm` in an environment of its own (`tandem sidecar install vllm`)."""
    prompts_per_step: int = 32
    """Prompts per step; each is sampled `algorithm.group_size` times."""
    max_tokens: int = 32
    """Maximum number of new tokens per completion."""
    budget_tokens: int = 0
    """Partial rollouts: the most tokens that a sample draws in one step. One that is unfinished then waits in a replay buffer and is continued in the next
    steps, with their weights; its group is trained when all of its samples are finished. 0: off."""
    mask_off_policy: bool = False
    """Exclude from the loss the tokens that older weights drew. Otherwise they count, with the importance ratio to the weights that drew them."""
    max_staleness: int = 0
    """The most optimizer steps that the weights which draw a sample may be behind those that learn from it. 0: synchronous. 1: one step off; the samples of the
    next step are drawn while a step trains. Trainer and rollout then divide the cores, and `residents.plan` is `keep`."""
    temperature: float = 1.0
    """Sampling temperature; must be above 0."""
    top_k: int = 0
    """Sample from the k most likely tokens. 0: off."""
    top_p: float = 1.0
    """Nucleus sampling. 1: off. With `top_k`, `top_p` or `min_p`, set `algorithm.tis_cap`."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this share of the most likely token's. 0: off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End completions that repeat themselves (Kimi k1.5), with the finish reason `repetition`; they are judged as they are, and count as truncated. Empty: off.
    A section of its own, below."""
    prompt_order: PromptOrderConfig = field(default_factory=PromptOrderConfig)
    """The order in which prompts are drawn (curriculum); a section of its own, below."""
    workers: int = 1
    """Number of rollout workers, each an engine with a process and, on GPUs, `engine.tensor_parallel_size` GPUs of its own. A group stays on one worker; the
    samples are the same for any number. `--inline` has one."""
    weights: Literal["auto", "shared", "copied"] = "auto"
    """`shared`: the engines of the trainer's pod, and of other pods, compute with the published weights where they are, in shared memory, and hold no copy; an
    update verifies them there. It takes CPUs, products in the dtype of the weights (`trainer.precision: fp32`), the whole weights of a model (no adapter), an
    engine without quantization, and with several ranks `trainer.dtype: float32`; of a matrix that cannot be cut between panels of 64 rows a rank has a copy.
    `copied`: each engine copies the weights and packs the copy. `auto`: shared where that is possible and as
    fast to compute with."""
    verify_weights_every_steps: int = 0
    """Steps between two rollouts after which every tensor in the engines' memory is compared with what it was right after the update; under weights that have
    changed the rollout is drawn again. 0: never. On their way to the engines weights are always verified."""
    multi_turn: MultiTurnConfig | None = None
    """Episodes of several turns with the tools of `task.tools`; a section of its own, below."""
    agent: AgentConfig | None = None
    """Episodes of an agent that was not written for training; a section of its own, below."""
    engine: EngineArgs = field(default_factory=EngineArgs)
    """The engine's options, as for `tandem serve` and `LLM`; a section of its own, below."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "engine.model": "the engine samples from the model that is trained, section 'model'",
        "engine.model_impl": "trainer and rollout both use model.implementation",
        "engine.trust_remote_code": "trainer and rollout both use model.trust_remote_code",
        "engine.revision": "a model of the Hub has its revision in 'model.path': OWNER/NAME@REVISION",
        "engine.generation_config": "rollouts are drawn with the sampling parameters of section 'rollout' alone",
        "engine.override_generation_config": "rollouts are drawn with the sampling parameters of section 'rollout' alone",
        "engine.gpu_memory_utilization": "trainer and engine share the GPU, and its memory is planned; set kv_cache_tokens",
        "engine.tokenizer": "prompts are encoded with the tokenizer of the model that is trained",
        "engine.skip_tokenizer_init": "rewards read the completions as text",
        "engine.enable_lora": "the samples of a step come from the model that is trained, with the adapter of trainer.lora if there is one",
        "engine.max_loras": "the samples of a step come from the model that is trained, with the adapter of trainer.lora if there is one",
        "engine.max_lora_rank": "the samples of a step come from the model that is trained, with the adapter of trainer.lora if there is one",
        "engine.load_format": "the engine takes its weights from the trainer",
        "engine.verify": "the engine takes its weights from the trainer, with their digests",
        "engine.download_dir": "the engine takes its weights from the trainer",
        "engine.weight_cache_gib": "the engine takes its weights from the trainer",
        "engine.dtype": "the rollout uses trainer.dtype and trainer.precision",
        "engine.precision": "the rollout uses trainer.dtype and trainer.precision",
        "engine.device": "trainer and rollout share machine.device",
        "engine.seed": "run.seed is the seed of every request",
        "engine.max_model_len": "model.max_length is the context of trainer and rollout",
        "engine.runner": "a rollout generates text",
        "engine.convert": "a rollout generates text",
        "engine.pooler_config": "a rollout generates text",
        "engine.hf_overrides": "a rollout generates text",
        "engine.max_prefill_slowdown": "nobody waits for the tokens of a rollout one by one, and without a limit it is faster",
        "engine.kernels": "trainer and rollout both use machine.kernels, because their bits must agree",
        "engine.attention": "trainer and rollout both use machine.attention, because their bits must agree",
        "engine.otlp_traces_endpoint": "the spans of a run go where section 'traces' says",
        "engine.otlp_traces_protocol": "the spans of a run go where section 'traces' says",
        "engine.threads": "trainer and rollout take turns and both use machine.threads",
    }

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_at_least_one("rollout", self, "prompts_per_step", "max_tokens", "workers")
        if self.workers > self.prompts_per_step:
            raise UserError(
                f"'rollout.workers' is {self.workers} and rollout.prompts_per_step is {self.prompts_per_step}; the samples of a prompt stay on one worker, so "
                f"{self.workers - self.prompts_per_step} would have nothing to do: lower workers or raise prompts_per_step"
            )
        if self.budget_tokens < 0 or self.budget_tokens >= self.max_tokens:
            raise UserError(
                f"'rollout.budget_tokens' is {self.budget_tokens}; it must be at least 1 and less than rollout.max_tokens ({self.max_tokens}), at which every "
                "sample ends, or 0 (off)"
            )
        if not self.budget_tokens:
            refuse_unread("rollout", self, "rollout.budget_tokens is 0, so no token is older than its step", "mask_off_policy", fix="set rollout.budget_tokens")
        if self.verify_weights_every_steps < 0:
            raise UserError(f"'rollout.verify_weights_every_steps' is {self.verify_weights_every_steps}; it must be 0 (never) or more")
        if self.max_staleness not in (0, 1):
            raise UserError(f"'rollout.max_staleness' is {self.max_staleness}; it must be 0 (synchronous) or 1 (one step off)")
        if not 0 < self.temperature <= 100:
            raise UserError(f"'rollout.temperature' is {self.temperature}; training needs samples, so it must be above 0 (and at most 100)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"'rollout.top_p' is {self.top_p}; it must be above 0 and at most 1 (1 turns it off)")
        if not 0 <= self.min_p < 1:
            raise UserError(f"'rollout.min_p' is {self.min_p}; it must be at least 0 and below 1 (0 turns it off)")
        if self.top_k < 0:
            raise UserError(f"'rollout.top_k' is {self.top_k}; it must be 0 (off) or more")
        if any(not text for text in self.stop):
            raise UserError("'rollout.stop' contains an empty text, which would end every completion at once; remove it")

    @property
    def engine_ranks(self) -> int:
        """The tensor-parallel ranks of all workers."""
        return self.workers * self.engine.tensor_parallel_size

    def differs_from_trainer(self) -> str:
        """Returns the option, as ``key is value``, that makes the engine's log-probabilities differ from the trainer's; empty if there is
        none."""
        engine = self.engine
        if self.backend != "tandem":
            return f"'rollout.backend' is '{self.backend}'"
        if engine.quantization is not None:
            return f"'rollout.engine.quantization' is '{engine.quantization}'"
        if not engine.deterministic and engine.tensor_parallel_size > 1:
            return f"'rollout.engine.deterministic' is false with tensor_parallel_size {engine.tensor_parallel_size}"
        return ""
