"""Compares data, tensor, pipeline and expert parallelism for a model: each alone, over the GPUs of one node. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training.layout import TrainingLayout
from tandem.layout.mesh_check import check_layout
from tandem.planner.layouts import with_stages
from tandem.planner.request import PlanRequest
from tandem.planner.rules import expert_ranks, tensor_ranks
from tandem.planner.score import Score, score
from tandem.types.errors import UserError

BEST_USE = {
    "data": "the model fits on a GPU, and the batch is large",
    "tensor": "matrices are large and links within the node fast",
    "pipeline": "the model spans nodes, and there are many micro-batches",
    "expert": "a mixture of experts, whose weights outgrow a GPU before its products do",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """``efficiency``: the throughput of a GPU over that of one GPU alone (with enough memory). ``communication_seconds``: in a step, what nothing hides.
    ``latency_ratio``: the seconds of one micro-batch through the whole model over those on one GPU. ``memory_ratio``: the memory of a GPU over that of one
    alone."""

    name: str
    ranks: int
    best_use: str
    efficiency: float
    communication_seconds: float
    latency_ratio: float
    memory_ratio: float


def compare_axes(request: PlanRequest) -> list[Axis]:
    """Returns each axis that the model has, over as many GPUs of a node as it divides into."""
    ranks = min(request.gpus, request.hardware.gpus_per_node)
    # Every GPU has the same work in each comparison: 8 sequences.
    batch = 8 * ranks
    layout = request.completed(TrainingLayout(ParallelConfig(), request.sequence, batch, 1, request.precision))
    alone = score(request.shapes, layout, request.hardware)
    return [axis for name, parallel in _meshes(request, ranks) if (axis := _axis(name, parallel, alone)) is not None]


def _meshes(request: PlanRequest, ranks: int) -> Iterator[tuple[str, ParallelConfig]]:
    if ranks == 1:
        return
    shapes = request.shapes
    yield "data", ParallelConfig(data=ranks, zero=1)
    tensor = tensor_ranks(shapes, ranks)
    if tensor > 1:
        yield "tensor", ParallelConfig(tensor=tensor)
    yield "pipeline", with_stages(ParallelConfig(pipeline=min(ranks, shapes.num_hidden_layers)), shapes.num_hidden_layers)
    experts = expert_ranks(shapes, ranks)
    if experts > 1:
        yield "expert", ParallelConfig(data=ranks, expert=experts, zero=1)


def _axis(name: str, parallel: ParallelConfig, alone: Score) -> Axis | None:
    layout = replace(alone.layout, parallel=parallel)
    try:
        check_layout(alone.shapes, parallel, repeats_heads=True)
    except UserError:
        return None
    scored = score(alone.shapes, layout, alone.hardware)
    time = scored.time
    communication = (
        time.tensor_communication + time.data_communication + time.pipeline_communication + time.expert_communication + time.context_communication
    )
    # Pipelines and data-parallel ranks compute a micro-batch as one GPU does; tensor-parallel ranks share it.
    one = replace(layout, parallel=replace(parallel, data=1, expert=1, zero=0), global_batch=1)
    latency = score(alone.shapes, one, alone.hardware).step_seconds
    alone_latency = score(alone.shapes, replace(alone.layout, global_batch=1), alone.hardware).step_seconds
    return Axis(
        name, layout.gpus, BEST_USE[name], scored.tokens_per_s_per_gpu / alone.tokens_per_s_per_gpu, communication, latency / alone_latency,
        scored.memory.total / alone.memory.total,
    )  # fmt: skip
