"""Layers in training that compute equal beginnings of sequences once (``kernels.trained_layers``).

The forward pass has the U distinct tokens. The backward pass has all tokens of distinct sequences: two sequences of the same tokens whose gradients have the
same bits behind the last layer have them in every layer. Weights are summed over all T tokens, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.cpu.attention_calls import AttentionCalls
from tandem.kernels.cpu.calls import Calls, dense, indices
from tandem.kernels.cpu.repeated_rows import RepeatedRows
from tandem.kernels.cpu.repeated_sequences import DistinctSequences, WantedTokens, distinct_sequences, wanted_tokens
from tandem.kernels.trained_layers import Beginnings, TrainedLayer, TrainedNorm, TrainedProduct


class _Normed(NamedTuple):
    """What a norm keeps: its input [U, H], 1 over the root of the mean square of each row, and its output."""

    total: Tensor
    rstd: Tensor
    out: Tensor


class _Attended(NamedTuple):
    """What attention keeps, of the U distinct tokens."""

    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    log_sum: Tensor


class _Kept(NamedTuple):
    """What one layer keeps for its backward pass; ``mixed`` and what follows are of the wanted tokens in the last layer."""

    before: _Normed
    attended: _Attended
    mixed: Tensor
    behind: _Normed
    gate_up: Tensor
    gated: Tensor


@dataclass
class _Pass:
    """One pass over a batch: its inputs, what goes from one layer to the next, ``x`` and ``total`` forwards and ``backward`` with ``grad`` backwards."""

    calls: Calls
    attention: AttentionCalls
    positions: Tensor
    beginnings: Beginnings
    norm: TrainedNorm
    wanted: WantedTokens
    x: Tensor | None = None
    total: Tensor | None = None
    backward: "_Backward | None" = None
    grad: Tensor | None = None


def train_layers(
    calls: Calls, attention: AttentionCalls, residual: Tensor, positions: Tensor, beginnings: Beginnings, layers: Sequence[TrainedLayer], norm: TrainedNorm,
    wanted: Tensor | None,
) -> Tensor:  # fmt: skip
    """See ``TrainLayers``."""
    beginnings = Beginnings(*(indices(x, wants) for x, wants in zip(beginnings, (torch.int64, torch.int64, torch.int32, torch.int32), strict=True)))
    state = _Pass(calls, attention, indices(positions, torch.int64)[beginnings.first], beginnings, norm, wanted_tokens(beginnings, wanted))
    link = _Start.apply(state, residual)  # type: ignore[no-untyped-call]
    for layer in layers:
        link = _Layer.apply(state, layer, layer is layers[-1], link, *layer.parameters)  # type: ignore[no-untyped-call]
    return _End.apply(state, link, norm.weight)  # type: ignore[no-any-return, no-untyped-call]


# Each layer is a function of its own, so that its gradients are added to those of earlier micro-batches, or sent to other ranks, before the next layer's are
# computed, and what it keeps may be offloaded. What is passed on has more rows backwards than forwards, which autograd would refuse: it is in the ``_Pass``,
# and a scalar that links the functions keeps their order.


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: _Pass, residual: Tensor) -> Tensor:
        ctx.state = state
        state.total = dense(residual).index_select(0, state.beginnings.first)
        return residual.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state: _Pass = ctx.state
        assert state.backward is not None and state.grad is not None
        return None, state.backward.sequences.all_rows.all_of(state.grad)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: _Pass, layer: TrainedLayer, is_last: bool, link: Tensor, *parameters: Tensor | None) -> Tensor:
        assert state.total is not None
        kept, state.x, state.total = _forward(state, layer, state.x, state.total, is_last=is_last)
        ctx.state, ctx.layer, ctx.is_last = state, layer, is_last
        # The parameters too: it raises if one was changed since.
        ctx.save_for_backward(*kept.before, *kept.attended, kept.mixed, *kept.behind, kept.gate_up, kept.gated, *parameters)
        return link.clone()

    @staticmethod
    def backward(ctx: Any, by_link: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, saved = ctx.state, ctx.saved_tensors
        assert state.backward is not None and state.grad is not None
        kept = _Kept(_Normed(*saved[:3]), _Attended(*saved[3:9]), saved[9], _Normed(*saved[10:13]), *saved[13:15])
        state.grad, own = state.backward.through(ctx.layer, kept, state.grad, is_last=ctx.is_last)
        return None, None, None, by_link, *own


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: _Pass, _: Tensor, weight: Tensor) -> Tensor:
        assert state.total is not None
        ctx.state, last = state, _normed(state, state.norm, state.x, state.total)
        state.x = state.total = None
        ctx.save_for_backward(*last, weight)
        return last.out.index_select(0, state.wanted.rows.saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state: _Pass = ctx.state
        *last, _ = ctx.saved_tensors
        grad = dense(grad)
        state.backward = _Backward(state.calls, state.attention, state.positions, distinct_sequences(state.beginnings, state.wanted, grad))
        state.grad, by_norm = state.backward.start(state.norm, grad, _Normed(*last))
        return None, grad.new_zeros(()), by_norm


def _normed(state: _Pass, norm: TrainedNorm, x: Tensor | None, total: Tensor) -> _Normed:
    rstd = total.new_empty(len(total))
    if x is None:
        return _Normed(total, rstd, state.calls.rms_norm(total, norm.weight, norm.eps, norm.centred, rstd))
    out, total = state.calls.add_rms_norm(x, total, norm.weight, norm.eps, norm.centred, rstd)
    return _Normed(total, rstd, out)


def _linear(state: _Pass, x: Tensor, product: TrainedProduct) -> Tensor:
    return state.calls.linear(x, product.weight, product.bias)


def _rotated_at(positions: Tensor, layer: TrainedLayer) -> Tensor:
    return positions if len(layer.cos_sin) > 1 else torch.zeros_like(positions)


def _forward(state: _Pass, layer: TrainedLayer, x: Tensor | None, total: Tensor, *, is_last: bool) -> tuple[_Kept, Tensor, Tensor]:
    """Computes (x, residual stream) of the U distinct tokens -> what the backward pass needs, and the same behind the layer, in the last one of the wanted
    tokens."""
    before = _normed(state, layer.input_norm, x, total)
    attended = _attend(state, layer, _linear(state, before.out, layer.qkv))
    mixed, total = attended.out.flatten(1), before.total
    if is_last and state.wanted.distinct is not None:
        mixed, total = mixed.index_select(0, state.wanted.distinct), total.index_select(0, state.wanted.distinct)
    behind = _normed(state, layer.mlp_norm, _linear(state, mixed, layer.output), total)
    gate_up = _linear(state, behind.out, layer.gate_up)
    gated = state.calls.gate_mul(gate_up, layer.activation)
    return _Kept(before, attended, mixed, behind, gate_up, gated), _linear(state, gated, layer.down), behind.total


def _attend(state: _Pass, layer: TrainedLayer, qkv: Tensor) -> _Attended:
    rows, _, bounds, query_start = state.beginnings
    q, k, v = state.attention.rope(qkv, _rotated_at(state.positions, layer), layer.cos_sin, layer.heads, layer.q_norm, layer.k_norm, layer.norm_eps)
    log_sum = q.new_empty(q.shape[:2])
    keys, values = k.index_select(0, rows), v.index_select(0, rows)
    out = state.attention.packed_attention(q, keys, values, bounds, layer.scale, layer.window, log_sum, query_start, layer.cap)
    return _Attended(qkv, q, k, v, out, log_sum)


@dataclass(frozen=True, slots=True)
class _Backward:
    """The backward pass of distinct ``sequences``, whose distinct tokens are at ``positions[U]``."""

    calls: Calls
    attention: AttentionCalls
    positions: Tensor
    sequences: DistinctSequences

    def start(self, norm: TrainedNorm, grad: Tensor, last: _Normed) -> tuple[Tensor, Tensor]:
        """Takes ``grad[W, H]``, that by the wanted tokens behind the last ``norm``, to the gradient by what is added in it, and that by its weight."""
        rows = self.sequences.wanted_rows
        return self._norm(norm, last, rows.one_of_each(grad), None, rows)

    def through(self, layer: TrainedLayer, kept: _Kept, grad: Tensor, *, is_last: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Takes the gradient by a layer's output and the residual stream, which is the same, to that by its inputs; and the gradients by its parameters."""
        all_rows, wanted_rows, _, places = self.sequences
        rows = wanted_rows if is_last else all_rows
        by_gated, by_down = self._product(grad, layer.down, kept.gated, rows)
        by_gate_up = self.calls.gate_mul_backward(kept.gate_up, by_gated, layer.activation, rows.saved_of_grad)
        by_normed, by_matrix = self._product(by_gate_up, layer.gate_up, kept.behind.out, rows)
        grad, by_mlp_norm = self._norm(layer.mlp_norm, kept.behind, by_normed, grad, rows)
        by_mixed, by_output = self._product(grad, layer.output, kept.mixed, rows)
        if is_last and places is not None:
            by_mixed, grad = self._placed(by_mixed, places), self._placed(grad, places)
        by_qkv, by_heads = self._attention(layer, kept.attended, by_mixed)
        by_normed, by_projection = self._product(by_qkv, layer.qkv, kept.before.out, all_rows)
        grad, by_input_norm = self._norm(layer.input_norm, kept.before, by_normed, grad, all_rows)
        return grad, [by_input_norm, *by_projection, *by_heads, *by_output, by_mlp_norm, *by_matrix, *by_down]

    def _placed(self, grad: Tensor, places: Tensor) -> Tensor:
        """Returns gradients of wanted tokens among those of all, added to 0 as the gradient of ``index_select`` is."""
        return grad.new_zeros(int(self.sequences.bounds[-1]), grad.shape[1]).index_add_(0, places, grad)

    def _norm(self, norm: TrainedNorm, kept: _Normed, grad: Tensor, grad_total: Tensor | None, rows: RepeatedRows) -> tuple[Tensor, Tensor]:
        return self.calls.rms_norm_backward(kept.total, norm.weight, grad, grad_total, norm.centred, kept.rstd, rows)

    def _product(self, grad: Tensor, product: TrainedProduct, x: Tensor, rows: RepeatedRows) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the gradient by a product's input, and those by its weight and bias."""
        weight, bias = product
        by_weight = self.calls.repeated_grad_weight(grad, x, rows) if weight.requires_grad else None
        by_bias = self.calls.linear_grad_bias(rows.all_of(grad)) if bias is not None and bias.requires_grad else None
        return self.calls.linear_grad_x(grad, weight), [by_weight, by_bias]

    def _attention(self, layer: TrainedLayer, kept: _Attended, grad: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the gradient by queries, keys and values before their norms, and those by the norms' weights."""
        (qkv, *saved), rows = kept, self.sequences.all_rows
        q, k, v, out, log_sum = (x.index_select(0, rows.saved_of_grad) for x in saved)
        grads = self.attention.packed_attention_backward(grad, (q, k, v, out, log_sum), self.sequences.bounds, layer.scale, layer.window, None, layer.cap)
        by_qkv, by_norms = self.attention.rope_backward(
            qkv, _rotated_at(self.positions, layer), layer.cos_sin, layer.heads, layer.q_norm, layer.k_norm, layer.norm_eps, grads, rows
        )
        return by_qkv, [None if norm is None else by_norm for norm, by_norm in zip((layer.q_norm, layer.k_norm), by_norms, strict=True)]
