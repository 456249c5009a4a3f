"""The recommendation matrix: how a model of a size is laid out on a number of GPUs before anything is computed. Imports no torch.

Edges: a row has its lower bounds and not its upper ones, so that 7 billion parameters are in the second row. With fewer GPUs than a row names, tensor and
pipeline parallelism shrink, the pipeline first, until one copy of the model's layout fits the GPUs; with more, data parallelism takes them. Over 500 billion
parameters the last row applies. Where a row names a range of stages, the fewest that fit in memory are taken. Tensor parallelism is the largest power of two
up to the row's that divides the heads and stays in a node. A mixture of experts adds expert parallelism with as many ranks as experts, or the largest
number that divides both the experts and the data-parallel ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training.layout import Recompute, TrainingLayout
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.planner.layouts import with_stages
from tandem.planner.request import SAFE_SHARE, PlanRequest
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the matrix: from ``least_parameters`` on, on ``gpus`` GPUs."""

    least_parameters: float
    gpus: tuple[int, int]
    tensor: int
    pipeline: tuple[int, ...]
    reason: str


MATRIX = (
    Rule(0, (1, 8), 1, (1,), "under 7B parameters a GPU holds the model, and data parallelism alone communicates once a step"),
    Rule(7e9, (8, 64), 8, (1,), "from 7B to 30B the matrices are divided over the 8 GPUs of a node, whose links are fast enough, and nodes divide the batch"),
    Rule(30e9, (64, 512), 8, (2, 4), "from 30B to 100B a node is too small, so that 2 to 4 nodes divide the layers, and the rest divide the batch"),
    Rule(100e9, (512, 4096), 8, (8, 16), "from 100B on, 8 to 16 nodes divide the layers, and the rest divide the batch"),
)
MOST_MATRIX_PARAMETERS = 500e9


@dataclass(frozen=True, slots=True)
class Advice:
    """What the matrix recommends, and why in a sentence."""

    layout: TrainingLayout
    rule: Rule
    reason: str


def rule_for(parameters: float) -> Rule:
    """Returns the row of a model of ``parameters``."""
    return next(rule for rule in reversed(MATRIX) if parameters >= rule.least_parameters)


def advise(request: PlanRequest) -> Advice:
    """Returns the layout of the matrix. Raises ``UserError`` if the batch divides over no number of data-parallel ranks."""
    parameters = parameter_count(request.shapes)
    rule = rule_for(parameters)
    options = [layout for pipeline in rule.pipeline for layout in _layouts(request, rule, pipeline)]
    if not options:
        each = f" in micro-batches of {request.micro_batch}" if request.micro_batch is not None else ""
        raise UserError(
            f"--global-batch {request.global_batch} divides over no data-parallel ranks of {request.gpus} GPUs{each}; make it a multiple of "
            f"{(request.micro_batch or 1) * request.gpus}"
        )
    # The fewest stages that fit, with the least recomputation; of those that do not fit, what comes nearest.
    memory = SAFE_SHARE * request.hardware.memory_bytes
    chosen = next((each for each in options if predict_rank_memory(request.shapes, each).total <= memory), None)
    chosen = chosen or min(options, key=lambda each: predict_rank_memory(request.shapes, each).total)
    return Advice(chosen, rule, f"{parameters / 1e9:.1f}B parameters on {request.gpus} GPUs: {rule.reason}{_edge(rule, request.gpus, parameters)}")


def _edge(rule: Rule, gpus: int, parameters: float) -> str:
    least, most = rule.gpus
    if gpus < least:
        return f" (the row begins at {least} GPUs: with fewer, the layout shrinks, the pipeline first)"
    if gpus > most:
        return f" (the row ends at {most} GPUs: more of them divide the batch)"
    return f" (over {MOST_MATRIX_PARAMETERS / 1e9:.0f}B the last row applies)" if parameters > MOST_MATRIX_PARAMETERS else ""


def _layouts(request: PlanRequest, rule: Rule, pipeline: int) -> Iterator[TrainingLayout]:
    """Yields the layouts of a row with ``pipeline`` stages, from the least recomputation and the largest micro-batch to the most and the smallest."""
    shapes = request.shapes
    tensor = tensor_ranks(shapes, min(rule.tensor, request.gpus, request.hardware.gpus_per_node))
    pipeline = min(pipeline, max(1, request.gpus // tensor), shapes.num_hidden_layers)
    while request.gpus % (tensor * pipeline) or request.global_batch % (request.gpus // (tensor * pipeline)):
        if pipeline > 1:
            pipeline -= 1
        elif tensor > 1:
            tensor //= 2
        else:
            return
    data = request.gpus // (tensor * pipeline)
    parallel = ParallelConfig(
        data=data, tensor=tensor, pipeline=pipeline, expert=expert_ranks(shapes, data), zero=1 if data > 1 else 0,
    )  # fmt: skip
    recomputations: tuple[Recompute, ...] = ("none", "full") if request.recompute is None else (request.recompute,)
    each = request.global_batch // data
    micro_batches = (request.micro_batch,) if request.micro_batch is not None else tuple(size for size in (4, 2, 1) if each % size == 0)
    for recompute in recomputations:
        for micro_batch in micro_batches:
            if each % micro_batch == 0 and (pipeline == 1 or each // micro_batch >= 4 * pipeline or micro_batch == 1):
                staged = with_stages(parallel, shapes.num_hidden_layers)
                yield request.completed(TrainingLayout(staged, request.sequence, request.global_batch, micro_batch, request.precision, recompute))


def tensor_ranks(shapes: ModelShapes, most: int) -> int:
    """Returns the largest power of two up to ``most`` that divides the heads, of linear attention too, and the inner size; 1 for norms over all heads."""
    if shapes.qk_norm_all_heads:
        return 1
    sizes = [shapes.num_attention_heads, shapes.intermediate_size if shapes.experts is None else shapes.experts.intermediate_size]
    sizes += [] if shapes.linear_attention is None else [shapes.linear_attention.num_key_heads]
    tensor = 1
    while 2 * tensor <= most and all(size % (2 * tensor) == 0 for size in sizes):
        tensor *= 2
    kv_heads = shapes.num_key_value_heads
    while tensor > 1 and kv_heads % tensor and tensor % kv_heads:
        tensor //= 2
    return tensor


def expert_ranks(shapes: ModelShapes, replicas: int) -> int:
    """Returns the expert-parallel ranks: as many as experts, or the largest number that divides both them and the data-parallel ranks."""
    return 1 if shapes.experts is None else math.gcd(shapes.experts.num_experts, replicas)
