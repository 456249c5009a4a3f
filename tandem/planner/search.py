"""Scores many layouts, and finds those that no other beats. Imports no torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training.layout import Recompute, TrainingLayout
from tandem.layout.mesh_check import check_layout
from tandem.layout.shapes import ModelShapes
from tandem.planner.layouts import with_stages
from tandem.planner.request import PlanRequest
from tandem.planner.rules import tensor_ranks
from tandem.planner.score import Score, score
from tandem.types.errors import UserError

LONG_SEQUENCE = 16_384
"""Tokens from which context parallelism is tried."""
MOST_STAGES = 64
MICRO_BATCHES = (1, 2, 4)
MOST_UNEVEN = 1.1
"""Times its even share that the fullest of a rank's stages may have, so that shorter bubbles are worth it."""
Progress = Callable[[int, int], None]
"""Is told how many of how many layouts are scored."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """``scored``: layouts that fit safely, fastest first; ``considered``: how many were scored; ``pareto``: those that no other beats in time, cost and
    memory."""

    scored: tuple[Score, ...]
    considered: int
    pareto: tuple[Score, ...]
    nearest: Score | None
    """Of layouts that do not fit, that which needs least memory, where none fits."""

    @property
    def best(self) -> Score | None:
        return self.scored[0] if self.scored else None


def sweep(request: PlanRequest, progress: Progress | None = None) -> Sweep:
    """Scores every candidate layout of ``request``."""
    layouts = list(candidates(request))
    scored: list[Score] = []
    for number, layout in enumerate(layouts):
        scored.append(score(request.shapes, layout, request.hardware))
        if progress is not None:
            progress(number + 1, len(layouts))
    fitting = sorted((each for each in scored if each.fits_safely), key=lambda each: each.step_seconds)
    nearest = min(scored, key=lambda each: each.memory.total) if scored and not fitting else None
    return Sweep(tuple(fitting), len(layouts), tuple(pareto_front(fitting)), nearest)


def pareto_front(scored: Sequence[Score]) -> Iterator[Score]:
    """Yields, from the fastest on, the scores that cost less or need less memory than every faster one. On one number of GPUs of one kind the fastest is the
    cheapest; a GPU without a price costs nothing here."""
    kept: list[tuple[float, int]] = []
    for each in sorted(scored, key=lambda each: (each.step_seconds, each.dollars_per_billion_tokens, each.memory.total)):
        cost, memory = each.dollars_per_billion_tokens, each.memory.total
        if not any(other_cost <= cost and other_memory <= memory for other_cost, other_memory in kept):
            kept.append((cost, memory))
            yield each


def candidates(request: PlanRequest) -> Iterator[TrainingLayout]:
    """Yields the layouts that are worth a score: tensor parallelism within a node, pipelines of equal stages, context parallelism for long sequences, ZeRO 2
    and 3 without a pipeline (in one, each micro-batch would reduce and gather again)."""
    for parallel in _meshes(request):
        each = request.global_batch // parallel.data
        micro_batches = MICRO_BATCHES if request.micro_batch is None else (request.micro_batch,)
        recomputations: tuple[Recompute, ...] = ("none", "full") if request.recompute is None else (request.recompute,)
        for micro_batch in micro_batches:
            if each % micro_batch or (parallel.virtual_stages > 1 and each // micro_batch % parallel.pipeline):
                continue
            for recompute in recomputations:
                yield request.completed(TrainingLayout(parallel, request.sequence, request.global_batch, micro_batch, request.precision, recompute))


def _meshes(request: PlanRequest) -> Iterator[ParallelConfig]:
    shapes, gpus = request.shapes, request.gpus
    most_tensor = tensor_ranks(shapes, min(gpus, request.hardware.gpus_per_node))
    contexts = _powers(min(gpus, request.sequence // (LONG_SEQUENCE // 2))) if request.sequence >= LONG_SEQUENCE else (1,)
    for tensor in _powers(most_tensor):
        for context in contexts:
            for pipeline in _stages(shapes, gpus // (tensor * context)):
                ranks = tensor * context * pipeline
                if gpus % ranks or request.global_batch % (gpus // ranks) or request.sequence % context:
                    continue
                for expert in _experts(shapes, gpus // ranks * context):
                    yield from _variants(shapes, ParallelConfig(data=gpus // ranks, tensor=tensor, pipeline=pipeline, context=context, expert=expert))


def _variants(shapes: ModelShapes, mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    replicas = mesh.data * mesh.context
    for zero in (0,) if replicas == 1 else (1,) if mesh.pipeline > 1 else (1, 2, 3):
        for virtual in _virtual_stages(shapes, mesh.pipeline):
            parallel = replace(mesh, virtual_stages=virtual, zero=zero)  # type: ignore[arg-type]
            try:
                check_layout(shapes, parallel, repeats_heads=True)
            except UserError:
                continue
            yield with_stages(parallel, shapes.num_hidden_layers)


def _powers(most: int) -> tuple[int, ...]:
    """Returns the powers of two up to ``most``."""
    return tuple(2**power for power in range(max(1, most).bit_length()))


def _stages(shapes: ModelShapes, most: int) -> Iterator[int]:
    """Yields pipelines that divide the layers, and powers of two that nearly do."""
    for stages in range(1, min(most, shapes.num_hidden_layers, MOST_STAGES) + 1):
        if shapes.num_hidden_layers % stages == 0 or stages & (stages - 1) == 0:
            yield stages


def _virtual_stages(shapes: ModelShapes, pipeline: int) -> tuple[int, ...]:
    layers, found = shapes.num_hidden_layers, [1]
    for virtual in (2, 4, 8):
        stages = pipeline * virtual
        if pipeline > 1 and stages <= layers and -(-layers // stages) * stages <= MOST_UNEVEN * layers:
            found.append(virtual)
    return tuple(found)


def _experts(shapes: ModelShapes, replicas: int) -> tuple[int, ...]:
    if shapes.experts is None:
        return (1,)
    most = math.gcd(shapes.experts.num_experts, replicas)
    return tuple(sorted({ranks for ranks in (1, most // 4, most // 2, most) if ranks and most % ranks == 0}))
