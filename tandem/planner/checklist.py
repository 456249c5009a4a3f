"""The production checklist of a recipe: seven items of training and seven of inference, each met or not. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.config.engine import EngineArgs
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.estimate.hardware.hardware import Hardware
from tandem.planner.recipe_layout import predicted_memory

FEW_RESTARTS = 1


@dataclass(frozen=True, slots=True)
class Item:
    """``fix``: what to set, where it is not met. ``state``: what the recipe has."""

    part: str
    name: str
    is_met: bool
    state: str
    fix: str


def checklist(recipe: AnyRecipe, hardware: Hardware) -> list[Item]:
    """Returns the fourteen items. Inference is that of the recipe's rollout, or, of a recipe without one, that of ``tandem serve`` with its defaults."""
    engine = recipe.rollout.engine if isinstance(recipe, Recipe) else EngineArgs()
    return [*_training(recipe, hardware), *_inference(recipe, engine)]


def checklist_text(items: list[Item]) -> str:
    """Returns a line for each item, and how many are met."""
    lines = [f"{'met    ' if each.is_met else 'NOT MET'}  {each.part}: {each.name} ({each.state})" + ("" if each.is_met else f"; {each.fix}") for each in items]
    return "\n".join([*lines, f"{sum(each.is_met for each in items)} of {len(items)} are met"])


def _training(recipe: AnyRecipe, hardware: Hardware) -> Iterator[Item]:
    trainer, item = recipe.trainer, _of("training")
    needed = predicted_memory(recipe)
    yield item(
        "it fits in memory", needed <= hardware.memory_bytes, f"{needed / 2**30:.2f} of {hardware.memory_bytes / 2**30:.1f} GiB of {hardware.name}",
        "raise parallel.zero or parallel.tensor, or set trainer.recompute to full",
    )  # fmt: skip
    yield item("products in 16 bits", trainer.multiplies_in != "fp32", f"trainer.precision {trainer.precision}", "set trainer.precision to bf16")
    yield item("gradients are clipped", trainer.max_grad_norm > 0, f"trainer.max_grad_norm {trainer.max_grad_norm:g}", "set trainer.max_grad_norm to 1.0")
    yield item("the learning rate warms up", trainer.warmup_steps > 0, f"trainer.warmup_steps {trainer.warmup_steps}", "set trainer.warmup_steps")
    checkpoint = recipe.checkpoint
    yield item(
        "checkpoints, of which an older one is kept", bool(checkpoint.every_steps or checkpoint.every_minutes) and checkpoint.keep > 1,
        f"every {checkpoint.every_steps} steps, {checkpoint.keep} kept", "set checkpoint.every_steps, and checkpoint.keep to 2 or more",
    )  # fmt: skip
    yield item(
        "failed ranks are restarted", recipe.run.max_restarts > FEW_RESTARTS, f"run.max_restarts {recipe.run.max_restarts}", "set run.max_restarts to 2 or more"
    )
    every = recipe.evaluation.every_steps
    yield item("quality is measured while it trains", every > 0, f"every {every} steps", "set evaluation.every_steps")


def _inference(recipe: AnyRecipe, engine: EngineArgs) -> Iterator[Item]:
    item = _of("inference")
    yield item("continuous batching", engine.batching == "continuous", f"batching {engine.batching}", "set batching to continuous")
    yield item(
        "prompts are prefilled in chunks", engine.enable_chunked_prefill, f"enable_chunked_prefill {engine.enable_chunked_prefill}".lower(),
        "set enable_chunked_prefill to true",
    )  # fmt: skip
    yield item(
        "paged KV cache with prefix caching", engine.cache_implementation == "paged" and engine.enable_prefix_caching,
        f"{engine.cache_implementation}, prefix caching {'on' if engine.enable_prefix_caching else 'off'}",
        "set cache_implementation to paged and enable_prefix_caching to true",
    )  # fmt: skip
    yield item(
        "weights in 8 or 4 bits", engine.quantization is not None, f"quantization {engine.quantization or 'none'}",
        "quantize the model (tandem quantize), AWQ for production, fp8 where latency matters",
    )  # fmt: skip
    yield item("the context is bounded", engine.max_model_len is not None, f"max_model_len {engine.max_model_len or 'of the model'}", "set max_model_len")
    has_metrics = recipe.metrics is not None or bool(recipe.trackers.names)
    yield item("metrics leave the process", has_metrics, "metrics or trackers" if has_metrics else "none", "add a section metrics, or trackers.names")
    registry = recipe.registry
    yield item(
        "versions can be rolled back", bool(registry.path or registry.uri), "model registry" if registry.path or registry.uri else "none", "set registry.path"
    )


def _of(part: str) -> Callable[[str, bool, str, str], Item]:
    return lambda name, is_met, state, fix: Item(part, name, is_met, state, fix)
