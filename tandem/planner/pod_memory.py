"""The memory of each phase of a recipe's pod on GPUs, with a layout of its trainer: the estimate of ``tandem train --dry-run``, on planned GPUs. Imports no
torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.recipe import Recipe
from tandem.estimate.disk_bytes import offloaded_bytes, rl_bytes_on_disk
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.pod_phases import PhaseMemory, pinned_parts, pod_phases
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.planner.as_text import table
from tandem.planner.recipe_step import sequence_tokens
from tandem.planner.request import own_recompute
from tandem.planner.score import Score
from tandem.pod.residents.plan import Budget, candidates, choose, gpu_candidate, kv_cache_tokens, largest_micro_batch
from tandem.pod.rl_models import rl_models
from tandem.runtime.machine.gpus import room
from tandem.types.errors import RunError, UserError

GIB = 2**30
UNKNOWN = 2**62
"""Bytes of a budget that is not known before a machine is rented."""
KINDS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class PodMemoryPlan:
    """``plan``: of the residents, the loosest that fits on ``hardware``; ``why``: a line for each looser one. ``refused``: why there is none; then there are
    no ``phases``. ``ranks`` and ``engines``: of the trainer and of the rollout on one machine."""

    hardware: Hardware
    ranks: int
    engines: int
    plan: str = ""
    why: tuple[str, ...] = ()
    phases: tuple[PhaseMemory, ...] = ()
    refused: str = ""


def planned_recipe(recipe: Recipe, scored: Score) -> Recipe:
    """Returns ``recipe`` with the layout of ``scored``, as ``tandem plan --emit recipe`` writes it, on GPUs, with engines on all of them."""
    layout = scored.layout
    trainer = replace(
        recipe.trainer, precision=layout.precision, recompute=own_recompute(layout.recompute), offload=layout.offload,
        micro_batch_tokens=layout.micro_batch * layout.sequence,
    )  # fmt: skip
    workers = max(1, layout.gpus // recipe.rollout.engine.tensor_parallel_size)
    return replace(
        recipe, parallel=layout.parallel, trainer=trainer, rollout=replace(recipe.rollout, workers=workers), machine=replace(recipe.machine, device="cuda"),
    )  # fmt: skip


def plan_pod_memory(recipe: Recipe, scored: Score) -> PodMemoryPlan:
    """Returns the phases of ``recipe`` with the layout of ``scored`` on its GPUs. What a machine has of memory and disk is not known: the recipe's own limits
    count (``machine.memory_gib``, ``residents.disk_gib``)."""
    planned, hardware, gpus = planned_recipe(recipe, scored), scored.hardware, scored.layout.gpus
    ranks = min(gpus, hardware.gpus_per_node)
    engines = max(1, ranks // recipe.rollout.engine.tensor_parallel_size)
    try:
        return _phases(planned, scored.shapes, PodMemoryPlan(hardware, ranks, engines))
    except (UserError, RunError) as error:
        return PodMemoryPlan(hardware, ranks, engines, refused=str(error))


def _phases(recipe: Recipe, actor: ModelShapes, empty: PodMemoryPlan) -> PodMemoryPlan:
    shapes, trainer, parallel, rollout = adapted_shapes(actor, recipe.trainer.lora), recipe.trainer, recipe.parallel, recipe.rollout
    beside, length = rl_models(recipe, actor), sequence_tokens(recipe, actor)
    models: dict[str, Any] = {
        "reference": recipe.holds_reference, "critic": beside.critic, "reward_model": beside.reward_model, "follows": recipe.reference.follows,
        "teacher": beside.teacher,
    }  # fmt: skip
    micro_batch = largest_micro_batch(rollout, recipe.algorithm, trainer, length)
    cache = kv_cache_tokens(rollout, recipe.algorithm, length)
    device = room(empty.hardware.memory_bytes)
    budget = Budget(
        min(device, int(recipe.residents.device_gib * GIB) or device), int(recipe.machine.memory_gib * GIB) or UNKNOWN,
        int(recipe.residents.disk_gib * GIB) or UNKNOWN,
    )  # fmt: skip
    ahead = rollout.max_staleness > 0
    allowed = candidates(
        recipe.residents, on_gpu=True, sleeps=rollout.engine.tensor_parallel_size == 1 and rollout.backend == "tandem", at_once=ahead,
        moves_trainer=trainer.backend == "tandem",
    )  # fmt: skip
    chosen, why = choose(
        allowed,
        lambda residency: gpu_candidate(
            residency, rollout, trainer, parallel, shapes, micro_batch, cache, recipe.rollout_precision, models, empty.engines, empty.ranks
        ),
        budget,
    )
    assert chosen.gpu_parts is not None
    pinned = pinned_parts(shapes, trainer, parallel, chosen.residency, **models, ranks=empty.ranks)
    trained = [shapes] if beside.critic is None else [shapes, beside.critic]
    disk = {
        "checkpoints_and_models": rl_bytes_on_disk(
            shapes, trainer, recipe.checkpoint.keep, critic=beside.critic, follows=recipe.reference.follows
        ),
        "moved_residents": chosen.disk, "offloaded": sum(offloaded_bytes(each, trainer, micro_batch.tokens, parallel) for each in trained),
    }  # fmt: skip
    return replace(empty, plan=chosen.name, why=tuple(why), phases=tuple(pod_phases(chosen.gpu_parts, chosen.host, pinned, disk)))


def pod_memory_json(plan: PodMemoryPlan) -> dict[str, Any]:
    """Returns the bytes of each phase by kind of memory and by what holds them, each kind with its ``total``."""
    if plan.refused:
        return {"refused": plan.refused}
    phases = [{"phase": each.phase, **{kind: _with_total(getattr(each, kind)) for kind in KINDS}} for each in plan.phases]
    return {"residents_plan": plan.plan, "why": list(plan.why), "ranks_of_a_machine": plan.ranks, "engines_of_a_machine": plan.engines, "phases": phases}


def _with_total(parts: Mapping[str, int]) -> dict[str, int]:
    return {**{name: size for name, size in parts.items() if size}, "total": sum(parts.values())}


def pod_memory_text(plan: PodMemoryPlan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: PodMemoryPlan) -> Iterator[str]:
    if plan.refused:
        yield f"memory of the pod: not predicted, {plan.refused}"
        return
    yield f"memory of each phase of the pod, with residents.plan {plan.plan}, GiB:"
    yield from table(
        ("", f"fullest GPU (of {plan.hardware.memory_bytes / GIB:.1f})", "host of a machine", "its disk"),
        [(each.phase, *(f"{sum(getattr(each, kind).values()) / GIB:.2f}" for kind in KINDS)) for each in plan.phases],
    )
    for line in plan.why:
        yield f"  {line}"
