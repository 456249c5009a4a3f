"""The predicted seconds of a run's phases on this machine, made before its first step from its model's own products, which its ranks measure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe
from tandem.estimate.draft_work import draft_work
from tandem.estimate.hardware.hardware import DISK_BANDWIDTH
from tandem.estimate.model_bytes import trained_bytes
from tandem.estimate.prompt_beginnings import Prompts
from tandem.estimate.resident_bytes import resident_bytes
from tandem.estimate.rl_work import forward_and_backward, rl_work
from tandem.estimate.time import Product, Speed, Work, training_work
from tandem.layout.residents import Residency
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.planner.recipe_layout import draft_of
from tandem.pod.rl_models import rl_models

SHORTEST = 1
"""Tokens of the shortest completion; predictions are made for it and for the longest, and hold on the line between."""
UPDATE_PASSES = 5
"""Times that a weight update reads or writes the weights: converted into the shared buffer (2), read for their digest (1), taken by the engine (2)."""

Measure = Callable[[Sequence[Product]], Mapping[str, Any]]
"""Returns what a machine was measured to do, as ``kernels.measure`` does."""


def rl_prediction(recipe: Recipe, shapes: ModelShapes, residency: Residency, prompts: Prompts, measure: Measure, begun: float = 0.0) -> dict[str, Any]:
    """Returns what the journal keeps of the predicted seconds of a step of reinforcement learning, and of those that its measurement took. ``shapes``: of the
    actor; ``prompts``: of a step; ``begun``: of ``packed_samples.Samples``, as measured by steps before."""
    models, lengths = rl_models(recipe, shapes), sorted({SHORTEST, recipe.rollout.max_tokens})
    made = [rl_work(recipe, models, prompts, length, begun) for length in lengths]
    began = perf_counter()
    speed = measured_speed([work for each in made for part in (each.generation, each.inference, each.training) for work in part], measure)
    took_s = perf_counter() - began
    ranks, engines = recipe.parallel.world, recipe.rollout.workers * recipe.rollout.engine_ranks
    actor, dtype = adapted_shapes(shapes, recipe.trainer.lora), recipe.trainer.dtype
    update = UPDATE_PASSES * trained_bytes(actor, dtype) / speed.bytes_per_s
    held = resident_bytes(
        actor, recipe.trainer, recipe.parallel, reference=recipe.holds_reference, critic=models.critic, reward_model=models.reward_model,
        follows=recipe.reference.follows, teacher=models.teacher,
    )  # fmt: skip
    moved = sum(held[name] for name in residency.saved(held)) if residency.rule.offloads else 0
    switch = 2 * moved / (DISK_BANDWIDTH if residency.to == "disk" else speed.bytes_per_s)
    at = []
    for length, each in zip(lengths, made, strict=True):
        phases = {"train": _sum(each.training, speed) / ranks, "rollout": _sum(each.generation, speed) / engines, "switch": switch, "weight update": update}
        at.append([length, phases | ({"inference": _sum(each.inference, speed) / ranks} if each.inference else {})])
    return {"at": at, "bytes_per_s": speed.bytes_per_s, "prompts": asdict(prompts), "took_s": took_s}


def data_prediction(recipe: PretrainRecipe, shapes: ModelShapes, measure: Measure) -> dict[str, Any]:
    """Returns the same of a step of a run on data, whose sequences are all of ``data.sequence_length`` tokens."""
    parallel, work = recipe.parallel, data_work(recipe, shapes)
    began = perf_counter()
    speed = measured_speed([work], measure)
    took_s = perf_counter() - began
    micro_batches = max(1, recipe.step_tokens // (parallel.data * recipe.most_tokens))
    bubble = (parallel.pipeline - 1) / (parallel.virtual_stages * micro_batches)
    return {"at": [[0, {"train": work.seconds(speed) / parallel.world * (1 + bubble)}]], "bytes_per_s": speed.bytes_per_s, "took_s": took_s}


def data_work(recipe: PretrainRecipe, shapes: ModelShapes, *, waits: bool = True) -> Work:
    """Returns the work of a step of a run on data: of training a model of ``shapes``, or a draft head beside it. ``waits``: with that of ranks that wait for
    the one that has the head."""
    dtype, tokens, length, draft = recipe.trainer.dtype, recipe.step_tokens, recipe.data.sequence_length, draft_of(recipe, shapes)
    if draft is not None:
        return draft_work(shapes, draft, dtype, tokens, length, recipe.most_tokens, recipe.parallel.world // recipe.parallel.data if waits else 1)
    return training_work(shapes, dtype, tokens, length, recipe.most_tokens, forward_and_backward(recipe.trainer), 1, 1)


def measured_speed(works: Sequence[Work], measure: Measure) -> Speed:
    """Returns the speed of all products of ``works``."""
    products = sorted({product for work in works for product in work.products})
    measured = measure(products)
    seconds, cpu = (dict(zip(products, measured[name], strict=True)) for name in ("seconds", "cpu_seconds"))
    return Speed(seconds, measured["bytes_per_s"], cpu, measured["bytes_per_cpu_s"])


def _sum(works: Sequence[Work], speed: Speed) -> float:
    return sum(work.seconds(speed) for work in works)
