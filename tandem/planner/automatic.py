"""Applies the planner's answer to a recipe with ``parallel.layout: auto``. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.config.parallel import AXES, ParallelConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.estimate.hardware.hardware import Hardware
from tandem.planner.model_input import recipe_shapes
from tandem.planner.plan import cannot_fit, named
from tandem.planner.recipe_layout import predicted_memory, recipe_layout
from tandem.planner.recipe_step import batch_sequences, sequence_tokens
from tandem.planner.request import PlanRequest
from tandem.planner.rules import tensor_ranks
from tandem.planner.score import Score
from tandem.planner.search import sweep
from tandem.runtime.machine.gpus import room
from tandem.types.errors import UserError

CHOSEN = (*AXES, "schedule", "virtual_stages", "pipeline_layers", "zero")
"""The keys of section ``parallel`` that the planner sets."""


def with_layout(recipe: AnyRecipe, gpus: Sequence[str], hardware: Hardware | None, cores: int) -> tuple[AnyRecipe, str]:
    """Returns ``recipe`` with the fastest layout on ``gpus`` (the names of those of this machine, all of ``hardware``), and a line that says which; without
    GPUs, data parallelism over the ``cores``. A recipe whose layout is given is returned as it is. Raises ``UserError`` if none fits."""
    if recipe.parallel.layout == "given":
        return recipe, ""
    if not gpus:
        data = ranks_that_divide(batch_sequences(recipe), cores)
        chosen = replace(recipe.parallel, layout="given", data=data, zero=1 if data > 1 else 0)
        return replace(recipe, parallel=chosen), f"layout: data {data}, zero {chosen.zero} (no GPU: a rank for each core that divides the batch)"
    if hardware is None:
        raise UserError(
            f"'parallel.layout' is 'auto', and the planner has no figures of '{gpus[0]}'; give the layout, or plan with a hardware file (tandem plan --gpu)"
        )
    if isinstance(recipe, PretrainRecipe) and recipe.trains_draft:
        return _beside_frozen(recipe, len(gpus), hardware)
    best = best_layout(recipe, len(gpus), hardware)
    layout, given = best.layout, recipe.parallel
    axes = {name: getattr(layout.parallel, name) for name in CHOSEN}
    trainer = replace(recipe.trainer, recompute="full" if layout.recompute == "full" else "none", micro_batch_tokens=layout.micro_batch * layout.sequence)
    recipe = replace(recipe, parallel=replace(given, layout="given", **axes), trainer=trainer)
    return recipe, f"layout: {named(best)}; predicted {best.step_seconds:.3g} s a step, {best.memory.total / 2**30:.1f} GiB on each {hardware.name}"


def _beside_frozen(recipe: PretrainRecipe, gpus: int, hardware: Hardware) -> tuple[PretrainRecipe, str]:
    """Returns ``recipe`` with data-parallel ranks that train a draft head, each beside as few tensor-parallel parts of the model as fit on ``gpus``, and the
    line. Raises ``UserError`` if none fits."""
    shapes, most = recipe_shapes(recipe.model), room(hardware.memory_bytes)
    for tensor in (2**power for power in range(tensor_ranks(shapes, min(gpus, hardware.gpus_per_node)).bit_length())):
        data = ranks_that_divide(batch_sequences(recipe), gpus // tensor)
        chosen = replace(recipe, parallel=replace(recipe.parallel, layout="given", data=data, tensor=tensor, zero=1 if data > 1 else 0))
        if (needed := predicted_memory(chosen)) <= most:
            line = f"layout: data {data}, tensor {tensor}, zero {chosen.parallel.zero} (a draft head beside a model that stays as it is)"
            return chosen, f"{line}; predicted {needed / 2**30:.1f} GiB on each {hardware.name}"
    raise UserError(f"'parallel.layout' is 'auto', and a draft head beside {tensor} parts of its model does not fit on {gpus} GPUs; give the layout")


def ranks_that_divide(batch: int, most: int) -> int:
    """Returns the largest number of ranks up to ``most`` that divides ``batch``."""
    return next(ranks for ranks in range(max(1, min(most, batch)), 0, -1) if batch % ranks == 0)


def best_layout(recipe: AnyRecipe, gpus: int, hardware: Hardware) -> Score:
    """Returns the fastest layout of ``recipe`` that fits. Raises ``UserError`` with the smallest change if none does."""
    shapes = recipe_shapes(recipe.model)
    one = recipe_layout(replace(recipe, parallel=ParallelConfig()), shapes)
    request = PlanRequest(shapes, hardware, gpus, sequence_tokens(recipe, shapes), batch_sequences(recipe), one.precision, trainer=recipe.trainer)
    request.check()
    swept = sweep(request)
    if isinstance(recipe, Recipe) and recipe.draft is not None:
        # What ``config.draft`` refuses beside a head that is trained.
        allowed = tuple(each for each in swept.scored if each.layout.parallel.context == 1 and each.layout.parallel.zero < 3)
        if swept.scored and not allowed:
            raise UserError(
                f"'parallel.layout' is 'auto', and every layout that fits on {gpus} GPUs has context parallelism or ZeRO 3, which section 'draft' excludes; "
                "take more GPUs, or remove the section"
            )
        swept = replace(swept, scored=allowed)
    if swept.best is None:
        if swept.nearest is None:
            raise UserError(f"'parallel.layout' is 'auto', and the batch of {request.global_batch} sequences divides over no layout of {gpus} GPUs; change it")
        raise UserError(cannot_fit(request, swept.nearest))
    return swept.best

