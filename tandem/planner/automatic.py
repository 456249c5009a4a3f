"""Applies the planner's answer to a recipe with ``parallel.layout: auto``. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.config.parallel import AXES, ParallelConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.estimate.hardware.hardware import Hardware
from tandem.planner.model_input import recipe_shapes
from tandem.planner.plan import cannot_fit, named
from tandem.planner.recipe_layout import recipe_layout
from tandem.planner.recipe_step import batch_sequences, sequence_tokens
from tandem.planner.request import PlanRequest
from tandem.planner.score import Score
from tandem.planner.search import sweep
from tandem.types.errors import UserError

CHOSEN = (*AXES, "schedule", "virtual_stages", "pipeline_layers", "zero")
"""The keys of section ``parallel`` that the planner sets."""


def with_layout(recipe: AnyRecipe, gpus: Sequence[str], hardware: Hardware | None, cores: int) -> tuple[AnyRecipe, str]:
    """Returns ``recipe`` with the fastest layout on ``gpus`` (the names of those of this machine, all of ``hardware``), and a line that says which; without
    GPUs, data parallelism over the ``cores``. A recipe whose layout is given is returned as it is. Raises ``UserError`` if none fits."""
    if recipe.parallel.layout == "given":
        return recipe, ""
    if isinstance(recipe, PretrainRecipe) and recipe.trains_draft:
        return replace(recipe, parallel=replace(recipe.parallel, layout="given")), "layout: one process (a draft head is trained beside one whole model)"
    if not gpus:
        data = ranks_that_divide(batch_sequences(recipe), cores)
        chosen = replace(recipe.parallel, layout="given", data=data, zero=1 if data > 1 else 0)
        return replace(recipe, parallel=chosen), f"layout: data {data}, zero {chosen.zero} (no GPU: a rank for each core that divides the batch)"
    if isinstance(recipe, Recipe) and recipe.draft is not None:
        data = ranks_that_divide(batch_sequences(recipe), len(gpus))
        chosen = replace(recipe.parallel, layout="given", data=data, zero=1 if data > 1 else 0)
        return replace(recipe, parallel=chosen), f"layout: data {data}, zero {chosen.zero} (a draft head is trained beside one whole policy)"
    if hardware is None:
        raise UserError(
            f"'parallel.layout' is 'auto', and the planner has no figures of '{gpus[0]}'; give the layout, or plan with a hardware file (tandem plan --gpu)"
        )
    best = best_layout(recipe, len(gpus), hardware)
    found, given = best.layout, recipe.parallel
    axes = {name: getattr(found.parallel, name) for name in CHOSEN}
    trainer = replace(recipe.trainer, recompute="full" if found.recompute == "full" else "none", micro_batch_tokens=found.micro_batch * found.sequence)
    recipe = replace(recipe, parallel=replace(given, layout="given", **axes), trainer=trainer)
    return recipe, f"layout: {named(best)}; predicted {best.step_seconds:.3g} s a step, {best.memory.total / 2**30:.1f} GiB on each {hardware.name}"


def ranks_that_divide(batch: int, most: int) -> int:
    """Returns the largest number of ranks up to ``most`` that divides ``batch``."""
    return next(ranks for ranks in range(max(1, min(most, batch)), 0, -1) if batch % ranks == 0)


def best_layout(recipe: AnyRecipe, gpus: int, hardware: Hardware) -> Score:
    """Returns the fastest layout of ``recipe`` that fits. Raises ``UserError`` with the smallest change if none does."""
    shapes = recipe_shapes(recipe.model)
    one = recipe_layout(replace(recipe, parallel=ParallelConfig()), shapes)
    request = PlanRequest(shapes, hardware, gpus, sequence_tokens(recipe, shapes), batch_sequences(recipe), one.precision, trainer=recipe.trainer)
    request.check()
    found = sweep(request)
    if found.best is None:
        if found.nearest is None:
            raise UserError(f"'parallel.layout' is 'auto', and the batch of {request.global_batch} sequences divides over no layout of {gpus} GPUs; change it")
        raise UserError(cannot_fit(request, found.nearest))
    return found.best

