"""The bytes of one rank of a trainer of the literature (Megatron-Core, FSDP2) on a GPU, as ``docs/planner.md`` derives them. Imports no torch."""

import math
from collections import Counter
from collections.abc import Sequence

from tandem.estimate.training.activations import (
    element_bytes,
    end_bytes,
    freed_logit_bytes,
    kept_logit_bytes,
    logit_bytes,
    pass_tokens,
    saved_bytes,
    working_bytes,
)
from tandem.estimate.training.held_parameters import NOTHING, Held, held_by_part, held_on_span
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.stage_bytes import StageBytes
from tandem.layout.pipeline_stages import Span
from tandem.layout.shapes import ModelShapes

CONTEXT_BYTES = 700 << 20
"""The CUDA context with the kernels of the libraries (NVIDIA H100: 500 to 600 MiB), and the workspace of cuBLAS (32 MiB a handle)."""
GROUP_BYTES = 200 << 20
"""Buffers of NCCL for a group of ranks: 4 MiB (``NCCL_BUFFSIZE``) in each direction of up to 24 channels."""
FRAGMENTATION = 0.05
"""The share of what comes and goes in a step that the caching allocator holds beside it, in blocks that fit nothing else."""
MASTER_BYTES, MOMENT_BYTES, HALF_MOMENT_BYTES = 4, 8, 4
"""Of a parameter trained in 16 bits or fewer: the fp32 weight, and two moments of AdamW in fp32 or, where it updates 16-bit weights, in 16 bits."""


def stage_bytes(shapes: ModelShapes, layout: TrainingLayout, spans: Sequence[Span]) -> StageBytes:
    """Returns the bytes of a rank that has ``spans`` of the layers."""
    parallel, tokens = layout.parallel, pass_tokens(layout)
    whole = layout.whole_vocabulary
    held = sum((held_on_span(shapes, span, parallel.tensor, parallel.expert, whole_embedding=whole) for span in spans), NOTHING)
    parts = held_by_part(shapes, parallel.tensor, parallel.expert)
    layers = [layer for span in spans for layer in range(span.start, span.stop)]
    is_first, is_last = spans[0].is_first, spans[-1].is_last
    each = element_bytes(layout)

    residual = residual_bytes(shapes, layout, tokens, each)
    # All layers of a kind save the same.
    kind_of = lambda layer: (shapes.experts_of(layer) is None, shapes.linear_attention_of(layer) is None)
    kinds, counts = {kind_of(layer): layer for layer in layers}, Counter(map(kind_of, layers))
    saved = sum(counts[kind] * saved_bytes(shapes, layer, layout).of_rank(layout) for kind, layer in kinds.items())
    saved = tokens * (saved + end_bytes(shapes, layout, is_first=is_first, is_last=is_last))
    if parallel.pipeline > 1:
        # The output of every stage, whose gradient starts its backward pass.
        saved += residual * len(spans)
    working = tokens * max(working_bytes(shapes, layer, layout) for layer in kinds.values())
    logits = logit_bytes(shapes, layout) if is_last else 0.0

    largest = max((parts.plain_layer, parts.expert_layer), key=lambda part: part.total)
    gathered, ends_gathered, reduced = 0.0, 0.0, 0.0
    if parallel.zero == 3:
        # Two blocks, the current and the prefetched one; the ends stay gathered from the forward to the backward pass.
        embedding = held_by_part(shapes, 1, parallel.expert).embedding if whole else parts.embedding
        ends = (embedding.total if is_first else 0) + (parts.head.total if is_last else 0)
        gathered = each * (2 * largest.total + ends) if layout.reshard_after_forward else each * held.total
        ends_gathered = each * ends if layout.reshard_after_forward else gathered
    if parallel.zero >= 2 and _reduces_each_pass(layout):
        # The gradients of one block, in the precision of the products and in that of the sum, until they are reduced.
        reduced = (each + layout.gradient_bytes) * largest.total
    # The logits' gradients are there before the backward pass of the last layer, and are dropped when the head's is done.
    left = kept_logit_bytes(shapes, layout) if is_last else 0.0
    if logits + ends_gathered > left + working + gathered + reduced:
        working, gathered, reduced, holes = 0.0, ends_gathered, 0.0, freed_logit_bytes(shapes, layout)
    else:
        logits, holes = left, 0.0
    parameters, gradients, optimizer, master = _states(held, layout)
    return StageBytes(
        parameters, gradients, optimizer, master, saved=saved, working=working, logits=logits, gathered=gathered, reduced=reduced,
        buffers=buffer_bytes(layout, residual), kept=FRAGMENTATION, context=CONTEXT_BYTES, holes=holes,
    )  # fmt: skip


def residual_bytes(shapes: ModelShapes, layout: TrainingLayout, tokens: float, each: int) -> float:
    """Returns the bytes of the residual stream of a rank between two layers."""
    return tokens * each * shapes.hidden_size / (layout.parallel.tensor if layout.shares_tokens else 1)


def buffer_bytes(layout: TrainingLayout, residual: float) -> float:
    """Returns the bytes of NCCL's buffers and of what a stage receives from both its neighbours."""
    parallel = layout.parallel
    axes = (parallel.tensor, parallel.data * parallel.context, parallel.pipeline, parallel.expert, parallel.context)
    return GROUP_BYTES * sum(size > 1 for size in axes) + (2.0 * residual if parallel.pipeline > 1 else 0.0)


def _states(held: Held, layout: TrainingLayout) -> tuple[int, int, int, int]:
    """Returns the bytes of weights, gradients, moments and fp32 weights from one step to the next."""
    stage, replicas = layout.parallel.zero, layout.parallel.data * layout.parallel.context

    def cut(bytes_each: float, from_stage: int) -> int:
        """Returns the bytes of all parameters, which ZeRO shards from ``from_stage`` on."""
        dense, expert = (replicas, replicas // layout.parallel.expert) if stage >= from_stage else (1, 1)
        return math.ceil(bytes_each * held.dense / dense) + math.ceil(bytes_each * held.expert / expert)

    on_device, is_halved = layout.offload == "none", layout.state_precision == "bf16"
    moments = cut(HALF_MOMENT_BYTES if is_halved else MOMENT_BYTES, 1) if on_device else 0
    # A summed gradient has the precision of the weight that it updates.
    shard_bytes = 2 if is_halved else layout.gradient_bytes
    # Nothing is summed between ranks that one has all data of.
    whole_bytes = layout.gradient_bytes if replicas > 1 else shard_bytes
    gradients = cut(shard_bytes, 2) if _reduces_each_pass(layout) else whole_bytes * held.total
    if layout.precision == "fp32":
        return cut(4, 3), gradients, moments, 0
    if is_halved:
        return cut(2, 3), gradients, moments, 0
    master = cut(MASTER_BYTES, 1) if on_device else 0
    # With ZeRO 3 the shard in fp32 is the only one: its blocks are rounded as they are gathered.
    weights = 0 if stage == 3 and on_device else cut(2, 3)
    return weights, gradients, moments, master


def _reduces_each_pass(layout: TrainingLayout) -> bool:
    """Returns whether ZeRO 2 and 3 shard the gradients after each backward pass, so that they are never whole together."""
    return layout.parallel.zero != 3 or (layout.reshard_after_forward and (layout.reduces_each_pass or layout.micro_batches == 1))
