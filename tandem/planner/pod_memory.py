"""The memory of each phase of a recipe's pod on GPUs, with a layout of its trainer: the estimate of ``tandem train --dry-run``, on planned GPUs. Imports no
torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.recipe import Recipe
from tandem.estimate.disk_bytes import offloaded_bytes, rl_bytes_on_disk
from tandem.estimate.draft_bytes import draft_bytes
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.memory import processes_beside
from tandem.estimate.pod_phases import PhaseMemory, pinned_parts, pod_phases
from tandem.layout.residents import Residency
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.planner.as_text import table
from tandem.planner.recipe_step import sequence_tokens
from tandem.planner.request import own_recompute
from tandem.planner.score import Score
from tandem.pod.residents.plan import Budget, Candidate, candidates, choose, gpu_candidate, kv_cache_tokens, largest_micro_batch
from tandem.pod.rl_models import engine_draft, rl_models
from tandem.runtime.machine.gpus import room
from tandem.types.errors import RunError, UserError

GIB = 2**30
UNKNOWN = 2**62
"""Bytes of a budget that is not known before a machine is rented."""
KINDS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class PodMemoryPlan:
    """``plan``: of the residents, the loosest that fits on ``hardware``; ``why``: a line for each looser one. ``refused``: why there is none; then there are
    no ``phases``. ``ranks`` and ``engines``: of the trainer and of the rollout on one machine. ``machines``: that have the GPUs. ``phases``: of the first
    machine, which has the controller and the run's files too; ``everywhere``: host and disk of all machines together."""

    hardware: Hardware
    ranks: int
    engines: int
    machines: int = 1
    plan: str = ""
    why: tuple[str, ...] = ()
    phases: tuple[PhaseMemory, ...] = ()
    everywhere: tuple[PhaseMemory, ...] = ()
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
    empty = PodMemoryPlan(hardware, ranks, max(1, ranks // recipe.rollout.engine.tensor_parallel_size), -(-gpus // hardware.gpus_per_node))
    try:
        return _phases(planned, scored.shapes, empty)
    except (UserError, RunError) as error:
        return replace(empty, refused=str(error))


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
    head = draft_bytes(actor, beside.draft, trainer, parallel, micro_batch.tokens, length, on_cpu=False)
    draft, ahead = engine_draft(recipe, actor), rollout.max_staleness > 0
    allowed = candidates(
        recipe.residents, on_gpu=True, sleeps=rollout.engine.tensor_parallel_size == 1 and rollout.backend == "tandem", at_once=ahead,
        moves_trainer=trainer.backend == "tandem",
    )  # fmt: skip

    def needs(residency: Residency, engines: int, ranks: int) -> Candidate:
        on_gpus = gpu_candidate(residency, rollout, trainer, parallel, shapes, micro_batch, cache, recipe.rollout_precision, models, engines, ranks)
        return on_gpus.with_draft(head, draft, cache)

    chosen, why = choose(allowed, lambda residency: needs(residency, empty.engines, empty.ranks), budget)
    trained = [shapes] if beside.critic is None else [shapes, beside.critic]
    files = rl_bytes_on_disk(shapes, trainer, recipe.checkpoint.keep, beside=beside.saved_beside, follows=recipe.reference.follows)

    def phases(candidate: Candidate, ranks: int) -> tuple[PhaseMemory, ...]:
        """Returns the phases of ``ranks`` and their engines. The run's files are in one place."""
        assert candidate.gpu_parts is not None
        pinned = pinned_parts(shapes, trainer, parallel, candidate.residency, **models, ranks=ranks)
        pinned["checkpoint_copy"] += head.staged
        divided = replace(parallel, ranks_per_node=ranks)
        offloaded = sum(offloaded_bytes(each, trainer, micro_batch.tokens, divided) for each in trained)
        disk = {"checkpoints_and_models": files, "moved_residents": candidate.disk, "offloaded": offloaded}
        return tuple(pod_phases(candidate.gpu_parts, candidate.host, pinned, disk))

    one = phases(chosen, empty.ranks)
    if empty.machines == 1:
        return replace(empty, plan=chosen.name, why=tuple(why), phases=one, everywhere=one)
    world, machines = parallel.world, empty.machines
    everywhere = needs(chosen.residency, max(1, world // rollout.engine.tensor_parallel_size), world)
    # Each machine has the buffers that its engines read the weights from, and its own servers; the controller is on one.
    host = replace(everywhere.host, segments=machines * everywhere.host.segments, beside=processes_beside(trainer, world, machines))
    return replace(empty, plan=chosen.name, why=tuple(why), phases=one, everywhere=phases(replace(everywhere, host=host), world))


def pod_memory_json(plan: PodMemoryPlan) -> dict[str, Any]:
    """Returns the bytes of each phase by kind of memory and by what holds them, each kind with its ``total``."""
    if plan.refused:
        return {"refused": plan.refused}
    phases = [
        {"phase": each.phase, **{kind: _with_total(getattr(each, kind)) for kind in KINDS}}
        | {f"all_{kind}s": _with_total(getattr(everywhere, kind)) for kind in KINDS[1:]}
        for each, everywhere in zip(plan.phases, plan.everywhere, strict=True)
    ]
    return {
        "residents_plan": plan.plan, "why": list(plan.why), "machines": plan.machines, "ranks_of_a_machine": plan.ranks,
        "engines_of_a_machine": plan.engines, "phases": phases,
    }  # fmt: skip


def _with_total(parts: Mapping[str, int]) -> dict[str, int]:
    return {**{name: size for name, size in parts.items() if size}, "total": sum(parts.values())}


def pod_memory_text(plan: PodMemoryPlan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: PodMemoryPlan) -> Iterator[str]:
    if plan.refused:
        yield f"memory of the pod: not predicted, {plan.refused}"
        return
    yield f"memory of each phase of the pod, with residents.plan {plan.plan}, GiB:"
    names = ["", f"fullest GPU (of {plan.hardware.memory_bytes / GIB:.1f})", "host of a machine", "its disk"]
    rows = [[each.phase, *(f"{sum(getattr(each, kind).values()) / GIB:.2f}" for kind in KINDS)] for each in plan.phases]
    if plan.machines > 1:
        names += [f"hosts of all {plan.machines} machines", "their disks"]
        rows = [
            [*row, *(f"{sum(getattr(each, kind).values()) / GIB:.2f}" for kind in KINDS[1:])] for row, each in zip(rows, plan.everywhere, strict=True)
        ]
    yield from table(tuple(names), [tuple(row) for row in rows])
    for line in plan.why:
        yield f"  {line}"
