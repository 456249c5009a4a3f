"""The draft head of EAGLE-3 (Li et al., 2025, arXiv 2503.01840, section 3.1), shared by trainer and engine.

Beside the token t + 1 the head reads the target's hidden states of token t, and predicts token t + 2; its own output takes their place where the target has
computed none yet. The arithmetic is that of vLLM's and SGLang's ``LlamaForCausalLMEagle3``. Positions are those of token t.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.kernels.api import Kernels
from tandem.kernels.kv_dtype import stored_dtype
from tandem.kernels.mixed import head_kernels
from tandem.layout.eagle3 import AUX_LAYERS, Eagle3Shapes
from tandem.layout.sharding import WHOLE
from tandem.model.attention import AttentionContext, PagedContext, Rotation, attend, rotations
from tandem.model.layer import Layer, Norm
from tandem.model.layer_weights import LayerWeights, layer_weights
from tandem.model.linear import Linear
from tandem.model.quantization.scheme import pack_weight
from tandem.model.rotary import rotary_order, rotary_tables
from tandem.types.kv_cache import KVCacheDtype

Attend = Callable[[LayerWeights, Tensor, tuple[Rotation, ...]], Tensor]
"""``attend(layer, qkv[T, (Hq + 2 Hkv) D], rotations)`` returns the attention's output [T, Hq D]."""


class Eagle3Head(nn.Module):
    """A head of ``shapes``; its parameters are uninitialised. A *packed* one (``pack``) only infers, as a packed ``Decoder``.

    A sequence's use: ``combined`` of the target's states gives the hidden states of the tokens that the target has computed; ``forward`` with the tokens
    that follow them gives what ``logits`` read, and the hidden state that is read with the next token in the place of a combined one.

    ``embedding``: returns the rows [T, H] of the target's table for ``tokens[T]`` (``Decoder.embedded``), unless the head has a table of its own.
    ``target_ids[Vd]`` int64: the token in the target's vocabulary of each of the head's, ascending. A KV cache has one layer (``caches[0]`` of a
    ``PagedContext``), with the key-value heads of ``shapes.layer``."""

    def __init__(
        self, shapes: Eagle3Shapes, kernels: Kernels, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        embedding: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        device, layer = torch.device(device), shapes.layer
        hidden = layer.hidden_size
        self.shapes, self.kernels, self.dtype = shapes, kernels, dtype
        self.embedding = embedding
        if shapes.own_embedding:
            self.embed_tokens = nn.Parameter(torch.empty(layer.vocab_size, hidden, dtype=dtype, device=device))
        self.fc = Linear(hidden, AUX_LAYERS * shapes.target_hidden_size, False, dtype, device)
        self.hidden_norm = Norm((hidden,), dtype, device)
        self.midlayer = Layer(layer, 0, dtype, device)
        self.midlayer.qkv_proj = Linear(layer.qkv_size, 2 * hidden, layer.attention_bias, dtype, device)
        self.norm = Norm((hidden,), dtype, device)
        self.lm_head = Linear(shapes.draft_vocab_size, hidden, False, dtype, device)
        self.target_ids = torch.arange(shapes.draft_vocab_size, device=device)
        self.kv_cache_dtype: KVCacheDtype = "auto"
        self.positions = layer.default_context
        # Not buffers, so that they stay fp32 when the parameters are converted.
        self.rotary_tables = tuple(table.to(device) for table in rotary_tables(layer, self.positions))
        order = rotary_order(layer)
        self.rotary_order = None if order is None else order.to(device)
        self._packed: dict[str, Any] = {}

    @property
    def is_packed(self) -> bool:
        return bool(self._packed)

    def use_context(self, tokens: int) -> None:
        """Computes from now on sequences of up to ``tokens`` tokens, also if its folder says that it was trained with shorter ones."""
        if tokens > self.positions:
            tables = rotary_tables(replace(self.shapes.layer, max_position_embeddings=tokens), tokens)
            self.positions, self.rotary_tables = tokens, tuple(table.to(self.target_ids.device) for table in tables)

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Computes ``tokens[T]`` and ``positions[T]`` int64, and ``hidden[T, H]`` of the tokens before them -> (what ``logits`` read, the hidden states of
        the next step), both [T, H], or [W, H] of the rows that a ``PagedContext`` requests. A packed head, and any under a ``PagedContext``, computes
        without gradient."""
        kv_dtype = stored_dtype(self.kv_cache_dtype, self.dtype)

        def over_context(weights: LayerWeights, qkv: Tensor, rotated: tuple[Rotation, ...]) -> Tensor:
            return attend(self.kernels, weights.attention, qkv, rotated[weights.attention.rotation], context, kv_dtype)

        wanted = context.wanted if isinstance(context, PagedContext) else None
        if isinstance(context, PagedContext) or self.is_packed:
            with torch.no_grad():
                return self.run(self.embedded(tokens), positions, hidden, over_context, wanted)
        return self.run(self.embedded(tokens), positions, hidden, over_context)

    def run(self, embedded: Tensor, positions: Tensor, hidden: Tensor, attention: Attend, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Does ``forward`` with another ``attention``. ``embedded[T, H]``: the rows of the embedding for the tokens; ``wanted[W]`` int64: the rows that are
        computed after it."""
        kernels, linear, weights = self.kernels, self._linear, self._weights()
        eps = self.shapes.layer.rms_norm_eps
        assert weights.input_norm is not None and weights.mlp_norm is not None
        normed = kernels.rms_norm(hidden, self.hidden_norm.weight, eps)
        residual = normed.to(hidden.dtype) if self.shapes.norm_before_residual else hidden
        x = torch.cat((kernels.rms_norm(embedded, weights.input_norm, eps), normed), dim=1)
        x = attention(weights, linear(x, weights.qkv, weights.qkv_bias), rotations(positions, self.rotary_tables, self.rotary_order))
        if wanted is not None:
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
        x, residual = kernels.add_rms_norm(linear(x, weights.output, weights.output_bias), residual, weights.mlp_norm, eps)
        x = linear(kernels.silu_mul(linear(x, weights.gate_up, weights.gate_up_bias)), weights.down, weights.down_bias)
        return kernels.add_rms_norm(x, residual, self.norm.weight, eps)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Returns the rows [T, H] of the embedding for ``tokens[T]`` of the target's vocabulary."""
        if self.shapes.own_embedding:
            return F.embedding(tokens, self.embed_tokens)
        assert self.embedding is not None, "the head reads the target's embedding"
        return self.embedding(tokens).to(self.dtype)

    def combined(self, states: Sequence[Tensor]) -> Tensor:
        """Returns the hidden states [T, H] of tokens from the target's, [T, Ht] each, in the order of ``shapes.aux_layers``."""
        return self._linear(torch.cat([state.to(self.dtype) for state in states], dim=1), self._matrix("fc", self.fc), None).to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Computes ``x[R, H]``, the first of what ``forward`` returns -> [R, Vd] over the head's own vocabulary."""
        kernels = head_kernels(self.kernels)
        return (kernels.linear_packed if self.is_packed else kernels.linear)(x, self._matrix("lm_head", self.lm_head), None)

    @torch.no_grad()
    def pack(self) -> None:
        """Packs every matrix for inference and drops the plain ones; an own embedding stays plain. For good: load another head for other weights."""
        linears = {"fc": self.fc, "lm_head": self.lm_head, **{str(place): linear for place, linear in enumerate(self.midlayer.linears())}}
        for name, linear in linears.items():
            assert linear.weight is not None
            self._packed[name] = pack_weight(self.kernels, linear.weight, None)
            linear.weight = None

    def _linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return (self.kernels.linear_packed if self.is_packed else self.kernels.linear)(x, weight, bias)

    def _matrix(self, name: str, linear: Linear) -> Any:
        return self._packed[name] if self.is_packed else linear.weight

    def _weights(self) -> LayerWeights:
        matrices = tuple(self._matrix(str(place), linear) for place, linear in enumerate(self.midlayer.linears()))
        return layer_weights(self.midlayer, 0, matrices, None, self.shapes.layer, WHOLE, False)
