"""The decoder, defined once for trainer and engine: Llama, Qwen2 and Qwen3, as their shapes say."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.kernels.api import Kernels, PackedWeight
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import AttentionContext, AttentionLayer, PackedContext, PagedContext, attend
from tandem.model.rotary import rotary_table


class Linear(nn.Module):
    """The parameters of a linear layer, ``weight[N, K]`` and perhaps ``bias[N]``. Kernels do the arithmetic."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if bias else None


class Norm(nn.Module):
    """The ``weight[H]`` of a root-mean-square norm."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))


class Layer(nn.Module):
    """The parameters of one layer. ``qkv_proj`` stacks the rows of q, k and v, ``gate_up_proj`` those of gate and
    up."""

    def __init__(self, shapes: ModelShapes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = shapes.hidden_size, shapes.intermediate_size
        self.input_layernorm = Norm(hidden, dtype, device)
        self.qkv_proj = Linear(shapes.qkv_size, hidden, shapes.attention_bias, dtype, device)
        self.q_norm = Norm(shapes.head_dim, dtype, device) if shapes.qk_norm else None
        self.k_norm = Norm(shapes.head_dim, dtype, device) if shapes.qk_norm else None
        self.o_proj = Linear(hidden, shapes.query_size, shapes.output_bias, dtype, device)
        self.post_attention_layernorm = Norm(hidden, dtype, device)
        self.gate_up_proj = Linear(2 * inner, hidden, shapes.mlp_bias, dtype, device)
        self.down_proj = Linear(hidden, inner, shapes.mlp_bias, dtype, device)

    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """Its matrices in the order in which the forward pass meets them."""
        return self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj


class _Step(NamedTuple):
    """One layer as the forward pass runs it: plain tensors or packed weights, and no module to look anything up in.
    ``input_norm`` stands before the layer; ``next_norm`` after it: the next layer's ``input_norm``, or the final
    one."""

    input_norm: Tensor
    attention: AttentionLayer
    qkv: Any
    qkv_bias: Tensor | None
    output: Any
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    gate_up_bias: Tensor | None
    down: Any
    down_bias: Tensor | None
    next_norm: Tensor


class Decoder(nn.Module):
    """A decoder-only transformer over a flat batch of T tokens.

    Parameters are uninitialised until ``initialise`` or ``load_tensors`` fills them. A *packed* decoder (``pack``)
    has its matrices in the kernels' own layout, only infers, and has no plain matrices until ``unpack``.
    """

    lm_head: Linear | None

    def __init__(
        self,
        shapes: ModelShapes,
        kernels: Kernels,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.shapes = shapes
        self.kernels = kernels
        self.embed_tokens = nn.Parameter(torch.empty(shapes.vocab_size, shapes.hidden_size, dtype=dtype, device=device))
        self.layers = nn.ModuleList(Layer(shapes, dtype, device) for _ in range(shapes.num_layers))
        self.norm = Norm(shapes.hidden_size, dtype, device)
        tied = shapes.tie_embeddings
        self.lm_head = None if tied else Linear(shapes.vocab_size, shapes.hidden_size, False, dtype, device)
        # Not a buffer: it stays fp32 whatever the parameters are converted to.
        self._cos_sin = rotary_table(shapes).to(device)
        self._packed: list[_Step] | None = None
        self._packed_head: PackedWeight | None = None

    def forward(self, tokens: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """``tokens[T]`` and ``positions[T]`` int64 -> ``hidden[T, H]`` after the final norm.

        Positions are absolute and below ``shapes.max_positions``: the caller's duty under a ``PagedContext``. A packed
        decoder, and any decoder under a ``PagedContext``, computes without gradient.
        """
        is_packed_batch = isinstance(attention, PackedContext)
        if isinstance(attention, PackedContext) and attention.max_seqlen > self.shapes.max_positions:
            raise ValueError(
                f"a sequence of {attention.max_seqlen} tokens is longer than "
                f"the model's {self.shapes.max_positions} positions"
            )
        if self._packed is None and is_packed_batch:
            return self._run(self._plain_steps(), self.kernels.linear, tokens, positions, attention)
        with torch.no_grad():
            if self._packed is None:
                return self._run(self._plain_steps(), self.kernels.linear, tokens, positions, attention)
            return self._run(self._packed, self.kernels.linear_packed, tokens, positions, attention)

    def _run(
        self, steps: list[_Step], linear: Any, tokens: Tensor, positions: Tensor, context: AttentionContext
    ) -> Tensor:
        kernels, cos_sin, eps = self.kernels, self._cos_sin, self.shapes.rms_norm_eps
        add_rms_norm, silu_mul = kernels.add_rms_norm, kernels.silu_mul
        residual = F.embedding(tokens, self.embed_tokens)
        x = kernels.rms_norm(residual, steps[0].input_norm, eps)
        for step in steps:
            x = attend(kernels, step.attention, linear(x, step.qkv, step.qkv_bias), positions, cos_sin, context)
            x = linear(x, step.output, step.output_bias)
            x, residual = add_rms_norm(x, residual, step.mlp_norm, eps)
            x = silu_mul(linear(x, step.gate_up, step.gate_up_bias))
            x = linear(x, step.down, step.down_bias)
            x, residual = add_rms_norm(x, residual, step.next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden[R, H]`` -> [R, V]."""
        if self._packed_head is not None:
            return self.kernels.linear_packed(hidden, self._packed_head, None)
        return self.kernels.linear(hidden, self.head_weight, None)

    @property
    def head_weight(self) -> Tensor:
        """The plain head [V, H]: the embedding table where they are tied."""
        if self.lm_head is None:
            return self.embed_tokens
        if self.lm_head.weight is None:
            raise RuntimeError("a packed decoder has no plain head; call unpack() and load weights first")
        return self.lm_head.weight

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @torch.no_grad()
    def pack(self, fill: Callable[[int], None] | None = None) -> None:
        """Pack every matrix and the head for inference, and drop the plain matrices one by one (the embedding table
        stays). ``fill(index)``, where given, is called before layer ``index`` is packed, to write its plain matrices.

        Weights that change afterwards are not seen until ``pack`` is called again; ``load_tensors`` leaves the decoder
        unpacked for that. Calling it on a packed decoder packs a tied head again and nothing else.
        """
        was_plain = self._packed is None
        if was_plain:
            matrices = []
            for index, layer in enumerate(self._layers()):
                if fill is not None:
                    fill(index)
                matrices.append(tuple(self._pack_linear(linear) for linear in layer.linears()))
            self._packed = self._steps(matrices)
        if self.lm_head is None:
            self._packed_head = self.kernels.pack(self.embed_tokens)
        elif was_plain:
            self._packed_head = self._pack_linear(self.lm_head)

    def unpack(self, in_one_layer: bool = False) -> None:
        """Drop the packed weights and have plain, uninitialised ones in their place. ``in_one_layer``: the layers'
        matrices all lie in the memory of one layer, for a ``pack`` that fills one after the other; that saves a second
        copy of the model, and the time to touch its memory."""
        self._packed = self._packed_head = None
        held: dict[tuple[int, ...], nn.Parameter] = {}
        for index, layer in enumerate(self._layers()):
            for place, linear in enumerate(layer.linears()):
                # By place and shape too: a layer may differ from the others.
                key = (0 if in_one_layer else index, place, linear.rows, linear.columns)
                if key not in held:
                    is_shared = any(linear.weight is other for other in held.values())
                    held[key] = self._plain(linear, None if is_shared else linear.weight)
                linear.weight = held[key]
        if self.lm_head is not None:
            self.lm_head.weight = self._plain(self.lm_head, self.lm_head.weight)

    def _plain(self, linear: Linear, kept: nn.Parameter | None) -> nn.Parameter:
        """A plain matrix for ``linear``: the one it has, or memory of its own."""
        if kept is not None:
            return kept
        like = self.embed_tokens
        return nn.Parameter(torch.empty(linear.rows, linear.columns, dtype=like.dtype, device=like.device))

    def _pack_linear(self, linear: Linear) -> PackedWeight:
        assert linear.weight is not None
        packed = self.kernels.pack(linear.weight)
        linear.weight = None
        return packed

    def _plain_steps(self) -> list[_Step]:
        return self._steps([tuple(linear.weight for linear in layer.linears()) for layer in self._layers()])

    def _layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def _steps(self, matrices: list[tuple[Any, ...]]) -> list[_Step]:
        shapes = self.shapes
        heads, scale = (shapes.num_heads, shapes.num_kv_heads, shapes.head_dim), shapes.head_dim**-0.5
        layers = self._layers()
        norms = [*(layer.input_layernorm.weight for layer in layers), self.norm.weight]
        steps = []
        for index, layer in enumerate(layers):
            q_norm = layer.q_norm.weight if layer.q_norm is not None else None
            k_norm = layer.k_norm.weight if layer.k_norm is not None else None
            attention = AttentionLayer(index, heads, scale, shapes.window(index), q_norm, k_norm, shapes.rms_norm_eps)
            qkv, output, gate_up, down = matrices[index]
            steps.append(
                _Step(
                    norms[index],
                    attention,
                    qkv,
                    layer.qkv_proj.bias,
                    output,
                    layer.o_proj.bias,
                    layer.post_attention_layernorm.weight,
                    gate_up,
                    layer.gate_up_proj.bias,
                    down,
                    layer.down_proj.bias,
                    norms[index + 1],
                )
            )
        return steps

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        if self._packed is not None:
            raise RuntimeError("a packed decoder cannot be moved or converted; call unpack() and load weights first")
        super()._apply(fn, recurse)
        self._cos_sin = self._cos_sin.to(self.embed_tokens.device)
        return self


__all__ = ["AttentionContext", "Decoder", "Layer", "Linear", "Norm", "PackedContext", "PagedContext"]
