"""The seconds of one step of an engine on GPUs: a roofline for each kernel. Imports no torch.

A kernel takes the longer of its operations at the product rate of the GPU and its bytes at a share of the memory bandwidth (Williams et al., 2009), and a
start before it reaches either (``serving.kernels``). A step of decoding reads all weights once and the keys and values of every sequence; prompt tokens that
share the step share the weights. The arithmetic of Pope et al., 2022 (arXiv 2211.05102, section 3), with the engine's own formats.
"""

import math
from dataclasses import dataclass

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.model_bytes import state_bytes
from tandem.estimate.serving.kernels import KERNELS, EngineKernels
from tandem.estimate.serving.kv_cache import attended_tokens, read_bytes
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.weight_formats import format_named
from tandem.estimate.training.linear_attention import chunked_flops
from tandem.layout.shapes import ModelShapes

LAYER_KERNELS = 9
"""Two norms, four products, rotation with the write to the cache, attention, activation."""
REDUCE_S = 6e-6
"""An all-reduce of a few rows over NVLink: one kernel in which every GPU reads from every other."""
REDUCE_SHARE = 0.75
"""Of the link bandwidth, which an all-reduce of many bytes reaches (bus bandwidth, nccl-tests)."""
TREE_S, TREE_LINK_S, TREE_NETWORK_S = 6.8e-6, 0.6e-6, 2.7e-6
"""Of NCCL's trees with the protocol of the least latency, which an all-reduce of a few rows takes beyond a node: before they start, and of each step within a
node and between two (github.com/NVIDIA/nccl, src/graph/tuning.cc, ``baseLat`` and ``hwLat``)."""

@dataclass(frozen=True, slots=True)
class EngineStep:
    """What a step computes: one token of ``decoding`` sequences of ``context`` tokens on average, and ``prompt_tokens`` tokens of prompts, which each attend
    to ``prompt_context`` earlier tokens on average. ``drafts``: draft tokens of each decoding sequence, which are computed beside its token and read its keys
    and values with it."""

    decoding: float = 0.0
    context: float = 0.0
    prompt_tokens: float = 0.0
    prompt_context: float = 0.0
    drafts: float = 0.0

    @property
    def decoded(self) -> float:
        """The rows of decoding sequences, of each of which a token is drawn."""
        return self.decoding * (1 + self.drafts)

    @property
    def rows(self) -> float:
        return self.decoded + self.prompt_tokens


@dataclass(frozen=True, slots=True)
class EngineStepTime:
    """Seconds of a step, which add up to ``seconds``: matrix products of the layers, output head and sampling, attention, memory-bound operations,
    all-reduces, the start of kernels, the host. ``reads_weights``: whether products take as long as reading the weights."""

    products: float
    head: float
    attention: float
    memory_bound: float
    communication: float
    launches: float
    host: float
    reads_weights: bool

    @property
    def seconds(self) -> float:
        return self.products + self.head + self.attention + self.memory_bound + self.communication + self.launches + self.host


def predict_step(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, step: EngineStep) -> EngineStepTime:
    """Returns the time of one step of an engine."""
    form, ranks, hidden, rows = format_named(layout.quantization), layout.tensor, shapes.hidden_size, step.rows
    kernels = KERNELS[layout.kernels]
    bandwidth = kernels.bandwidth * hardware.memory_bandwidth
    products, is_read = 0.0, True
    moved = 0.0
    for outputs, inputs, times, each, distinct in _matrices(shapes, ranks, rows):
        operations = 2 * each * distinct * outputs * inputs / (kernels.prompts * hardware.product_rate(form.multiplies_in))
        read = (distinct * form.matrix_bytes(outputs * inputs, inputs) + 2 * each * distinct * (outputs + inputs)) / bandwidth
        products += times * max(operations, read)
        is_read = is_read and read >= operations
        moved += times * 2 * each * distinct * outputs
    launches = kernels.start_s * LAYER_KERNELS * shapes.num_hidden_layers
    # Norms read and write the residual stream; rotation and activation their inputs once more.
    moved += shapes.num_hidden_layers * rows * 2 * 8 * hidden
    drawn = step.decoded + (step.prompt_tokens > 0)
    return EngineStepTime(
        products=products,
        head=_head(shapes, ranks, hardware, drawn, kernels),
        attention=_attention(shapes, layout, hardware, step, kernels),
        memory_bound=moved / bandwidth,
        communication=all_reduce_seconds(2 * rows * hidden, layout, hardware) * 2 * shapes.num_hidden_layers,
        launches=launches,
        host=layout.host_s + drawn * layout.host_sequence_s,
        reads_weights=is_read,
    )


def predict_decode_step(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, sequences: float, context: float) -> EngineStepTime:
    """Returns the time of a step in which ``sequences`` sequences of ``context`` tokens on average draw one token each."""
    return predict_step(shapes, layout, hardware, EngineStep(sequences, context))


def predict_prefill(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, tokens: int, sequences: int = 1, decoding: float = 0, context: float = 0
) -> float:
    """Returns the seconds until ``sequences`` prompts of ``tokens`` tokens are computed, in chunks of ``max_num_batched_tokens`` beside ``decoding`` sequences
    of ``context`` tokens: the time to the first token where nothing waits."""
    total, seconds, done = tokens * sequences, 0.0, 0
    budget = max(1, int(layout.max_num_batched_tokens - decoding))
    while done < total:
        chunk = min(budget, total - done)
        # Of chunks that hold whole prompts, a token attends to half of its prompt; of a part of one, to what is before it too.
        before = tokens / 2 if chunk >= tokens else (done % tokens + chunk / 2) % tokens
        seconds += predict_step(shapes, layout, hardware, EngineStep(decoding, context, chunk, before)).seconds
        done += chunk
    return seconds


def all_reduce_seconds(size: float, layout: ServingLayout, hardware: Hardware) -> float:
    """Returns the seconds of an all-reduce of ``size`` bytes over the GPUs of an engine: its latency, and 2 (n - 1) / n of the bytes over each link, or beyond
    a node over the network cards of all its GPUs."""
    if layout.tensor == 1:
        return 0.0
    sent = 2 * (layout.tensor - 1) / layout.tensor * size / (REDUCE_SHARE * hardware.group_bandwidth(layout.tensor, 1))
    nodes = -(-layout.tensor // hardware.gpus_per_node)
    if nodes == 1:
        return REDUCE_S + sent
    # Up the trees and down again, along the GPUs of a node and through the levels of the nodes.
    return TREE_S + 2 * ((hardware.gpus_per_node - 1) * TREE_LINK_S + math.ceil(math.log2(nodes)) * TREE_NETWORK_S) + sent


def _matrices(shapes: ModelShapes, ranks: int, rows: float) -> list[tuple[float, int, int, float, float]]:
    """Returns (outputs, inputs, how many layers have it, rows of each, how many matrices of the kind are read in a layer), of one rank."""
    hidden, layers, found = shapes.hidden_size, shapes.num_hidden_layers, list[tuple[float, int, int, float, float]]()
    if shapes.latent is None:
        heads = shapes.query_rows / ranks + 2 * max(1.0, shapes.num_key_value_heads / ranks) * shapes.head_dim
        found.append((heads, hidden, shapes.cached_layers, rows, 1.0))
    else:
        into = shapes.latent.matrices(hidden, shapes.num_attention_heads)
        found += [(each.outputs / (ranks if each.by_head else 1), each.inputs, layers, rows, 1.0) for each in into]
    found.append((hidden, max(1, shapes.attended_size // ranks), shapes.cached_layers, rows, 1.0))
    if shapes.linear_attention is not None:
        own = shapes.linear_attention.of_one_rank(ranks)
        found += [(matrix.outputs, matrix.inputs, len(own.layers), rows, 1.0) for matrix in own.matrices(hidden)]
    dense = layers if shapes.experts is None else sum(shapes.experts_of(layer) is None for layer in range(layers))
    if dense:
        inner = shapes.intermediate_size / ranks
        found.append(((shapes.mlp_matrices - 1) * inner, hidden, dense, rows, 1.0))
        found.append((hidden, max(1, int(inner)), dense, rows, 1.0))
    if shapes.experts is not None and dense < layers:
        experts, routed = shapes.experts, shapes.experts.num_experts_per_tok
        # The expected number of experts that some token visits, where each visits its own at random.
        visited = experts.num_experts * (1 - (1 - routed / experts.num_experts) ** rows)
        each, inner = rows * routed / visited if rows else 0.0, experts.intermediate_size / ranks
        found.append((2 * inner, hidden, layers - dense, each, visited))
        found.append((hidden, max(1, int(inner)), layers - dense, each, visited))
        if experts.shared_intermediate_size:
            shared = experts.shared_intermediate_size / ranks
            found.append((2 * shared, hidden, layers - dense, rows, 1.0))
            found.append((hidden, max(1, int(shared)), layers - dense, rows, 1.0))
    return found


def _head(shapes: ModelShapes, ranks: int, hardware: Hardware, drawn: float, kernels: EngineKernels) -> float:
    """Returns the seconds of the output head in 16 bits and of drawing from its logits, which are read and written in fp32 three times."""
    numbers, bandwidth = shapes.vocab_size * shapes.hidden_size / ranks, kernels.bandwidth * hardware.memory_bandwidth
    product = max(2 * drawn * numbers / hardware.product_rate("bf16"), 2 * numbers / bandwidth)
    return product + 3 * 4 * drawn * shapes.vocab_size / bandwidth + 4 * kernels.start_s


def _attention(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, step: EngineStep, kernels: EngineKernels) -> float:
    """Returns the seconds of attention. Decoding over latent attention multiplies queries with the compressed vectors themselves, the products with the
    heads' own matrices being taken on queries and outputs (DeepSeek-AI, 2024, arXiv 2405.04434, section 2.1.2): of all heads, so that it computes as long
    as it reads."""
    rate = kernels.attention * hardware.product_rate("bf16")
    latent, heads = shapes.latent, shapes.num_attention_heads
    each = 4 * shapes.query_size if latent is None else 2 * heads * (latent.cached_size + latent.kv_lora_rank)
    computed = step.decoded * each * attended_tokens(shapes, step.context) / layout.tensor / rate
    read = step.decoding * read_bytes(shapes, layout, step.context) / (kernels.cache * hardware.memory_bandwidth)
    operations = 2 * step.prompt_tokens * attended_tokens(shapes, step.prompt_context) * (shapes.query_size + shapes.attended_size) / layout.tensor
    return max(computed, read) + operations / rate + _recurrences(shapes, layout, hardware, step, kernels)


def _recurrences(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, step: EngineStep, kernels: EngineKernels) -> float:
    """Returns the seconds of the layers with linear attention: of a sequence that decodes the states are read and written, and prompts are computed in
    chunks."""
    if shapes.linear_attention is None:
        return 0.0
    layers, rate = len(shapes.linear_attention.layers), kernels.attention * hardware.product_rate("bf16")
    computed = step.decoded * layers * shapes.linear_attention.token_flops / rate
    moved = 2 * step.decoding * state_bytes(shapes) / (kernels.cache * hardware.memory_bandwidth)
    return (max(computed, moved) + step.prompt_tokens * layers * chunked_flops(shapes.linear_attention) / rate) / layout.tensor
