"""Attention of a module of transformers by Tandem's kernels, over packed sequences or the engine's KV cache."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from tandem.kernels.api import Kernels
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import AttentionContext, AttentionLayer, Rotation, attend
from tandem.model.joint_balance import BalancedPass
from tandem.model.lora import LoraBatch

NAME = "tandem"
"""The name of the attention function in transformers' ``AttentionInterface``."""
UNDERSTOOD = frozenset(
    {"position_ids", "cache_position", "is_causal", "sliding_window", "use_cache", "output_attentions", "output_router_logits", "training", "head_mask"}
)
"""The arguments of attention functions that need no attention here: windows are read from the masks, and positions are the module's own."""
_PLACE = "_tandem_attention"


class Computing:
    """What the replaced parts of one module compute with: the ``kernels``, and during a forward pass its ``context`` and ``kv_dtype``, the dtype that packed
    keys and values are rounded to. ``has_adapter``: linear layers add the adapter that they have. ``lora``: the rows with adapters of requests. ``balance``:
    the loss of the routers in this pass (``None``: there is none)."""

    def __init__(self, shapes: ModelShapes, kernels: Kernels) -> None:
        self.shapes, self.kernels = shapes, kernels
        self.context: AttentionContext | None = None
        self.kv_dtype: torch.dtype | None = None
        self.has_adapter = True
        self.lora: LoraBatch | None = None
        self.balance: BalancedPass | None = None
        self.rotation: Rotation | None = None

    def begin(self, kernels: Kernels, context: AttentionContext, kv_dtype: torch.dtype, tokens: Tensor) -> None:
        """Starts a forward pass over ``tokens[T]``."""
        half = torch.ones(1, self.shapes.head_dim // 2, device=tokens.device)
        # The module has rotated queries and keys already; this rotation, by an angle of 0, changes no bit but signs of zeros.
        self.rotation = Rotation(torch.zeros_like(tokens), torch.cat((half, torch.zeros_like(half)), dim=1))
        self.kernels, self.context, self.kv_dtype = kernels, context, kv_dtype

    def state(self) -> tuple[Any, ...]:
        """Returns what ``begin`` has set, for a layer that is computed again later (``restore``)."""
        return self.kernels, self.context, self.kv_dtype, self.rotation, self.balance

    def restore(self, state: tuple[Any, ...]) -> None:
        self.kernels, self.context, self.kv_dtype, self.rotation, self.balance = state


class _Place:
    """Layer ``index`` of the module that ``computing`` belongs to."""

    def __init__(self, index: int, computing: Computing) -> None:
        self.index, self.computing = index, computing


def attach(network: nn.Module, computing: Computing) -> None:
    """Lets the attention of ``network``, whose function is ``NAME``, compute with ``computing``."""
    assert computing.shapes.transformers is not None
    for index, name in enumerate(computing.shapes.transformers.attention):
        setattr(network.get_submodule(name), _PLACE, _Place(index, computing))


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """The attention function ``NAME``: ``query[1, Hq, T, D]``, ``key`` and ``value`` [1, Hkv, T, D] -> [1, T, Hq, D]. The mask is that of the context."""
    place = cast(_Place, getattr(module, _PLACE))
    index, computing = place.index, place.computing
    shapes, context, rotation = computing.shapes, computing.context, computing.rotation
    assert context is not None and rotation is not None and attention_mask is None
    heads = shapes.num_attention_heads, shapes.num_key_value_heads, shapes.head_dim
    qkv = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (query, key, value)], dim=1)
    scale = shapes.attention_scale if scaling is None else scaling
    layer = AttentionLayer(index, heads, scale, shapes.window(index), None, None, shapes.rms_norm_eps, cap=shapes.score_cap)
    mixed = attend(computing.kernels, layer, qkv, rotation, context, computing.kv_dtype)
    return mixed.view(1, len(mixed), heads[0], heads[2]), None
