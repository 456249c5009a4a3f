"""Mixtures of experts of a module of transformers by Tandem's kernels: its function in transformers' ``ExpertsInterface``, and routers whose bits do not depend
on the batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tandem.kernels.api import Kernels, Routing, sum_in_order
from tandem.kernels.mixed import whole_precision
from tandem.kernels.softmax import softmax
from tandem.model.attention import logistic
from tandem.model.moe import dispatched, with_biases
from tandem.model.quantization.scheme import Scheme, pack_groups
from tandem.model.routing import sorted_by_expert
from tandem.model.transformers_module.attention import Computing

STACKED = ("gate_up_proj", "up_proj", "down_proj")
"""The matrices of all experts of a layer in one parameter, [E, N, K] or transposed."""
_PLACE, _VISITED = "_tandem_experts", "_tandem_visited"
_SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
_SIGMOID = (torch.sigmoid, F.sigmoid, Tensor.sigmoid)


class ExpertProduct:
    """One of ``STACKED``, as the kernels multiply with it. ``packed``: in their layout (``None``: plain); ``plain_shape``: that of the parameter meanwhile."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self.packed: Any = None
        self.plain_shape: tuple[int, ...] = ()

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = getattr(self._module, self._name)
        return weight

    def plain(self) -> Tensor:
        """Returns the matrices [E, N, K]."""
        return self.weight.transpose(1, 2).contiguous() if self._module.is_transposed else self.weight

    def pack(self, kernels: Kernels, scheme: Scheme | None) -> Any:
        return pack_groups(kernels, self.plain(), scheme)

    def multiply(self, kernels: Kernels, rows: Tensor, bounds: Tensor) -> Tensor:
        """Computes ``Kernels.grouped_linear`` of ``rows[R, K]``, with the biases of the experts if they have some."""
        out = kernels.grouped_linear(rows, self.plain(), bounds) if self.packed is None else kernels.grouped_linear_packed(rows, self.packed, bounds)
        return with_biases(out, getattr(self._module, f"{self._name}_bias"), bounds) if self._module.has_bias else out


class _Mixture:
    """The products of one mixture, and what they compute with."""

    def __init__(self, module: Any, computing: Computing) -> None:
        self.computing = computing
        self.up = ExpertProduct(module, "gate_up_proj" if module.has_gate else "up_proj")
        self.down = ExpertProduct(module, "down_proj")


def is_mixture(module: nn.Module) -> bool:
    """Returns whether the class of ``module`` lets other code compute its experts (``use_experts_implementation``)."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")


def expert_products(module: nn.Module) -> list[ExpertProduct]:
    """Returns the products of the mixtures within ``module``."""
    mixtures = [getattr(each, _PLACE) for each in module.modules() if hasattr(each, _PLACE)]
    return [product for mixture in mixtures for product in (mixture.up, mixture.down)]


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function of experts: ``hidden_states[T, H]`` through the experts ``top_k_index[T, k]``, weighed by ``top_k_weights[T, k]`` -> [T, H]. Outputs are
    added in the order of the weights."""
    mixture: _Mixture = getattr(module, _PLACE)
    kernels, each = mixture.computing.kernels, top_k_index.shape[1]
    order, inverse, bounds = sorted_by_expert(top_k_index, module.num_experts)
    rows = dispatched(hidden_states, Routing(top_k_weights, top_k_index, bounds, order, inverse), each)
    inner = mixture.up.multiply(kernels, rows, bounds)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = mixture.down.multiply(kernels, inner.contiguous(), bounds)
    out = module.post_expert_norm(out) if module.has_post_expert_norm else out
    returned = out.index_select(0, inverse).view(len(hidden_states), each, out.shape[1])
    gates = top_k_weights.to(torch.promote_types(top_k_weights.dtype, returned.dtype))
    return sum_in_order((returned.to(gates.dtype) * gates.unsqueeze(-1)).unbind(1)).to(hidden_states.dtype)


def observed_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, *_: Any) -> Tensor:
    """The function of experts while a module is observed without numbers: notes what ``visited_experts`` returns."""
    setattr(module, _VISITED, int(top_k_index.shape[-1]))
    return torch.empty_like(hidden_states)


def visited_experts(module: nn.Module) -> int:
    """Returns the number of experts of the mixture ``module``, which has been observed, that a token is routed to."""
    visited: int = getattr(module, _VISITED)
    return visited


def replace_mixtures(network: nn.Module, computing: Computing) -> None:
    """Lets the mixtures of ``network`` compute with ``computing``, and the blocks around them, which choose the experts, with ``_EvenFunctions``."""
    blocks = {name.rpartition(".")[0] for name, module in network.named_modules() if is_mixture(module)}
    for block in map(network.get_submodule, sorted(blocks)):
        for module in block.modules():
            if is_mixture(module):
                setattr(module, _PLACE, _Mixture(module, computing))
            if module is not block and (is_mixture(module) or hasattr(module, "computing")):
                module.forward = _unwatched(module.forward)  # type: ignore[method-assign]
        block.forward = _with_even_functions(block.forward, computing)  # type: ignore[method-assign]


class _EvenFunctions(TorchFunctionMode):
    """Replaces the functions of a router whose results depend on the shape of the batch: linear layers, softmax and sigmoid."""

    def __init__(self, computing: Computing) -> None:
        self._computing = computing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in _SOFTMAX:
            return _softmax(func, *args, **kwargs)
        if func in _SIGMOID:
            return logistic(args[0]).to(args[0].dtype)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Small differences decide which experts a token is routed to, so the router never runs in mixed precision.
        kernels = whole_precision(self._computing.kernels)
        return kernels.linear(input.reshape(-1, weight.shape[1]), weight, bias).view(*input.shape[:-1], len(weight))


def _softmax(func: Any, input: Tensor, dim: int = -1, *more: Any, dtype: torch.dtype | None = None, **named: Any) -> Tensor:
    if dim not in (-1, input.ndim - 1) or more or named:
        result: Tensor = func(input, dim, *more, dtype=dtype, **named)
        return result
    return softmax(input if dtype is None else input.to(dtype))


def _with_even_functions(forward: Callable[..., Any], computing: Computing) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        with _EvenFunctions(computing):
            return forward(*given, **named)

    return run


def _unwatched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``forward`` of a part that the kernels compute, which needs no replaced functions."""

    def run(*given: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*given, **named)

    return run
