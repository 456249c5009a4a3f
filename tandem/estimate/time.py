"""Predicted seconds of a run's steps: the matrix products of its tokens at their measured speed, attention, and the bytes that it moves.

Costs are those of Kaplan et al. (2020, arXiv 2001.08361, section 2.1): a forward pass multiplies every token with every matrix, a backward pass takes
twice as long. Generation is a roofline: the measured product of a few rows with a matrix has the time of reading the matrix. Communication counts in
CPU-seconds (``mesh_work``) and not in seconds, pipeline bubbles and checkpoints in neither. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.estimate.model_bytes import DTYPE_BYTES, kv_bytes_per_token, state_bytes
from tandem.estimate.training.memory_bound import GATED, layer_bytes
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes

ELEMENT_BYTES = 2
"""Of the elements that ``memory_bound.layer_bytes`` counts."""
RECURRENCE_SHARE, RECURRENCE_BACKWARD = 0.25, 8.0
"""Measured on one core with heads of 64 and 128 numbers (0.28 and 0.25; 10.5 and 6.6): the share of the products' rate at which the gated delta rule is
computed token by token, and how many times as long as its forward pass its backward pass takes, which computes the states two more times."""


class Product(NamedTuple):
    """A product of ``rows`` tokens with a matrix of ``outputs`` x ``inputs``. ``trains``: with both products of its backward pass."""

    rows: int
    outputs: int
    inputs: int
    trains: bool = False

    @property
    def flops(self) -> int:
        return (6 if self.trains else 2) * self.rows * self.outputs * self.inputs


class Predicting(NamedTuple):
    """What a pass computes for a token on average: ``head``, the rows that the head reads (``model.decoder.Decoder.outputs``), and ``behind``, those that the
    last layer has behind its attention, where it has no experts (``Decoder.wanting``)."""

    head: float = 1.0
    behind: float = 1.0


ALL_PREDICT = Predicting()


class ForwardPass(NamedTuple):
    """The ``tokens`` that the forward pass of an update computes where its backward pass has more, the ``context`` that they attend to half of, and what is
    ``predicting`` of them."""

    tokens: float
    context: float
    predicting: Predicting


class Speed(NamedTuple):
    """What a machine was measured to do: seconds of each product, and bytes per second that are read and written. ``cpu``: CPU-seconds of each product, of
    all threads together, and ``bytes_per_cpu_s``; empty where they were not measured. ``call_cpu_s``: of one rank's part in a collective between CPUs, and
    ``sent_byte_cpu_s`` of each byte that it sends; 0 where they were not measured."""

    seconds: Mapping[Product, float]
    bytes_per_s: float
    cpu: Mapping[Product, float] = {}
    bytes_per_cpu_s: float = 0.0
    call_cpu_s: float = 0.0
    sent_byte_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """``products`` and how often each is computed, floating-point operations of attention, bytes that are read from memory or written, and of all ranks
    together their ``calls`` of collectives and the bytes that they send in them."""

    products: Mapping[Product, float] = field(default_factory=dict)
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    calls: float = 0.0
    sent_bytes: float = 0.0

    def seconds(self, speed: Speed) -> float:
        """Returns the time on a machine of ``speed``, whose attention has the speed of its products."""
        return self._computed(speed.seconds) + self.moved_bytes / speed.bytes_per_s

    def cpu_seconds(self, speed: Speed) -> float:
        """Returns the CPU-seconds of all threads together, which other programs of the machine change less than those of the clock."""
        exchanged = self.calls * speed.call_cpu_s + self.sent_bytes * speed.sent_byte_cpu_s
        return self._computed(speed.cpu) + self.moved_bytes / speed.bytes_per_cpu_s + exchanged

    def _computed(self, each: Mapping[Product, float]) -> float:
        products = sum(times * each[product] for product, times in self.products.items())
        flops = sum(times * product.flops for product, times in self.products.items())
        return products + (self.attention_flops * products / flops if flops else 0.0)


def generation_work(
    shapes: ModelShapes, dtype: str, prompts: int, prompt_tokens: float, samples: int, completion_tokens: float, max_num_seqs: int, max_num_batched_tokens: int
) -> Work:
    """Returns the work of ``samples`` completions of ``completion_tokens`` tokens for each of ``prompts`` prompts, which is computed once for its samples:
    their first tokens are drawn behind it, and nothing is computed of the last ones."""
    sequences = prompts * samples
    running = min(max_num_seqs, sequences)
    steps = sequences * max(0.0, completion_tokens - 1) / running
    total = max(1, round(prompts * prompt_tokens))
    rows = min(max_num_batched_tokens, total)
    products = forward_products(shapes, running, steps, with_head=True)
    # Behind the attention of the last layer is only the token that the first ones are drawn after.
    ends = prompts / total
    for product, times in forward_products(shapes, rows, total / rows, with_head=True, predicting=Predicting(ends, ends)).items():
        products[product] = products.get(product, 0.0) + times
    read = steps * running * (prompt_tokens + completion_tokens / 2) * kv_bytes_per_token(shapes, dtype)
    read += steps * running * 2 * state_bytes(shapes)
    recurrent = recurrence_flops(shapes, total + steps * running, 1)
    return Work(products, _attention_flops(shapes, total, prompt_tokens) + recurrent, read)


def training_work(
    shapes: ModelShapes, dtype: str, tokens: float, sequence_tokens: float, micro_batch_tokens: int, passes: float, updates: int, backward: float = 0.0,
    predicting: Predicting = ALL_PREDICT, once: ForwardPass | None = None,
) -> Work:
    """Returns the work of ``passes`` passes over ``tokens`` tokens in sequences of ``sequence_tokens``, a forward and a backward pass being three, of which
    ``backward`` are such pairs, and of ``updates`` steps of AdamW: weights, gradients and two moments are read, all but the gradients written. Beside such
    pairs, passes are layers that are computed again. ``once``: the forward pass of each pair, where it computes less than the backward pass."""
    rows = max(1, min(micro_batch_tokens, round(tokens)))
    moved = float(updates * 7 * DTYPE_BYTES[dtype] * parameter_count(shapes))
    in_forward = tokens if once is None else once.tokens
    moved += (passes * tokens - backward * (tokens - in_forward)) * elementwise_bytes(shapes, DTYPE_BYTES[dtype])
    products = dict[Product, float]()
    # A backward pass has two products for each of the forward pass, which are measured together.
    parts = [(1.0, tokens, predicting)] if once is None else [(2 / 3, tokens, predicting), (1 / 3, once.tokens, once.predicting)]
    for share, computed, each in parts if backward else ():
        for product, times in forward_products(shapes, rows, share * backward * computed / rows, shapes.language_head, True, each).items():
            products[product] = products.get(product, 0.0) + times
    if (forward := passes - 3 * backward) > 0:
        made = forward_products(shapes, rows, forward * tokens / rows, shapes.language_head and not backward, predicting=predicting, is_again=backward > 0)
        for product, times in made.items():
            products[product] = products.get(product, 0.0) + times
    recurrent = recurrence_flops(shapes, tokens, passes - 3 * backward, backward)
    attention = passes * _attention_flops(shapes, tokens, sequence_tokens)
    if once is not None:
        attention -= backward * (_attention_flops(shapes, tokens, sequence_tokens) - _attention_flops(shapes, once.tokens, once.context))
    return Work(products, attention + recurrent, moved)


def elementwise_bytes(shapes: ModelShapes, each: int, stream_shares: float = 1.0) -> float:
    """Returns the bytes that kernels between the products move for a token in one of three passes: norms, residuals, rotary embedding, activations.
    ``stream_shares``: the share of a token's residual stream that a rank has."""
    total = 0.0
    for layer in range(shapes.num_hidden_layers):
        experts = shapes.experts_of(layer)
        inner = shapes.intermediate_size if experts is None else experts.num_experts_per_tok * experts.intermediate_size
        linear = shapes.linear_attention_of(layer)
        rotated = shapes.query_size + shapes.key_value_size if linear is None else 0
        total += sum(layer_bytes(1, stream_shares, shapes.hidden_size, rotated, inner, shapes.gated_mlp or experts is not None, True))
        if linear is not None:
            # Of each tap of the convolution, and of its activation; its gradients are of the same kernels, backward.
            total += 3 * ELEMENT_BYTES * (7 * linear.kernel_size + 6) * linear.mixed_size + sum(GATED) * linear.value_size
    return total * each / ELEMENT_BYTES / 3


def forward_products(
    shapes: ModelShapes, rows: int, times: float, with_head: bool, trains: bool = False, predicting: Predicting = ALL_PREDICT, is_again: bool = False
) -> dict[Product, float]:
    """Returns the products of a forward pass of ``rows`` tokens, ``times`` over, with their backward pass if it ``trains``; a token of a mixture of experts
    visits its own. ``is_again``: it ends in each layer as soon as all is there that a gradient is computed from (``model.recompute``)."""
    hidden, products = shapes.hidden_size, dict[Product, float]()

    def add(rows: int, outputs: int, inputs: int, count: float, is_head: bool = False) -> None:
        product = Product(rows, outputs, inputs, trains and not is_head)
        products[product] = products.get(product, 0.0) + count * times

    for layer in range(shapes.num_hidden_layers):
        experts, inner, each, visited = shapes.experts_of(layer), shapes.intermediate_size, rows, 1
        # Behind the attention of the last layer.
        share = predicting.behind if layer == shapes.num_hidden_layers - 1 and experts is None else 1.0
        if shapes.latent is None:
            *into, output = shapes.matrices_of_attention(layer)
            for matrix in into:
                add(rows, matrix.outputs, matrix.inputs, 1)
            add(rows, output.outputs, output.inputs, share)
        else:
            add(rows, shapes.qkv_size, hidden, 1)
            add(rows, hidden, shapes.query_size, share)
        if experts is not None:
            visited = min(experts.num_experts, rows * experts.num_experts_per_tok)
            inner, each = experts.intermediate_size, max(1, rows * experts.num_experts_per_tok // visited)
        add(each, (shapes.mlp_matrices - 1) * inner, hidden, visited * share)
        # Of the last product of a layer no gradient needs the result, unless a norm or a gate follows.
        if not is_again or shapes.post_norms or experts is not None:
            add(each, hidden, inner, visited * share)
    if with_head:
        # A kernel of its own has the head's three products, a chunk of the vocabulary at a time.
        add(rows, shapes.vocab_size, hidden, predicting.head * (3 if trains else 1), is_head=True)
    return products


def _attention_flops(shapes: ModelShapes, tokens: float, context: float) -> float:
    """Returns the operations of causal attention: two products of each token with the half of its context that lies before it."""
    return sum(
        4 * tokens * shapes.query_size * min(context / 2, shapes.window(layer) or context)
        for layer in range(shapes.num_hidden_layers)
        if shapes.linear_attention_of(layer) is None
    )


def recurrence_flops(shapes: ModelShapes, tokens: float, forward: float, pairs: float = 0.0) -> float:
    """Returns the operations of attention that layers with linear attention are worth, of ``forward`` passes over ``tokens`` and of ``pairs`` of a forward and
    a backward pass."""
    if shapes.linear_attention is None:
        return 0.0
    each = len(shapes.linear_attention.layers) * shapes.linear_attention.token_flops / RECURRENCE_SHARE
    return tokens * each * (forward + pairs * (1 + RECURRENCE_BACKWARD))
