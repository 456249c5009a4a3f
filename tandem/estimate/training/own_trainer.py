"""The bytes of one rank of Tandem's own trainer, on a CPU or a GPU, as section ``trainer`` of a recipe chooses. Imports no torch.

A layer saves what the literature counts (``activations.whole_layer_bytes``) and, beside it, what these tests hold against tensors that were kept in fact
(``tests/model/test_model_recompute.py``): the residual stream in the precision of the weights, and queries, keys and values before and after rotation.
"""

from collections.abc import Sequence
from dataclasses import replace

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import held_by_layer, held_outside_layers, trained_bytes, weight_bytes
from tandem.estimate.processes import rank_process_bytes
from tandem.estimate.training.activations import LayerBytes, whole_layer_bytes
from tandem.estimate.training.held_parameters import NOTHING, Held, held_on_span
from tandem.estimate.training.layout import TrainingLayout, layout_of_trainer
from tandem.estimate.training.linear_attention import saved_in_chunks, saved_token_by_token, scratch_in_chunks
from tandem.estimate.training.literature import CONTEXT_BYTES, FRAGMENTATION, buffer_bytes, residual_bytes
from tandem.estimate.training.stage_bytes import StageBytes
from tandem.estimate.training_bytes import (
    ACTIVATIONS_IN_FLIGHT_BYTES,
    STAGING_BYTES,
    checkpoint_bytes,
    gathered_bytes_per_token,
    head_bytes,
    state_bytes,
    token_sharing,
    working_bytes,
)
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.lm_head import gpu_logits_bytes
from tandem.layout.pipeline_stages import Span, whole
from tandem.layout.shapes import ModelShapes
from tandem.types.dtypes import DTYPE_BYTES

KEPT_SHARE = 0.1
"""Measured: the share of a rank's memory that is freed but kept by the C library because of fragmentation."""
PIECES_BYTES = 6 * (16 << 20)
"""The pieces of offloaded moments that are on a GPU at once (``trainer.optimizers.adamw_host``)."""
BUCKETS_UNDER_WAY = 2
"""Gradient reductions in flight (``trainer.parallel.gradient_reducer``); each has a send and a receive buffer."""
HOLES = 8
"""Collectives of a layer where tensor-parallel ranks divide the tokens: before and after attention and the MLP, forward and backward. Each leaves one hole of a
rank's share of a hidden state in the heap: the share is freed as soon as it is sent or added, and what is saved beside it, the statistics of norms and of
attention, takes a piece of its place, so that the next share does not fit. Counted in the heaps of two ranks with 8 layers (``malloc_info``): 62 and 68."""
WHOLE_LAYERS = 2
"""Layers whose weights ZeRO 3 has gathered at once: the current one and the next."""
IN_FP32 = layout_of_trainer(TrainerConfig(), ParallelConfig(), 1)
"""One process on a CPU."""
DEEPSPEED_BUCKET = 2**24
"""Elements of the buffer in which DeepSpeed reduces gradients (``reduce_bucket_size``), at most."""


def stage_bytes(shapes: ModelShapes, layout: TrainingLayout, spans: Sequence[Span]) -> StageBytes:
    """Returns the bytes of a rank that has ``spans`` of the layers."""
    trainer, parallel, tokens = trainer_of(layout), layout.parallel, layout.pass_tokens / layout.parallel.context
    layers = [layer for span in spans for layer in range(span.start, span.stop)]
    is_last = spans[-1].is_last
    parameters, gradients, optimizer, master = _states(shapes, layout, spans)
    each = [saved_by_layer(shapes, layer, layout).of_rank(layout) for layer in layers]
    copied = (layout.attended * gathered_bytes_per_token(shapes) + element_bytes(layout) * _absorbed_weights(shapes)) / parallel.tensor
    ends = end_bytes(shapes, layout) if is_last else 0.0
    saved = layout.distinct * tokens * (sum(each) + ends) + copied * (1 if trainer.recompute == "full" else len(layers))
    working = tokens * max(working_by_layer(shapes, layer, layout) for layer in layers)
    most_saved = float("inf")
    if trainer.offload_activations == "nvme":
        # A layer's own activations are in memory while it computes, and in the backward pass as many gradients.
        at_work = 2 * layout.pass_tokens * largest_layer_bytes_per_token(shapes, layout) // token_sharing(parallel)
        most_saved = 2 * ACTIVATIONS_IN_FLIGHT_BYTES + at_work
    reduced, gathered = _exchanged(shapes, layout)
    logits = 0
    if is_last and shapes.language_head:
        logits = head_bytes(shapes, layout.pass_tokens, parallel)
        if not layout.on_cpu:
            logits = gpu_logits_bytes(int(tokens), -(-shapes.head_rows // parallel.tensor))
    if layout.distinct < 1:
        # Beside what was saved of all layers the gradients of the last one's attention, or without the last one's those of a whole layer; logits are freed.
        in_attention, in_layer = (tokens * bytes_of_token for bytes_of_token in _repeated_backward_bytes(shapes, layout))
        before_last = layout.distinct * tokens * sum(each[:-1])
        working += max(0.0, max(saved + in_attention, before_last + in_layer) - saved - logits)
    on_cpu = layout.on_cpu
    return StageBytes(
        parameters, gradients, optimizer, master, saved=saved, working=working, logits=logits, gathered=gathered, reduced=reduced,
        buffers=0.0 if on_cpu else buffer_bytes(layout, residual_bytes(shapes, layout, tokens, DTYPE_BYTES[trainer.dtype])),
        kept=KEPT_SHARE if on_cpu else FRAGMENTATION, context=rank_process_bytes(trainer, layout.is_forked) if on_cpu else CONTEXT_BYTES,
        keeps_states=on_cpu, most_saved=most_saved, staged=staging_bytes(shapes, trainer, parallel) if on_cpu else 0,
        holes=HOLES * len(layers) * tokens / parallel.tensor * shapes.hidden_size * DTYPE_BYTES[trainer.dtype] if on_cpu and layout.shares_tokens else 0.0,
    )  # fmt: skip


def trainer_of(layout: TrainingLayout) -> TrainerConfig:
    assert layout.trainer is not None
    return layout.trainer


def element_bytes(layout: TrainingLayout) -> int:
    """Returns the bytes of an activation but those of the residual stream: on a GPU in the precision of the products; a CPU emulates it."""
    is_halved = not layout.on_cpu and layout.precision != "fp32"
    return 2 if is_halved else DTYPE_BYTES[trainer_of(layout).dtype]


def saved_by_layer(shapes: ModelShapes, layer: int, layout: TrainingLayout) -> LayerBytes:
    """Returns what a forward pass saves of ``layer`` for its backward pass, for one token: all of it; with ``selective`` recomputation without the rotated
    projections and the activation function's product, and on a CPU without what norms return; with ``full`` the layer's two inputs."""
    trainer, each, hidden = trainer_of(layout), element_bytes(layout), shapes.hidden_size
    if trainer.recompute == "full":
        return LayerBytes((DTYPE_BYTES[trainer.dtype] + each) * hidden, 0)
    everything = whole_bytes(shapes, layer, layout)
    if trainer.recompute == "none":
        return everything
    experts = shapes.experts_of(layer)
    inner = shapes.intermediate_size if experts is None else experts.num_experts_per_tok * experts.intermediate_size
    # What was gathered is not an output of a kernel that could be called again.
    rotates = _rotates_apart(shapes, layout) and shapes.latent is None and shapes.linear_attention_of(layer) is None
    rotated = shapes.qkv_size if rotates else 0
    again = each * ((0 if _gathers_inputs(layout) else inner) + rotated)
    dropped = 2 * each * hidden if layout.on_cpu and not layout.shares_tokens else 0
    return LayerBytes(everything.replicated - dropped, everything.divided - again, everything.gathered)


def whole_bytes(shapes: ModelShapes, layer: int, layout: TrainingLayout) -> LayerBytes:
    """Returns what ``layer`` saves for one token without recomputation."""
    trainer, each, hidden = trainer_of(layout), element_bytes(layout), shapes.hidden_size
    counted = whole_layer_bytes(shapes, layer, each)
    replicated = counted.replicated + 2 * (DTYPE_BYTES[trainer.dtype] - each) * hidden
    linear, attended = shapes.linear_attention_of(layer), shapes.query_size
    if linear is None:
        divided = counted.divided + (each * shapes.qkv_size if _rotates_apart(shapes, layout) else 0)
        # The gate, and what its sigmoid is computed by, are in at least fp32.
        divided += (4 * max(each, 4) - each) * shapes.query_size if shapes.attention_gate else 0
    else:
        attended, divided = linear.value_size, counted.divided - saved_in_chunks(linear, each) + saved_token_by_token(linear, each)
    if shapes.latent is not None:
        own = _absorbed(shapes, shapes.latent, rotates_apart=_rotates_apart(shapes, layout))
        replicated += each * (own.replicated - shapes.latent.compressed_size)
        divided = counted.divided + each * (own.divided - shapes.qkv_size - shapes.attended_size)
    experts = shapes.experts_of(layer)
    routed, inner = (1, shapes.intermediate_size) if experts is None else (experts.num_experts_per_tok, experts.intermediate_size)
    if _keeps_rounded(layout):
        # Emulated precision also saves the rounded input of every product.
        replicated += 4 * hidden * (1 + routed)
        divided += 4 * (attended + routed * inner)
    gathered = 0.0
    if layout.shares_tokens:
        # Autograd keeps the inputs of products as they were gathered, and of experts as they were sorted: only the norms' own are a rank's share.
        gathered = each * hidden * (2 if experts is None else 2 + 2 * routed)
        replicated -= gathered
    if _gathers_inputs(layout):
        # Also those of the second products of attention and MLP, in whose place a rank has its part of the MLP's no longer.
        gathered += each * (attended + routed * inner)
        divided -= each * routed * inner
    return LayerBytes(replicated, divided, gathered)


def largest_layer_bytes_per_token(shapes: ModelShapes, layout: TrainingLayout = IN_FP32) -> int:
    """Returns the bytes that the largest layer saves for one token without recomputation, undivided."""
    every = (whole_bytes(shapes, layer, layout) for layer in range(shapes.num_hidden_layers))
    return int(max(each.replicated + each.divided + each.gathered for each in every))


def working_by_layer(shapes: ModelShapes, layer: int, layout: TrainingLayout) -> float:
    """Returns what a rank holds for one token, beside what is saved, while the backward pass is in ``layer``: with ``full`` recomputation all that it
    saves, and on a GPU the scratch of linear attention."""
    recomputed = whole_bytes(shapes, layer, layout).of_rank(layout) if trainer_of(layout).recompute == "full" else 0.0
    linear = shapes.linear_attention_of(layer)
    if linear is None or layout.on_cpu:
        return recomputed
    return recomputed + scratch_in_chunks(linear.of_one_rank(layout.parallel.tensor))


def _repeated_backward_bytes(shapes: ModelShapes, layout: TrainingLayout) -> tuple[int, int]:
    """Returns what the backward pass of layers that compute equal beginnings once (``kernels.cpu.trained_layers``) holds at its worst moment for one token of
    all: in the attention of the last layer, which has few tokens behind it, and in another layer. In attention: the gradients of two residual streams and of
    attention's output, copies of queries, keys, values, output and log-sum-exp, the gradients of the first three, and those before their rotation; from the MLP
    those of its gate, of both its halves and of its input."""
    each, hidden, queries, keys = element_bytes(layout), shapes.hidden_size, shapes.query_size, shapes.key_value_size
    attention = each * (2 * hidden + 5 * queries + 6 * keys + shapes.num_attention_heads)
    return attention, attention + each * (3 * shapes.intermediate_size + hidden)


def end_bytes(shapes: ModelShapes, layout: TrainingLayout) -> float:
    """Returns the bytes of the last norm's input and output for one token."""
    trainer = trainer_of(layout)
    rounded = 4 if _keeps_rounded(layout) else 0
    own, normed = DTYPE_BYTES[trainer.dtype] * shapes.hidden_size, (element_bytes(layout) + rounded) * shapes.hidden_size
    # The head's input is gathered too.
    return (LayerBytes(own, 0, normed) if layout.shares_tokens else LayerBytes(own + normed, 0)).of_rank(layout)


def staging_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig) -> int:
    """Returns one rank's share of the copy that a checkpoint is written from during training. With offloaded moments it is in a file."""
    return 0 if trainer.offload == "nvme" else checkpoint_bytes(shapes, trainer) // parallel.world


def _gathers_inputs(layout: TrainingLayout) -> bool:
    """Returns whether every tensor-parallel rank has the whole input of each product, of which it computes some columns."""
    return layout.parallel.tensor > 1 and bool(layout.parallel.deterministic)


def _rotates_apart(shapes: ModelShapes, layout: TrainingLayout) -> bool:
    """Returns whether queries, keys and values are saved before and after rotation."""
    return layout.on_cpu or shapes.qk_norm or layout.precision == "fp32"


def _states(shapes: ModelShapes, layout: TrainingLayout, spans: Sequence[Span]) -> tuple[int, int, int, int]:
    """Returns the bytes of the products' weights, gradients, the optimizer and the fp32 weights from one step to the next."""
    trainer, parallel = trainer_of(layout), layout.parallel
    if trainer.offload_parameters == "nvme":
        return _paged_bytes(shapes, layout), 0, 0, 0
    dense, expert = _shares(shapes, layout, spans)
    replicas, is_away = parallel.data * parallel.context, trainer.offload == "nvme" or (trainer.offload == "cpu" and not layout.on_cpu)

    def cut(size: float, from_stage: int) -> int:
        """Returns this rank's part of ``size`` bytes of the whole model's parameters, which ZeRO shards from ``from_stage`` on."""
        of_dense, of_expert = (replicas, replicas // parallel.expert) if parallel.zero >= from_stage else (1, 1)
        return -(-int(dense * size) // of_dense) + (-(-int(expert * size) // of_expert) if expert else 0)

    weights = weight_bytes(shapes, trainer.dtype, parallel.tensor)
    gradients = cut(trained_bytes(shapes, trainer.dtype, parallel.tensor), 2)
    if is_away:
        optimizer = STAGING_BYTES if layout.on_cpu else PIECES_BYTES
    else:
        optimizer = cut(state_bytes(shapes, trainer) // parallel.tensor, 1) + working_bytes(shapes, trainer, parallel)
    if trainer.precision == "fp32" or (layout.on_cpu and not _keeps_rounded(layout)):
        return cut(weights, 3), gradients, optimizer, 0
    # Every matrix exists once more, rounded, until its backward pass: in 16 bits on a GPU, in fp32 where a CPU emulates fp16 or fp8.
    return cut(weights if layout.on_cpu else weights // 2, 4), gradients, optimizer, cut(weights, 3)


def _keeps_rounded(layout: TrainingLayout) -> bool:
    """Returns whether the rounded operands of products are kept in fp32 until the backward pass: on a CPU all but those of bf16, which the kernels round as
    they multiply (``kernels.mixed``)."""
    return layout.on_cpu and trainer_of(layout).precision in ("fp16", "fp8")


def _absorbed(shapes: ModelShapes, latent: LatentAttention, *, rotates_apart: bool) -> LayerBytes:
    """Returns the numbers that latent attention in its absorbed form saves for one token. Of each head: the queries in the space of the compressed vector, and
    what attention returns twice, as it is and sorted by heads; queries without rotation, sorted too, and the values that leave. Of all heads: the inputs and
    outputs of the norms, the key, and the value apart from it. Rotation saves its input, and its outputs stay with it."""
    nope, rope, rank = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.kv_lora_rank
    of_head = nope + latent.cached_size + 2 * rank + latent.v_head_dim
    of_all = 2 * latent.q_lora_rank + 2 * rank + latent.cached_size
    if rotates_apart:
        of_head, of_all = of_head + 2 * rope, of_all + 3 * rope
    return LayerBytes(of_all, shapes.num_attention_heads * of_head)


def _absorbed_weights(shapes: ModelShapes) -> int:
    """Returns the numbers of a layer's matrix within heads, of which the absorbed form makes a copy sorted by heads that the backward pass needs."""
    latent = shapes.latent
    return 0 if latent is None else shapes.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim) * latent.kv_lora_rank


def _shares(shapes: ModelShapes, layout: TrainingLayout, spans: Sequence[Span]) -> tuple[float, float]:
    """Returns the shares of a tensor-parallel rank's parameters that are in ``spans``: of those that all data-parallel ranks have, and of experts that only
    some of them have."""
    if layout.parallel.pipeline == 1 and layout.parallel.expert == 1:
        return 1.0, 0.0
    plain = replace(shapes, lora=None)
    everything = held_on_span(plain, whole(shapes.num_hidden_layers), 1, 1).total
    own = sum((held_on_span(plain, span, 1, layout.parallel.expert) for span in spans), NOTHING)
    own = own if layout.parallel.expert > 1 else Held(own.total, 0)
    return own.dense / everything, own.expert / everything


def _paged_bytes(shapes: ModelShapes, layout: TrainingLayout) -> int:
    """Returns the bytes of weights, gradients and moments if the layers' are in a file: parameters outside layers, the weights of two
    layers, the gradients of one layer being written, two more gradients, and the pager's buffers. Under ZeRO: this rank's part of the
    weights and gradients outside layers in addition to the whole ones, and the prefetched part of two layers and that of gradients being
    written."""
    trainer, parallel = trainer_of(layout), layout.parallel
    layers = [held_by_layer(shapes, layer) for layer in range(shapes.num_hidden_layers)]
    largest = max(sum(count for count, _ in held) for held in layers)
    parameter = max(count for held in layers for count, _ in held)
    outside, replicas = 2 * sum(held_outside_layers(shapes)), parallel.data * parallel.context
    numbers = outside + 3 * largest + 2 * parameter
    if parallel.world > 1:
        # A layer's gradients have a second, contiguous copy while they are reduced.
        numbers = outside + outside // replicas + 4 * largest + 4 * largest // replicas
    return numbers // parallel.tensor * DTYPE_BYTES[trainer.dtype] + 2 * STAGING_BYTES


def _exchanged(shapes: ModelShapes, layout: TrainingLayout) -> tuple[int, int]:
    """Returns the bytes that a data-parallel rank holds in addition to its part: gradients of layers, and of parameters outside them, that are being reduced,
    and under ZeRO 2 and 3 those that a backward pass has not yet reduced; and under ZeRO 3 the gathered weights. With DeepSpeed its buffer for reductions, and
    the second copy of the weights that a rank updates."""
    trainer, parallel = trainer_of(layout), layout.parallel
    itemsize = DTYPE_BYTES[trainer.dtype]
    if trainer.backend == "deepspeed":
        size = trained_bytes(shapes, trainer.dtype)
        reduced = size // parallel.data + min(size, DEEPSPEED_BUCKET * itemsize)
        return reduced, sum(held_outside_layers(shapes)) * itemsize if parallel.zero == 3 else 0
    if parallel.data * parallel.context == 1 or trainer.offload_parameters == "nvme":
        return 0, 0
    outside = held_outside_layers(shapes)
    layer = max(sum(count for count, _ in held_by_layer(shapes, index)) for index in range(shapes.num_hidden_layers))
    if shapes.lora is not None:
        # Only the adapter's gradients are reduced.
        outside, layer = [0], trained_bytes(shapes, trainer.dtype) // itemsize // shapes.num_hidden_layers
    numbers = 2 * BUCKETS_UNDER_WAY * layer + 2 * max(outside)
    if parallel.zero >= 2:
        # The gradient of a tied embedding begins with the head's and ends with the embedding's.
        numbers += layer + outside[0]
    whole_layers = WHOLE_LAYERS * layer + sum(outside) if parallel.zero == 3 else 0
    return numbers // parallel.tensor * itemsize, whole_layers // parallel.tensor * itemsize
