"""Replaces parts of a module of transformers by Tandem's kernels where they compute the same: linear layers, root-mean-square norms and activations; and
gives rotary embeddings tables, so that their bits do not depend on the batch."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.pytorch_utils import Conv1D

from tandem.kernels.api import Kernels
from tandem.kernels.quantized import PackedQuantized
from tandem.layout.shapes import ModelShapes
from tandem.model.layer import factor_of_norm
from tandem.model.lora import add_lora
from tandem.model.quantization.frozen import frozen_linear
from tandem.model.quantization.scheme import Scheme, pack_weight
from tandem.model.trained_adapter import AdaptedWeight, TrainedAdapter, adapted_linear, packed_by
from tandem.model.transformers_module.attention import Computing
from tandem.model.transformers_module.experts import ExpertProduct, expert_products, replace_mixtures

CHUNK = 2**14
"""Elements that an activation is computed of at once on a CPU: fewer than torch divides over threads, and whole vectors, so that an element's bits do not
depend on its place."""
BLOCK = 1024
"""Positions of a rotary table that are computed at once."""
_SILU = (nn.SiLU, activations.SiLUActivation)
_GELU_TANH = tuple(getattr(activations, name) for name in ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation") if hasattr(activations, name))


class KernelLinear(nn.Linear):
    """A linear layer by the kernels. ``packed``: its weight in their layout (``None``: plain); ``plain_shape``: the shape of the plain one meanwhile.
    ``adapter``: the one that is trained beside it (``None``: none); ``frozen``: the quantized weight in the place of the plain one beside that (``None``: it is
    plain). Adapters of requests name it ``name``."""

    name: str
    computing: Computing
    packed: Any
    plain_shape: tuple[int, ...]
    adapter: TrainedAdapter | None
    frozen: PackedQuantized | None

    def forward(self, input: Tensor) -> Tensor:
        rows, kernels, adapter = input.reshape(-1, self.in_features), self.computing.kernels, self.adapter
        if self.packed is not None:
            out = adapted_linear(kernels.linear_packed, rows, self.packed, self.bias)
        else:
            own: Any = self.weight if self.frozen is None else self.frozen
            weight = own if adapter is None or not self.computing.has_adapter else adapter.around(own)
            linear = kernels.linear if self.frozen is None else partial(frozen_linear, kernels, kernels.linear)
            out = adapted_linear(linear, rows, weight, self.bias)
        lora = self.computing.lora
        if lora is not None:
            add_lora(kernels, out, rows, lora.stacks.linears.get(self.name), lora)
        return out.view(*input.shape[:-1], self.out_features)

    def plain(self) -> Tensor:
        """Returns the weight [N, K]."""
        return self.weight

    def pack(self, kernels: Kernels, scheme: Scheme | None) -> Any:
        packed = pack_weight(kernels, self.plain(), scheme)
        return packed if self.adapter is None else self.adapter.around(packed, packed_by(kernels))

    def freeze(self, kernels: Kernels, scheme: Scheme) -> None:
        """Quantizes the weight, which has no plain form any more."""
        packed = pack_weight(kernels, self.plain(), scheme)
        # Offloading moves whole storages: without the room before a large page.
        is_view = packed.data.untyped_storage().nbytes() > packed.data.nbytes
        self.frozen = packed._replace(data=packed.data.clone()) if is_view else packed
        self.register_parameter("weight", None)

    def pack_adapter(self, kernels: Kernels) -> None:
        """Packs the adapter of a packed layer again, after it has changed."""
        if self.adapter is not None and isinstance(self.packed, AdaptedWeight):
            self.packed = self.adapter.around(self.packed.weight, packed_by(kernels))


class KernelConv1D(Conv1D):  # type: ignore[misc]  # transformers has no types for it
    """Does ``KernelLinear`` for GPT-2's layer, whose weight is [K, N]."""

    computing: Computing
    packed: Any
    plain_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        rows, kernels = x.reshape(-1, x.shape[-1]), self.computing.kernels
        if self.packed is not None:
            return kernels.linear_packed(rows, self.packed, self.bias).view(*x.shape[:-1], self.nf)
        return kernels.linear(rows, self.weight.t().contiguous(), self.bias).view(*x.shape[:-1], self.nf)

    def plain(self) -> Tensor:
        weight: Tensor = self.weight
        return weight.t().contiguous()

    def pack(self, kernels: Kernels, scheme: Scheme | None) -> Any:
        return pack_weight(kernels, self.plain(), scheme)


class KernelNorm(nn.Module):
    """A root-mean-square norm by the kernels; ``from_one``: it multiplies with 1 plus its weight."""

    weight: Tensor
    computing: Computing
    eps: float
    from_one: bool

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = factor_of_norm(self.weight, self.from_one)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.computing.kernels.rms_norm(rows, weight, self.eps).view(hidden_states.shape)


class KernelGate(nn.Module):
    """SiLU, or GELU in its approximation by tanh, by the kernels' gates of ones."""

    computing: Computing
    gate: str

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        both = torch.cat((rows, torch.ones_like(rows)), dim=1)
        gated: Tensor = getattr(self.computing.kernels, self.gate)(both)
        return gated.view(input.shape)


class EvenActivation:
    """Computes ``activation`` in chunks of whole vectors."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self.activation(x)
        flat = nn.functional.pad(x.reshape(-1), (0, -x.numel() % 64))
        return torch.cat([self.activation(part) for part in flat.split(CHUNK)])[: x.numel()].view(x.shape)


class RotaryTable:
    """Looks the rotary embedding ``rotary`` up in a table that it has computed, ``BLOCK`` positions at a time."""

    def __init__(self, rotary: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.rotary = rotary
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if x.device.type != "cpu" or position_ids.ndim != 2 or not position_ids.numel():
            return self.rotary(x, position_ids, *more, **named)
        key = (x.dtype, more, tuple(named.items()))
        blocks = int(position_ids.max()) // BLOCK + 1
        held = self._tables.get(key)
        known = 0 if held is None else len(held[0]) // BLOCK
        if known < blocks:
            first = torch.empty(1, 1, x.shape[-1], dtype=x.dtype)
            # Tables outlive a pass, and a pass with gradient reads no tensor that was made in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                computed = [self.rotary(first, torch.arange(b * BLOCK, (b + 1) * BLOCK).unsqueeze(0), *more, **named) for b in range(known, blocks)]
                added = [torch.cat([part[i][0] for part in computed]) for i in range(2)]
                held = (added[0], added[1]) if held is None else (torch.cat((held[0], added[0])), torch.cat((held[1], added[1])))
            self._tables[key] = held
        assert held is not None
        return held[0][position_ids], held[1][position_ids]


def replace_parts(network: nn.Module, computing: Computing) -> None:
    """Replaces what it can in ``network``. Names and parameters stay as they are."""
    head = network.get_output_embeddings()  # type: ignore[operator]
    verdicts: dict[type, bool | None] = {}
    described = computing.shapes.transformers
    assert described is not None
    for name, module in network.named_modules():
        kind = type(module)
        # A router that is a linear layer stays one, and is computed as routers of other classes are.
        if kind is nn.Linear and module is not head and not described.is_router(f"{name}.weight"):
            _become(module, KernelLinear, computing, name=name, packed=None, plain_shape=(), adapter=None, frozen=None)
        elif kind is Conv1D:
            _become(module, KernelConv1D, computing, packed=None, plain_shape=())
        elif kind.__name__.endswith("RMSNorm"):
            if kind not in verdicts:
                verdicts[kind] = _from_one(module, computing)
            from_one = verdicts[kind]
            if from_one is not None:
                _become(module, KernelNorm, computing, eps=_eps(module), from_one=from_one)
        elif kind in _SILU:
            _become(module, KernelGate, computing, gate="silu_mul")
        elif kind in _GELU_TANH or (kind is nn.GELU and getattr(module, "approximate", "") == "tanh"):
            _become(module, KernelGate, computing, gate="gelu_mul")
        elif kind is nn.GELU or kind.__module__ == activations.__name__:
            module.forward = EvenActivation(module.forward)  # type: ignore[method-assign]
        elif kind.__name__.endswith("RotaryEmbedding") and not any(True for _ in module.parameters()):
            module.forward = RotaryTable(module.forward)  # type: ignore[method-assign]
    replace_mixtures(network, computing)


def add_adapters(network: nn.Module, shapes: ModelShapes) -> None:
    """Adds the adapter that ``shapes`` have to the linear layers of ``network``, whose own parameters are not trained then."""
    if shapes.lora is None or shapes.transformers is None:
        return
    network.requires_grad_(False)
    for name in shapes.transformers.linears:
        rank, linear = shapes.adapter_rank(name.rpartition(".")[2]), network.get_submodule(name)
        if rank:
            assert isinstance(linear, KernelLinear)
            linear.adapter = TrainedAdapter((linear.out_features,), (True,), linear.in_features, rank, shapes.lora.scale, linear.weight.detach())


def products(module: nn.Module) -> list[KernelLinear | KernelConv1D | ExpertProduct]:
    """Returns the linear layers within ``module`` that the kernels compute, and then its experts."""
    return [*(each for each in module.modules() if isinstance(each, KernelLinear | KernelConv1D)), *expert_products(module)]


def _become(module: nn.Module, kind: type[nn.Module], computing: Computing, **fields: Any) -> None:
    module.__class__ = kind
    for name, value in {"computing": computing, **fields}.items():
        setattr(module, name, value)


def _eps(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0.0)


def _from_one(norm: nn.Module, computing: Computing) -> bool | None:
    """Returns whether ``norm`` is the kernels' norm with factors of 1 plus its weights (``True``) or of its weights (``False``); ``None`` if it is neither."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.ndim != 1 or len(list(norm.parameters())) != 1 or not _eps(norm):
        return None
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        tried = copy.deepcopy(norm).to("cpu", torch.float32)
        tried.weight.copy_(torch.rand(len(weight), generator=draw) + 0.5)  # type: ignore[operator]
        x = torch.randn(3, len(weight), generator=draw)
        expected = tried(x)
        exact = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + _eps(norm))
        for from_one in (False, True):
            if torch.allclose(expected, exact * (tried.weight + float(from_one)), rtol=1e-5, atol=1e-6):  # type: ignore[operator]
                return from_one
    return None
