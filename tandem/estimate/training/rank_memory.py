"""The bytes of one GPU in a training step. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training.activations import element_bytes, end_bytes, logit_bytes, pass_tokens, saved_bytes, working_bytes
from tandem.estimate.training.held_parameters import NOTHING, Held, held_by_part, held_on_span
from tandem.estimate.training.layout import TrainingLayout
from tandem.layout.pipeline_stages import Span, own_spans, spans_of
from tandem.layout.shapes import ModelShapes

CONTEXT_BYTES = 700 << 20
"""The CUDA context with the kernels of the libraries (NVIDIA H100: 500 to 600 MiB), and the workspace of cuBLAS (32 MiB a handle)."""
GROUP_BYTES = 200 << 20
"""Buffers of NCCL for a group of ranks: 4 MiB (``NCCL_BUFFSIZE``) in each direction of up to 24 channels."""
FRAGMENTATION = 0.05
"""The share of what comes and goes in a step that the caching allocator holds beside it, in blocks that fit nothing else."""
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
"""Of a parameter trained in 16 bits or fewer: the fp32 weight, two fp32 moments of AdamW, and the fp32 sum of its gradient."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the fullest GPU at the worst moment, by kind; they add up to ``total``. ``pipeline_stash``: activations of micro-batches that await their
    backward pass beside the current one. ``gathered``: parameters that ZeRO 3 has gathered. ``context``: of the driver and the libraries."""

    parameters: int
    gradients: int
    optimizer: int
    master_weights: int
    activations: int
    pipeline_stash: int
    logits: int
    gathered: int
    communication: int
    fragmentation: int
    context: int

    @property
    def total(self) -> int:
        return int(sum(getattr(self, name) for name in self.__slots__))


def predict_rank_memory(shapes: ModelShapes, layout: TrainingLayout) -> RankMemory:
    """Returns the memory of the fullest GPU of ``layout``; it is the same on all hardware. Raises ``UserError`` for a pipeline and ``ValueError`` for ranks
    that do not divide the model."""
    return max(memory_by_stage(shapes, layout), key=lambda memory: memory.total)


def memory_by_stage(shapes: ModelShapes, layout: TrainingLayout) -> list[RankMemory]:
    """Returns the memory of a GPU of every pipeline rank, in their order."""
    spans = spans_of(layout.parallel, shapes)
    return [_of_stage(shapes, layout, own_spans(layout.parallel, spans, rank), rank) for rank in range(layout.parallel.pipeline)]


def chunks_in_flight(parallel: ParallelConfig, micro_batches: int, rank: int) -> int:
    """Returns the most forward passes of a stage that await their backward pass on a pipeline rank: ``max_in_flight_micro_batches`` of its operations in
    closed form."""
    ranks, virtual = parallel.pipeline, parallel.virtual_stages
    if parallel.schedule == "gpipe" and ranks > 1:
        return micro_batches
    if virtual == 1:
        return min(micro_batches, ranks - rank)
    return min(micro_batches * virtual, 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1)


def _of_stage(shapes: ModelShapes, layout: TrainingLayout, spans: Sequence[Span], rank: int) -> RankMemory:
    parallel, tokens = layout.parallel, pass_tokens(layout)
    held = sum((held_on_span(shapes, span, parallel.tensor, parallel.expert) for span in spans), NOTHING)
    parts = held_by_part(shapes, parallel.tensor, parallel.expert)
    layers = [layer for span in spans for layer in range(span.start, span.stop)]
    is_first, is_last = spans[0].is_first, spans[-1].is_last
    each = element_bytes(layout)

    residual = tokens * each * shapes.hidden_size / (parallel.tensor if layout.shares_tokens else 1)
    # All layers of a kind save the same.
    kinds = {shapes.experts_of(layer) is None: layer for layer in layers} if shapes.experts is not None else {True: layers[0]}
    plain = len(layers) if shapes.experts is None else sum(shapes.experts_of(layer) is None for layer in layers)
    counts = {True: plain, False: len(layers) - plain}
    saved = sum(counts[kind] * saved_bytes(shapes, layer, layout).of_rank(layout) for kind, layer in kinds.items())
    chunk = tokens * (saved + end_bytes(shapes, layout, is_first=is_first, is_last=is_last))
    if parallel.pipeline > 1:
        # The output of every stage, whose gradient starts its backward pass.
        chunk += residual * len(spans)
    working = tokens * max(working_bytes(shapes, layer, layout) for layer in kinds.values())
    passes = max(1.0, chunks_in_flight(parallel, layout.micro_batches, rank) / len(spans))
    logits = logit_bytes(shapes, layout) if is_last else 0.0

    largest = max((parts.plain_layer, parts.expert_layer), key=lambda part: part.total)
    gathered, reduced = 0.0, 0.0
    if parallel.zero == 3:
        # Two blocks, the current and the prefetched one; the ends stay gathered from the forward to the backward pass.
        ends = (parts.embedding.total if is_first else 0) + (parts.head.total if is_last else 0)
        gathered = each * (2 * largest.total + ends) if layout.reshard_after_forward else each * held.total
    if parallel.zero >= 2 and _reduces_each_pass(layout):
        # The gradients of one block, in the precision of the products and in fp32, until they are reduced.
        reduced = (each + GRADIENT_BYTES) * largest.total if each < GRADIENT_BYTES else 2 * GRADIENT_BYTES * largest.total
    parameters, gradients, optimizer, master = _states(held, layout)
    axes = (parallel.tensor, parallel.data * parallel.context, parallel.pipeline, parallel.expert, parallel.context)
    groups = GROUP_BYTES * sum(size > 1 for size in axes)
    transfers = 2.0 * residual if parallel.pipeline > 1 else 0.0
    comes_and_goes = passes * chunk + working + logits + gathered + reduced
    return RankMemory(
        parameters=parameters, gradients=gradients, optimizer=optimizer, master_weights=master, activations=math.ceil(chunk + working),
        pipeline_stash=math.ceil((passes - 1) * chunk), logits=math.ceil(logits), gathered=math.ceil(gathered),
        communication=math.ceil(groups + transfers + reduced), fragmentation=math.ceil(FRAGMENTATION * comes_and_goes), context=CONTEXT_BYTES,
    )  # fmt: skip


def _states(held: Held, layout: TrainingLayout) -> tuple[int, int, int, int]:
    """Returns the bytes of weights, gradients, moments and fp32 weights from one step to the next."""
    stage, replicas = layout.parallel.zero, layout.parallel.data * layout.parallel.context

    def cut(bytes_each: float, from_stage: int) -> int:
        """Returns the bytes of all parameters, which ZeRO shards from ``from_stage`` on."""
        dense, expert = (replicas, replicas // layout.parallel.expert) if stage >= from_stage else (1, 1)
        return math.ceil(bytes_each * held.dense / dense) + math.ceil(bytes_each * held.expert / expert)

    on_device = layout.offload == "none"
    moments = cut(MOMENT_BYTES, 1) if on_device else 0
    gradients = cut(GRADIENT_BYTES, 2) if _reduces_each_pass(layout) else GRADIENT_BYTES * held.total
    if layout.precision == "fp32":
        return cut(4, 3), gradients, moments, 0
    master = cut(MASTER_BYTES, 1) if on_device else 0
    # With ZeRO 3 the shard in fp32 is the only one: its blocks are rounded as they are gathered.
    weights = 0 if stage == 3 and on_device else cut(2, 3)
    return weights, gradients, moments, master


def _reduces_each_pass(layout: TrainingLayout) -> bool:
    """Returns whether ZeRO 2 and 3 shard the gradients after each backward pass, so that they are never whole together."""
    return layout.parallel.zero != 3 or layout.reshard_after_forward
