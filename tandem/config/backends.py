"""What a trainer or an engine of another library cannot be combined with, and what it changes of the defaults."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe


def check_backends(recipe: "Recipe") -> None:
    """Raises ``UserError`` for the first key of ``recipe`` that ``trainer.backend`` or ``rollout.backend`` does not take."""
    if recipe.trainer.backend == "megatron":
        _check_megatron(recipe)
    if recipe.trainer.backend == "deepspeed":
        _check_deepspeed(recipe)
    if recipe.rollout.backend == "vllm":
        _check_vllm(recipe)
    elif (replay := recipe.trainer.router_replay) != "auto":
        raise UserError(
            f"'trainer.router_replay' is '{replay}' and rollout.backend '{recipe.rollout.backend}', whose engine sends every token to the experts that "
            "the trainer sends it to, bit for bit, so that there is nothing to replay; remove the key, or set rollout.backend to vllm"
        )


def _check_megatron(recipe: "Recipe") -> None:
    """Refuses what Megatron-Core's layers, schedules and optimizer do not do as they are driven here."""
    trainer, parallel = recipe.trainer, recipe.parallel
    defaults: tuple[tuple[str, object, object, str], ...] = (
        ("trainer.optimizer", trainer.optimizer, "adamw", "trains with its own AdamW"),
        ("trainer.dtype", trainer.dtype, "float32", "updates weights in fp32"),
        ("trainer.offload", trainer.offload, "none", "keeps its moments in memory"),
        ("trainer.offload_parameters", trainer.offload_parameters, "none", "keeps its weights in memory"),
        ("trainer.offload_activations", trainer.offload_activations, "none", "keeps its activations in memory"),
        ("trainer.recompute", trainer.recompute, "none", "keeps its activations in memory"),
        ("trainer.share_prompts", trainer.share_prompts, False, "computes each sequence by itself"),
        ("trainer.router_balance_loss", trainer.router_balance_loss or 0.0, 0.0, "balances no experts here"),
        ("trainer.router_bias_rate", trainer.router_bias_rate, 0.0, "balances no experts here"),
        ("parallel.context", parallel.context, 1, "divides no sequence without Transformer Engine"),
        ("parallel.pipeline_layers", list(parallel.pipeline_layers), [], "divides the layers evenly"),
        ("parallel.deterministic", bool(parallel.deterministic), False, "divides matrices by columns and by rows"),
        ("rollout.engine.kv_cache_dtype", recipe.rollout.engine.kv_cache_dtype, "auto", "rounds no keys and values"),
    )
    _refuse_others("megatron", defaults)
    _refuse_common(recipe)
    _refuse_precision("megatron", trainer.precision)
    if parallel.schedule == "gpipe":
        raise UserError(
            "'parallel.schedule' is 'gpipe' and trainer.backend 'megatron', which has none; set it to 1f1b or interleaved, or trainer.backend to tandem"
        )
    if parallel.zero > 1:
        raise UserError(f"'parallel.zero' is {parallel.zero} and trainer.backend 'megatron', whose distributed optimizer is stage 1; set it to 1 or 0")


def _check_deepspeed(recipe: "Recipe") -> None:
    """Refuses what DeepSpeed's engines do not do as they are driven here."""
    trainer, parallel = recipe.trainer, recipe.parallel
    defaults: tuple[tuple[str, object, object, str], ...] = (
        ("trainer.optimizer", trainer.optimizer, "adamw", "updates with AdamW"),
        ("trainer.dtype", trainer.dtype, "float32", "updates weights in fp32"),
        ("trainer.offload_parameters", trainer.offload_parameters, "none", "keeps weights in memory"),
        ("trainer.offload_activations", trainer.offload_activations, "none", "keeps activations in memory"),
        ("trainer.router_balance_loss", trainer.router_balance_loss or 0.0, 0.0, "balances no experts here"),
        ("trainer.router_bias_rate", trainer.router_bias_rate, 0.0, "balances no experts here"),
        ("parallel.tensor", parallel.tensor, 1, "divides batches and states, not matrices"),
        ("parallel.pipeline", parallel.pipeline, 1, "divides batches and states, not layers"),
        ("parallel.context", parallel.context, 1, "divides batches and states, not sequences"),
        ("parallel.expert", parallel.expert, 1, "divides batches and states, not experts"),
    )
    _refuse_others("deepspeed", defaults)
    _refuse_common(recipe)
    _refuse_precision("deepspeed", trainer.precision)
    if recipe.machine.device == "cuda":
        raise UserError("'machine.device' is 'cuda' and trainer.backend 'deepspeed', which is driven on CPUs in this version; set it to cpu")
    if trainer.offload == "nvme":
        raise UserError("'trainer.offload' is 'nvme' and trainer.backend 'deepspeed', which is driven with 'cpu' or 'none'; set it to one of them")
    if parallel.data > 1 and parallel.zero == 0:
        raise UserError(
            f"'parallel.zero' is 0 with parallel.data {parallel.data} and trainer.backend 'deepspeed', which shards at least the optimizer's state; set it to "
            "1, 2 or 3"
        )
    if trainer.recompute != "none" and parallel.zero == 3:
        raise UserError(
            f"'trainer.recompute' is '{trainer.recompute}' with parallel.zero 3 and trainer.backend 'deepspeed', which frees a layer's weights before they "
            "are computed with again; set it to none, or parallel.zero to 2"
        )


def _refuse_others(backend: str, settings: Iterable[tuple[str, object, object, str]]) -> None:
    """Refuses each of ``settings``, (key, value, the only value that ``backend`` takes, why), that has another value."""
    for key, value, only, reason in settings:
        if value != only:
            given = f"'{key}' is {_shown(value)} and trainer.backend '{backend}', which {reason}"
            raise UserError(f"{given}; set it to {_shown(only)}, or trainer.backend to tandem")


def _refuse_precision(backend: str, precision: str) -> None:
    if precision not in ("fp32", "bf16"):
        raise UserError(
            f"'trainer.precision' is '{precision}' and trainer.backend '{backend}', which scales no loss here and has no fp8; set it to fp32 or bf16, or "
            "trainer.backend to tandem"
        )


def _refuse_common(recipe: "Recipe") -> None:
    """Refuses what belongs to Tandem's own trainer alone."""
    trainer, backend = recipe.trainer, recipe.trainer.backend
    if trainer.lora is not None:
        raise UserError(f"section 'trainer.lora' is given and trainer.backend '{backend}', which trains whole weights; remove it, or set the backend to tandem")
    if recipe.algorithm.name == "ppo":
        raise UserError(f"'algorithm.name' is 'ppo' and trainer.backend '{backend}', which trains no critic; set it to grpo, or trainer.backend to tandem")
    if recipe.reference.follows:
        raise UserError(
            f"'reference.update' is '{recipe.reference.update}' and trainer.backend '{backend}', whose weights the reference cannot follow; set it to never"
        )
    if recipe.residents.plan not in ("auto", "keep", "sleep"):
        raise UserError(
            f"'residents.plan' is '{recipe.residents.plan}' and trainer.backend '{backend}', whose memory is not moved away; set it to keep or sleep"
        )


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _check_vllm(recipe: "Recipe") -> None:
    rollout, given = recipe.rollout, "'rollout.backend' is 'vllm'"
    if recipe.trainer.dtype == "float64":
        raise UserError(f"{given} and 'trainer.dtype' is 'float64', which vLLM does not have; set it to float32, bfloat16 or float16")
    if rollout.temperature < 0.01:
        raise UserError(f"{given} and 'rollout.temperature' is {rollout.temperature:g}, which vLLM raises to 0.01; set it to 0.01 or above")
    if recipe.residents.plan in ("sleep", "offload"):
        raise UserError(
            f"{given} and 'residents.plan' is '{recipe.residents.plan}', in which its engine sleeps, and vLLM frees nothing then on a CPU; set it to auto, "
            "keep, figure or terminate"
        )
    refuse_unread("rollout.engine", rollout.engine, f"{given}, which has no such option", *_OF_OWN_ENGINE)


_OF_OWN_ENGINE = (
    "quantization", "deterministic", "batching", "cache_implementation", "kv_cache_dtype", "preemption_mode", "swap_space", "watermark",
    "speculative_config", "async_scheduling",
)  # fmt: skip


def with_backend_defaults(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the sections ``data`` of a recipe with what a backend changes of the defaults, which ``config.yaml`` then has. Importance sampling is on where
    the engine's log-probabilities are not the trainer's but for the last bits: with vLLM, and with Megatron-Core in bf16. What vLLM holds is compared after
    each rollout."""
    rollout, trainer, algorithm = (data.get(section, {}) for section in ("rollout", "trainer", "algorithm"))
    if not (isinstance(rollout, Mapping) and isinstance(trainer, Mapping)):
        return data
    is_vllm = rollout.get("backend") == "vllm"
    if is_vllm:
        data = {**data, "rollout": {"verify_weights_every_steps": 1, **rollout}}
    is_close = not is_vllm and not (trainer.get("backend") == "megatron" and trainer.get("precision") == "bf16")
    if is_close or not isinstance(algorithm, Mapping) or algorithm.get("name") == "online_dpo":
        return data
    return {**data, "algorithm": {"tis_cap": 2.0, "old_logprobs": "recompute", **algorithm}}
