"""Predicted seconds of a run's steps: the matrix products of its tokens at their measured speed, attention, and the bytes that it moves.

Costs are those of Kaplan et al. (2020, arXiv 2001.08361, section 2.1): a forward pass multiplies every token with every matrix, a backward pass takes
twice as long. Generation is a roofline: the measured product of a few rows with a matrix has the time of reading the matrix. Communication, pipeline bubbles
and checkpoints are not counted. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.estimate.model_bytes import DTYPE_BYTES, kv_bytes_per_token
from tandem.layout.shapes import ModelShapes, parameter_count


class Product(NamedTuple):
    """A product of ``rows`` tokens with a matrix of ``outputs`` x ``inputs``."""

    rows: int
    outputs: int
    inputs: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.outputs * self.inputs


class Speed(NamedTuple):
    """What a machine was measured to do: seconds of each product, and bytes per second that are read and written."""

    seconds: Mapping[Product, float]
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """``products`` and how often each is computed, floating-point operations of attention, and bytes that are read from memory or written."""

    products: Mapping[Product, float] = field(default_factory=dict)
    attention_flops: float = 0.0
    moved_bytes: float = 0.0

    def seconds(self, speed: Speed) -> float:
        """Returns the time on a machine of ``speed``, whose attention has the speed of its products."""
        products = sum(times * speed.seconds[product] for product, times in self.products.items())
        flops = sum(times * product.flops for product, times in self.products.items())
        attention = self.attention_flops * products / flops if flops else 0.0
        return products + attention + self.moved_bytes / speed.bytes_per_s


def generation_work(
    shapes: ModelShapes, dtype: str, prompts: int, prompt_tokens: float, samples: int, completion_tokens: float, max_num_seqs: int, max_num_batched_tokens: int
) -> Work:
    """Returns the work of ``samples`` completions of ``completion_tokens`` tokens for each of ``prompts`` prompts, which is computed once for its samples."""
    sequences = prompts * samples
    running = min(max_num_seqs, sequences)
    steps = sequences * completion_tokens / running
    total = max(1, round(prompts * prompt_tokens))
    rows = min(max_num_batched_tokens, total)
    products = _forward(shapes, running, steps, with_head=True)
    for product, times in _forward(shapes, rows, total / rows, with_head=False).items():
        products[product] = products.get(product, 0.0) + times
    read = steps * running * (prompt_tokens + completion_tokens / 2) * kv_bytes_per_token(shapes, dtype)
    return Work(products, _attention_flops(shapes, total, prompt_tokens), read)


def training_work(
    shapes: ModelShapes, dtype: str, tokens: float, sequence_tokens: float, micro_batch_tokens: int, passes: float, updates: int
) -> Work:
    """Returns the work of ``passes`` passes over ``tokens`` tokens in sequences of ``sequence_tokens``, a forward and a backward pass being three, and of
    ``updates`` steps of AdamW: weights, gradients and two moments are read, all but the gradients written."""
    rows = max(1, min(micro_batch_tokens, round(tokens)))
    moved = updates * 7 * DTYPE_BYTES[dtype] * parameter_count(shapes)
    products = _forward(shapes, rows, passes * tokens / rows, with_head=shapes.language_head)
    return Work(products, passes * _attention_flops(shapes, tokens, sequence_tokens), moved)


def _forward(shapes: ModelShapes, rows: int, times: float, with_head: bool) -> dict[Product, float]:
    """Returns the products of a forward pass of ``rows`` tokens, ``times`` over; a token of a mixture of experts visits its own."""
    hidden, products = shapes.hidden_size, dict[Product, float]()

    def add(rows: int, outputs: int, inputs: int, count: float) -> None:
        product = Product(rows, outputs, inputs)
        products[product] = products.get(product, 0.0) + count * times

    for layer in range(shapes.num_hidden_layers):
        add(rows, shapes.qkv_size, hidden, 1)
        add(rows, hidden, shapes.query_size, 1)
        experts, inner, each, visited = shapes.experts_of(layer), shapes.intermediate_size, rows, 1
        if experts is not None:
            visited = min(experts.num_experts, rows * experts.num_experts_per_tok)
            inner, each = experts.intermediate_size, max(1, rows * experts.num_experts_per_tok // visited)
        add(each, (shapes.mlp_matrices - 1) * inner, hidden, visited)
        add(each, hidden, inner, visited)
    if with_head:
        add(rows, shapes.vocab_size, hidden, 1)
    return products


def _attention_flops(shapes: ModelShapes, tokens: float, context: float) -> float:
    """Returns the operations of causal attention: two products of each token with the half of its context that lies before it."""
    return sum(
        4 * tokens * shapes.query_size * min(context / 2, shapes.window(layer) or context) for layer in range(shapes.num_hidden_layers)
    )
