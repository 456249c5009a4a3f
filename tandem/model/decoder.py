"""The decoder, defined once for trainer and engine: Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral, as their shapes say."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.kernels.api import Kernels, PackedWeight
from tandem.kernels.kv_dtype import stored_dtype
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import WHOLE, Cut, local_shapes, vocabulary_part
from tandem.model.attention import AttentionContext, AttentionLayer, PackedContext, PagedContext, attend
from tandem.model.lora import LoraBatch, LoraLayer, LowRank, add_lora
from tandem.model.moe import ExpertLayer, Experts, mixture
from tandem.model.quantization.scheme import Scheme, Stored, pack_stored, pack_weight
from tandem.model.rotary import rotary_table
from tandem.model.tensor_parallel import RankGroup, collectives
from tandem.types.kv_cache import KVCacheDtype


class Linear(nn.Module):
    """The parameters of a linear layer, ``weight[N, K]`` and perhaps ``bias[N]``. Kernels do the arithmetic. ``stored``: the
    weights as a quantised checkpoint holds them, one for each stacked projection, until the decoder is packed."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self.stored: tuple[Stored, ...] = ()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if bias else None


class Norm(nn.Module):
    """The ``weight[H]`` of a root-mean-square norm."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))


class Layer(nn.Module):
    """The parameters of one layer. ``qkv_proj`` stacks the rows of q, k and v, ``gate_up_proj`` those of gate and up.
    A layer has these and ``down_proj``, or ``experts``."""

    gate_up_proj: Linear | None
    down_proj: Linear | None
    experts: Experts | None

    def __init__(self, whole: ModelShapes, index: int, dtype: torch.dtype, device: torch.device, cut: Cut = WHOLE) -> None:
        super().__init__()
        shapes = local_shapes(whole, cut)
        hidden, inner = shapes.hidden_size, shapes.intermediate_size
        # A cut by output columns (see ``Cut``) leaves the sum whole.
        rows, of = (hidden // cut.size, whole) if cut.deterministic else (hidden, shapes)
        self.input_layernorm = Norm(hidden, dtype, device)
        self.qkv_proj = Linear(shapes.qkv_size, hidden, shapes.attention_bias, dtype, device)
        self.q_norm = Norm(shapes.head_dim, dtype, device) if shapes.qk_norm else None
        self.k_norm = Norm(shapes.head_dim, dtype, device) if shapes.qk_norm else None
        self.o_proj = Linear(rows, of.query_size, shapes.output_bias, dtype, device)
        self.post_attention_layernorm = Norm(hidden, dtype, device)
        experts, whole_experts = shapes.experts_of(index), of.experts_of(index)
        self.experts = self.gate_up_proj = self.down_proj = None
        if experts is not None and whole_experts is not None:
            down = (rows, whole_experts.intermediate_size)
            self.experts = Experts(experts, hidden, dtype, device, down)
        else:
            self.gate_up_proj = Linear(2 * inner, hidden, shapes.mlp_bias, dtype, device)
            self.down_proj = Linear(rows, of.intermediate_size, shapes.mlp_bias, dtype, device)

    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers in the order in which the forward pass meets them; a mixture of experts is none."""
        if self.gate_up_proj is None or self.down_proj is None:
            return self.qkv_proj, self.o_proj
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
    experts: ExpertLayer | None


_UNCHANGED = LoraLayer()


class Decoder(nn.Module):
    """A decoder-only transformer over a flat batch of T tokens.

    Parameters are uninitialised until ``initialise`` or ``load_tensors`` fills them. A *packed* decoder (``pack``)
    has its matrices in the kernels' own layout, only infers, and has no plain matrices until ``unpack``. With a ``group``
    it holds one rank's part (``local``: the shapes of that) and only infers, together with the other ranks.
    ``kv_cache_dtype``: that of the engine whose bits packed sequences are to have; their keys and values are rounded alike.
    """

    lm_head: Linear | None

    def __init__(
        self,
        shapes: ModelShapes,
        kernels: Kernels,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: RankGroup | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.shapes = shapes
        self.kernels = kernels
        self.group = group
        self.cut = WHOLE if group is None else group.cut
        self.local = local = local_shapes(shapes, self.cut)
        self.embed_tokens = nn.Parameter(torch.empty(local.vocab_size, shapes.hidden_size, dtype=dtype, device=device))
        self.layers = nn.ModuleList(Layer(shapes, i, dtype, device, self.cut) for i in range(shapes.num_layers))
        self.norm = Norm(shapes.hidden_size, dtype, device)
        tied = shapes.tie_embeddings
        self.lm_head = None if tied else Linear(local.vocab_size, shapes.hidden_size, False, dtype, device)
        # Not a buffer: it stays fp32 whatever the parameters are converted to.
        self._cos_sin = rotary_table(shapes).to(device)
        self._before, self._after = collectives(group)
        self.kv_cache_dtype: KVCacheDtype = "auto"
        self.quantization: Scheme | None = None
        self._packed: list[_Step] | None = None
        self._packed_head: Any = None

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionContext, router_logits: list[Tensor] | None = None,
        lora: LoraBatch | None = None,
    ) -> Tensor:
        """``tokens[T]`` and ``positions[T]`` int64 -> ``hidden[T, H]`` after the final norm, or the ``hidden[W, H]`` of
        the rows that a ``PagedContext`` wants.

        Positions are absolute and below ``shapes.max_positions``: the caller's duty under a ``PagedContext``. A packed
        decoder, and any decoder under a ``PagedContext``, computes without gradient. ``router_logits``, where given,
        receives the [T, E] of every mixture of experts (for ``moe.load_balancing_loss``). ``lora``: the rows with an
        adapter; there is no gradient then.
        """
        is_packed_batch = isinstance(attention, PackedContext)
        if isinstance(attention, PackedContext) and attention.max_seqlen > self.shapes.max_positions:
            raise ValueError(
                f"a sequence of {attention.max_seqlen} tokens is longer than "
                f"the model's {self.shapes.max_positions} positions"
            )
        if self._packed is None and is_packed_batch and lora is None:
            return self._run(self._plain_steps(), self.kernels.linear, tokens, positions, attention, router_logits)
        with torch.no_grad():
            if self._packed is None:
                return self._run(self._plain_steps(), self.kernels.linear, tokens, positions, attention, router_logits, lora)
            return self._run(self._packed, self.kernels.linear_packed, tokens, positions, attention, router_logits, lora)

    def _run(
        self, steps: list[_Step], linear: Any, tokens: Tensor, positions: Tensor, context: AttentionContext,
        router_logits: list[Tensor] | None, lora: LoraBatch | None = None,
    ) -> Tensor:
        kernels, cos_sin, eps = self.kernels, self._cos_sin, self.shapes.rms_norm_eps
        add_rms_norm = kernels.add_rms_norm
        kv_dtype = stored_dtype(self.kv_cache_dtype, self.embed_tokens.dtype)
        wanted = context.wanted if isinstance(context, PagedContext) else None
        assert wanted is None or lora is None, "rows with an adapter are named by their place in the whole batch"

        def project(x: Tensor, weight: Any, bias: Tensor | None, change: LowRank | None) -> Tensor:
            out: Tensor = linear(x, weight, bias)
            return out if lora is None else add_lora(kernels, out, x, change, lora)

        before, after = self._before, self._after
        in_one_call = steps is self._packed and lora is None and self.group is None
        residual = self._embed(tokens)
        x = kernels.rms_norm(residual, steps[0].input_norm, eps)
        for step in steps:
            changes = _UNCHANGED if lora is None else lora.layers[step.attention.index]
            qkv = project(x, step.qkv, step.qkv_bias, changes.qkv)
            x = attend(kernels, step.attention, qkv, positions, cos_sin, context, kv_dtype)
            if wanted is not None and step is steps[-1]:
                x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
            x = after(project(before(x), step.output, step.output_bias, changes.output))
            x, residual = add_rms_norm(x, residual, step.mlp_norm, eps)
            if step.experts is not None:
                x = after(mixture(kernels, step.experts, x, router_logits, before))
            elif in_one_call and isinstance(step.gate_up, PackedWeight) and isinstance(step.down, PackedWeight):
                x = kernels.gated_mlp_packed(x, step.gate_up, step.gate_up_bias, step.down, step.down_bias)
            else:
                x = kernels.silu_mul(project(x, step.gate_up, step.gate_up_bias, changes.gate_up))
                x = after(project(before(x), step.down, step.down_bias, changes.down))
            x, residual = add_rms_norm(x, residual, step.next_norm, eps)
        return x

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.group is None:
            return F.embedding(tokens, self.embed_tokens)
        own = tokens - self.cut.rank * vocabulary_part(self.shapes, self.cut)
        held = (own >= 0) & (own < self.local.vocab_size)
        found = F.embedding(own.clamp(0, self.local.vocab_size - 1), self.embed_tokens)
        # Nothing changes when -0 is added to it, +0 and -0 included.
        return self.group.total(found.masked_fill(~held.unsqueeze(1), -0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden[R, H]`` -> [R, V]; on ranks but the first, their own columns."""
        if self._packed_head is not None:
            own = self.kernels.linear_packed(hidden, self._packed_head, None)
        else:
            own = self.kernels.linear(hidden, self.head_weight, None)
        if self.group is None:
            return own
        return self.group.first_rank_columns(own, vocabulary_part(self.shapes, self.cut), self.shapes.vocab_size)

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

    @property
    def packed(self) -> tuple[object, ...]:
        """What the packed weights are held by: other objects after they were packed again."""
        return self._packed, self._packed_head

    def packed_matrices(self) -> list[dict[str, Any]]:
        """The packed matrices of every layer by their place in it; the head stands in a last dictionary of its own. Empty where the
        decoder is not packed."""
        if self._packed is None:
            return []
        names = ("qkv", "output", "gate_up", "down", "experts")
        return [*({name: getattr(step, name) for name in names} for step in self._packed), {"head": self._packed_head}]

    @torch.no_grad()
    def pack(self, fill: Callable[[int], None] | None = None) -> None:
        """Pack every matrix and the head for inference, and drop the plain matrices one by one (the embedding table
        stays). ``fill(index)``, where given, is called before layer ``index`` is packed, to write its plain matrices. Matrices
        are quantised as a checkpoint stored them, or else rounded as ``quantization`` says; a router and experts stay plain,
        and so does the head where ``quantization`` does not include it.

        Weights that change afterwards are not seen until ``pack`` is called again; ``load_tensors`` leaves the decoder
        unpacked for that. Calling it on a packed decoder packs a tied head again and nothing else.
        """
        was_plain = self._packed is None
        if was_plain:
            matrices, experts = [], []
            for index, layer in enumerate(self._layers()):
                if fill is not None:
                    fill(index)
                matrices.append(tuple(self._pack_linear(linear, self.quantization) for linear in layer.linears()))
                experts.append(layer.experts.pack(self.kernels) if layer.experts else None)
            self._packed = self._steps(matrices, experts)
        if self.lm_head is None:
            self._packed_head = pack_weight(self.kernels, self.embed_tokens, self._head_quantization)
        elif was_plain:
            self._packed_head = self._pack_linear(self.lm_head, self._head_quantization)

    def unpack(self, in_one_layer: bool = False) -> None:
        """Drop the packed weights and have plain, uninitialised ones in their place. ``in_one_layer``: the layers'
        matrices all lie in the memory of one layer, for a ``pack`` that fills one after the other; that saves a second
        copy of the model, and the time to touch its memory."""
        self._packed = self._packed_head = None
        held: dict[tuple[int, ...], nn.Parameter] = {}
        for index, layer in enumerate(self._layers()):
            if layer.experts is not None and not layer.experts.is_plain:
                layer.experts.allocate()
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

    @property
    def _head_quantization(self) -> Scheme | None:
        return self.quantization if self.quantization is not None and self.quantization.head else None

    def _pack_linear(self, linear: Linear, scheme: Scheme | None) -> Any:
        if linear.stored:
            packed, linear.stored = pack_stored(self.kernels, linear.stored), ()
            return packed
        assert linear.weight is not None
        packed = pack_weight(self.kernels, linear.weight, scheme)
        linear.weight = None
        return packed

    def _plain_steps(self) -> list[_Step]:
        return self._steps(
            [tuple(linear.weight for linear in layer.linears()) for layer in self._layers()],
            [layer.experts.plain() if layer.experts else None for layer in self._layers()],
        )

    def _layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def _steps(self, matrices: list[tuple[Any, ...]], experts: list[ExpertLayer | None]) -> list[_Step]:
        shapes = self.local
        # Partial products are summed over the ranks, a bias is to be added once.
        biased = self.cut.deterministic or self.cut.rank == 0
        heads, scale = (shapes.num_heads, shapes.num_kv_heads, shapes.head_dim), shapes.head_dim**-0.5
        layers = self._layers()
        norms = [*(layer.input_layernorm.weight for layer in layers), self.norm.weight]
        steps = []
        for index, layer in enumerate(layers):
            q_norm = layer.q_norm.weight if layer.q_norm is not None else None
            k_norm = layer.k_norm.weight if layer.k_norm is not None else None
            attention = AttentionLayer(index, heads, scale, shapes.window(index), q_norm, k_norm, shapes.rms_norm_eps)
            qkv, output, gate_up, down = (*matrices[index], None, None)[:4]
            steps.append(
                _Step(
                    norms[index],
                    attention,
                    qkv,
                    layer.qkv_proj.bias,
                    output,
                    layer.o_proj.bias if biased else None,
                    layer.post_attention_layernorm.weight,
                    gate_up,
                    layer.gate_up_proj.bias if layer.gate_up_proj is not None else None,
                    down,
                    layer.down_proj.bias if layer.down_proj is not None and biased else None,
                    norms[index + 1],
                    experts[index],
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
