"""Gradient checkpointing: recomputes activations in the backward pass instead of storing them (Chen et al., 2016; Korthikanti et al.,
2022).

``full`` stores the input of a layer. ``selective`` stores the results of the matrix products and drops outputs that are cheap to recompute:
those of norms, rotary embedding and the gate, and attention scores if the kernels store them. Both run the same functions on the same
values again, so gradients have the same bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tandem.kernels.api import Kernels
from tandem.model.layer_pass import AroundLayer, LayerFunction

Recompute = Literal["none", "full", "selective"]
Outputs = tuple[Tensor, ...]


def around_layers(recompute: Recompute, kernels: Kernels, around: AroundLayer | None) -> tuple[Kernels, AroundLayer | None]:
    """Returns the kernels that layers compute with and the wrapper of layers. ``around`` stays the innermost wrapper: under ``full`` it
    runs again in the backward pass."""
    if recompute == "none" or not torch.is_grad_enabled():
        return kernels, around
    selective = SelectiveKernels(kernels) if recompute == "selective" else None

    def run(index: int, layer: LayerFunction, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        inner = layer if around is None else partial(around, index, layer)
        if selective is not None:
            return selective.inside(inner, x, residual)
        return cast("tuple[Tensor, Tensor]", _again(inner, x, residual))

    return (kernels if selective is None else cast(Kernels, selective)), run


class SelectiveKernels:
    """``kernels`` whose cheap outputs are recomputed when a backward pass needs them.

    ``inside`` must wrap the layers: it intercepts the tensors that autograd saves. An output is identified by its memory, which its
    producer holds until the layer ends, so that no other tensor can have the same address."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._made: dict[tuple[int, torch.Size], tuple[_Recipe, int, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        return self._make(lambda x, weight: (self._kernels.rms_norm(x, weight, eps, centred),), x, weight)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> tuple[Tensor, Tensor]:
        normed, total = self._kernels.add_rms_norm(x, residual, weight, eps, centred)
        # Recomputed from the stored sum: the norm has the same bits.
        self._remember(lambda total, weight: (self._kernels.rms_norm(total, weight, eps, centred),), (total, weight), (normed,))
        return normed, total

    def rope(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = lambda qkv: self._kernels.rope(qkv, positions, cos_sin, heads, q_norm, k_norm, eps)
        return cast("tuple[Tensor, Tensor, Tensor]", self._make(run, qkv))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._make(lambda gate_up: (self._kernels.silu_mul(gate_up),), gate_up)[0]

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._make(lambda gate_up: (self._kernels.gelu_mul(gate_up),), gate_up)[0]

    def clamped_swiglu_mul(self, gate_up: Tensor) -> Tensor:
        return self._make(lambda gate_up: (self._kernels.clamped_swiglu_mul(gate_up),), gate_up)[0]

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None,
        query_start: Tensor | None = None, cap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:
        attend = self._kernels.packed_attention
        if self._kernels.name != "reference":
            return attend(q, k, v, cu_seqlens, max_seqlen, scale, window, query_start, cap, sinks)
        # Plain torch stores [T, T] scores for the backward pass; the other kernels do not.
        return cast(Tensor, _again(attend, q, k, v, cu_seqlens, max_seqlen, scale, window, query_start, cap, sinks))

    def inside(self, layer: LayerFunction, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Runs ``layer(x, residual)`` with these kernels."""
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                return layer(x, residual)
        finally:
            self._made.clear()

    def _make(self, run: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        outputs = run(*inputs)
        self._remember(run, inputs, outputs)
        return outputs

    def _remember(self, run: Callable[..., Outputs], inputs: tuple[Tensor, ...], outputs: Outputs) -> None:
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            recipe = _Recipe(run, tuple(x.detach() for x in inputs))
            for place, output in enumerate(outputs):
                if output.numel():
                    self._made[output.data_ptr(), output.shape] = recipe, place, output

    def _pack(self, saved: Tensor) -> Any:
        made = self._made.get((saved.data_ptr(), saved.shape))
        return saved if made is None else made[0].at(made[1])


class _Recipe:
    """Recomputes outputs from ``inputs``. Several may have been saved: all are computed when the first is needed, and each is freed once
    returned."""

    def __init__(self, run: Callable[..., Outputs], inputs: tuple[Tensor, ...]) -> None:
        self._run, self._inputs = run, inputs
        self._wanted = self._given = 0
        self._outputs: Outputs | None = None

    def at(self, place: int) -> "_Saved":
        self._wanted += 1
        return _Saved(self, place)

    def take(self, place: int) -> Tensor:
        if self._outputs is None:
            with torch.no_grad():
                self._outputs = self._run(*self._inputs)
        output = self._outputs[place]
        self._given += 1
        if self._given % self._wanted == 0:
            self._outputs = None
        return output


class _Saved:
    """Output ``place`` of ``recipe``."""

    def __init__(self, recipe: _Recipe, place: int) -> None:
        self.recipe, self.place = recipe, place


def _unpack(saved: Any) -> Tensor:
    return saved.recipe.take(saved.place) if isinstance(saved, _Saved) else cast(Tensor, saved)


def _again(function: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
