"""The shapes of a decoder, as plain data. Imports no torch.

``ModelShapes`` is the one description of a network: the decoder is built from it, the sharding plan divides it, the memory estimates
count it, and the families in ``tandem.model.families`` translate it from and to ``config.json``.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from tandem.config.lora import ATTENTION_MODULES, LINEAR_ATTENTION_MODULES, MLP_MODULES, LoraConfig
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.latent_attention import AttentionMatrix, LatentAttention
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.rotary import NO_SCALING, RopeScaling, Rotary
from tandem.layout.transformers_module import TransformersModule
from tandem.types.errors import UserError

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
"""The activation of an MLP's gate, by its name in transformers; the second is GELU in its approximation by tanh. The third, which has no name there, is that of
gpt-oss, which also bounds and shifts what the gate multiplies (``Kernels.clamped_swiglu_mul``)."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of ``clamped_swiglu``."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constants of the forward pass. ``embedding``: of the embedding's rows; ``residual``: of what attention and MLP add to the residual stream;
    ``attention``: of the scores (``None``: 1 / sqrt(head_dim)); ``logits_scaling`` divides the logits."""

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits_scaling: float = 1.0


ValueHead = Literal["none", "sequence", "token"]
"""The head that gives one number for a hidden state, as in transformers: that of sequence classification (``score.weight``, which reads the last
token's state) or of token classification (with ``score.bias``)."""


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The shapes of a decoder-only transformer. All counts in elements.

    ``architecture``: the ``model_type`` of its family, which only reading and writing a folder depend on. ``layer_windows[i]``: layer i's
    sliding window in tokens (``None``: full attention); empty: full attention in every layer. ``experts``: the mixture of experts, ``None``
    if every layer has a plain MLP. ``gated_mlp``: an MLP has three matrices (gate, up, down), or two (up, down), which only estimates know.
    ``latent``: multi-head latent attention (``None``: keys and values of their own); ``head_dim`` is that of its queries and keys. ``pre_norms``: attention
    and MLP read a norm of the residual stream; ``post_norms``: what they write to it is normalised. ``qk_norm``: queries and keys are normalised before the
    rotation, each head alone or with ``qk_norm_all_heads`` all heads together. ``unrotated_layers``: those without rotary embedding, ascending.
    ``window_rotary``: that of layers with a window (``None``: as the others). ``norms_from_one``: norms multiply with 1 plus their weights.
    ``scaled_embedding``: the embedding's rows are multiplied with sqrt(hidden_size), rounded to the weights' dtype. ``score_cap``, ``logit_cap``: the soft
    caps of the attention scores and of the logits, x -> cap tanh(x / cap) (``None``: without). ``rotary_fraction``: the part of each head, from its start,
    that is rotated; ``rotary_interleaved``: a component is rotated with its neighbour, not with the one half of that part behind it.
    ``attention_sinks``: a learned score of each query head joins the softmax's
    denominator. ``centred_norms``: norms subtract the mean first (LayerNorm without a bias).
    ``parallel_blocks``: attention and MLP read the same norm, and both are added to the residual stream. ``qk_norm_by_head``: each head has weights of its own
    in the norm of its queries and keys. ``linear_attention``: the layers without softmax attention (``None``: none). ``attention_gate``: what a head of softmax
    attention returns is multiplied with the sigmoid of a gate, whose rows are behind those of its query in ``q_proj``.
    ``transformers``: the module of transformers that computes the network, whose parameters have the module's names (``None``: Tandem's decoder does).
    ``own_parameters``: (name, shape) of every parameter where they are not those of a decoder, as of a draft head.
    ``language_head``, ``value_head``: the heads; without any, it only computes hidden states, as a model that embeds
    text does. ``lora``: the low-rank adapter that is trained beside the weights (``None``: the weights are).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = NO_SCALING
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    experts: ExpertShapes | None = None
    value_head: ValueHead = "none"
    num_labels: int = 1
    language_head: bool = True
    lora: LoraConfig | None = None
    latent: LatentAttention | None = None
    post_norms: bool = False
    pre_norms: bool = True
    qk_norm_all_heads: bool = False
    unrotated_layers: tuple[int, ...] = ()
    window_rotary: Rotary | None = None
    multipliers: Multipliers = Multipliers()
    activation: Activation = "silu"
    norms_from_one: bool = False
    scaled_embedding: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    rotary_fraction: float = 1.0
    rotary_interleaved: bool = False
    attention_sinks: bool = False
    centred_norms: bool = False
    parallel_blocks: bool = False
    qk_norm_by_head: bool = False
    linear_attention: LinearAttention | None = None
    attention_gate: bool = False
    transformers: TransformersModule | None = None
    own_parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        check_tensor_count(self.num_hidden_layers, 0 if self.experts is None else self.experts.num_experts)
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model head_dim {self.head_dim} is odd; rotary embedding needs an even number")
        if not 0 < self.rotary_fraction <= 1 or self.rotated_size % 2 or not self.rotated_size:
            raise ValueError(f"model rotary_fraction {self.rotary_fraction} of {self.head_dim} numbers is {self.rotated_size}; it must be an even number")
        if self.latent is not None and (self.head_dim, self.num_key_value_heads) != (self.latent.head_dim, self.num_attention_heads):
            raise ValueError(f"model head_dim {self.head_dim} is not the {self.latent.head_dim} of its latent attention, whose queries each have a key")
        if not self.language_head and self.tie_word_embeddings:
            raise ValueError("model has no language-model head to tie its embedding to")
        if self.layer_windows and len(self.layer_windows) != self.num_hidden_layers:
            raise ValueError(f"model layer_windows has {len(self.layer_windows)} entries for {self.num_hidden_layers} layers")
        if list(self.unrotated_layers) != sorted(set(self.unrotated_layers) & set(range(self.num_hidden_layers))):
            raise ValueError(f"model unrotated_layers are {list(self.unrotated_layers)}; they must be layers from 0 to {self.num_hidden_layers - 1}, ascending")
        for name in ("short_factors", "long_factors"):
            count = len(getattr(self.rope_scaling, name))
            if self.rope_scaling.kind == "longrope" and count != self.rotated_size // 2:
                raise ValueError(
                    f"model {name} of its rotary embedding are {count}; the {self.rotated_size} rotated numbers of a head need {self.rotated_size // 2}"
                )
        if self.parallel_blocks and (self.post_norms or not self.pre_norms):
            raise ValueError("model parallel_blocks need a norm before attention and MLP, and none after them")
        if self.qk_norm_by_head and self.qk_norm_all_heads:
            raise ValueError("model qk_norm_by_head and qk_norm_all_heads exclude each other; choose one")
        for name in ("score_cap", "logit_cap"):
            cap = getattr(self, name)
            if cap is not None and not cap > 0:
                raise ValueError(f"model {name} is {cap}; it must be above 0, or None")
        if self.linear_attention is not None:
            self._check_linear_attention(self.linear_attention)
        if self.experts is not None:
            self.experts.check(self.num_hidden_layers)
        if self.lora is not None and self.experts is not None and (of_experts := [m for m in self.lora.target_modules if m in MLP_MODULES]):
            own = "q, k, v and o_proj" if self._adaptable == ATTENTION_MODULES else " and ".join(self._adaptable)
            raise ValueError(f"model has a mixture of experts, whose '{of_experts[0]}' can have no adapter; set target_modules to {own} only")
        if self.lora is not None and self.transformers is not None:
            self.transformers.check_adapted(self.lora.target_modules)
        known = (*self._adaptable, *(MLP_MODULES if self.transformers is None else ()))
        if self.lora is not None and (others := [m for m in self.lora.target_modules if m not in known]):
            raise ValueError(f"model has no matrix '{others[0]}'; set target_modules to some of {', '.join(self._adaptable)}")

    @property
    def _adaptable(self) -> tuple[str, ...]:
        """The matrices of a layer's attention that an adapter can change; of a module of transformers all of them."""
        if self.transformers is not None:
            return self.transformers.adaptable
        if self.latent is not None:
            return tuple(matrix.name for matrix in self.attention_matrices)
        return (*ATTENTION_MODULES, *(() if self.linear_attention is None else LINEAR_ATTENTION_MODULES))

    def _check_linear_attention(self, linear: LinearAttention) -> None:
        if list(linear.layers) != sorted(set(linear.layers) & set(range(self.num_hidden_layers))) or len(linear.layers) == self.num_hidden_layers:
            raise ValueError(
                f"model linear attention's layers are {list(linear.layers)}; they must be some of 0 to {self.num_hidden_layers - 1}, ascending, and leave "
                "one to softmax attention"
            )

    def experts_of(self, layer: int) -> ExpertShapes | None:
        """Returns the mixture of experts in ``layer``, ``None`` if it has a plain MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def linear_attention_of(self, layer: int) -> LinearAttention | None:
        """Returns the linear attention of ``layer``, ``None`` if it has softmax attention."""
        return self.linear_attention if self.linear_attention is not None and layer in self.linear_attention.layers else None

    @property
    def cached_layers(self) -> int:
        """The layers with keys and values in the KV cache."""
        return self.num_hidden_layers - (0 if self.linear_attention is None else len(self.linear_attention.layers))

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of ``layer`` in tokens, ``None`` for full attention."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """The rotary embeddings that layers have, ``None`` for none; the first is the model's."""
        of_windows = () if self.window_rotary is None else (self.window_rotary,)
        return Rotary(self.rope_theta, self.rope_scaling), *of_windows, *((None,) if self.unrotated_layers else ())

    def positions_in(self, context: int) -> int:
        """Returns the positions that sequences of a run may have whose longest has up to ``context`` tokens: all of the model's, or with ``longrope`` those of
        its short frequencies where they are enough. Every process of a run computes with the same ones, whatever sequences it meets."""
        short = self.rope_scaling.original_max_position_embeddings
        is_short = self.rope_scaling.kind == "longrope" and context <= short
        return min(short, self.max_position_embeddings) if is_short else self.max_position_embeddings

    @property
    def default_context(self) -> int:
        """The tokens of the longest sequence of a run that names no other: with ``longrope`` those of its short frequencies, as in vLLM."""
        return self.positions_in(1)

    def rotary_of(self, layer: int) -> int:
        """Returns the index in ``rotaries`` of that of ``layer``."""
        if layer in self.unrotated_layers:
            return len(self.rotaries) - 1
        return int(self.window_rotary is not None and self.window(layer) is not None)

    @property
    def rotated_size(self) -> int:
        """The numbers of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction) if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        """The numbers of a vector that the rotary embedding is given: a head, or the part of one that latent attention rotates."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """The factor of the attention scores; with latent attention YaRN's temperature is in it, and not in cosines and sines."""
        scale, rope = self.head_dim**-0.5 if self.multipliers.attention is None else self.multipliers.attention, self.rope_scaling
        if self.latent is None or not rope.mscale_all_dim or rope.factor <= 1:
            return scale
        factor = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
        return scale * factor * factor

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """The names of a layer's norms of the residual stream and of what is added to it."""
        if self.parallel_blocks:
            return ("input_layernorm",)
        if not self.pre_norms:
            return "post_attention_layernorm", "post_feedforward_layernorm"
        after = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if self.post_norms else ()
        return "input_layernorm", "post_attention_layernorm", *after

    @property
    def qk_norm_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the weights of the norms of queries and keys; empty without any."""
        if not self.qk_norm:
            return ()
        if self.qk_norm_by_head:
            return (self.num_attention_heads, self.head_dim), (self.num_key_value_heads, self.head_dim)
        return ((self.query_size,), (self.key_value_size,)) if self.qk_norm_all_heads else ((self.head_dim,), (self.head_dim,))

    @property
    def further_terms(self) -> tuple[str, ...]:
        """What the network computes beside the terms that all families of Llama's kind have, in words."""
        terms = {
            "norms after attention and MLP": self.post_norms,
            "norms of queries and keys over all heads": self.qk_norm_all_heads,
            "layers without rotary embedding": bool(self.unrotated_layers),
            "a rotary embedding of its own in layers with windows": self.window_rotary is not None,
            "multipliers of embedding, residual stream, attention or logits": self.multipliers != Multipliers(),
            "another activation than SiLU": self.activation != "silu",
            "norms that multiply with 1 plus their weights": self.norms_from_one,
            "a scaled embedding": self.scaled_embedding,
            "a rotary embedding of a part of each head": self.rotated_size != self.head_dim,
            "a rotary embedding of neighbouring components": self.rotary_interleaved,
            "experts chosen by sigmoid scores": self.experts is not None and self.experts.sigmoid is not None,
            "experts chosen by groups, or with scaled gates": self.experts is not None and self.experts.softmax is not None,
            "shared experts": self.experts is not None and self.experts.shared_intermediate_size > 0,
            "a soft cap of attention scores": self.score_cap is not None,
            "a soft cap of logits": self.logit_cap is not None,
            "attention sinks": self.attention_sinks,
            "biases of experts": self.experts is not None and self.experts.biased,
            "norms that subtract the mean": self.centred_norms,
            "rotary frequencies of short and of long runs (longrope)": self.rope_scaling.kind == "longrope",
            "attention and MLP in parallel": self.parallel_blocks,
            "norms of queries and keys with weights for each head": self.qk_norm_by_head,
            "a module of transformers (model.implementation: transformers)": self.transformers is not None,
            "latent attention": self.latent is not None,
            "layers with linear attention": self.linear_attention is not None,
            "a gate of attention's output": self.attention_gate,
        }
        return tuple(term for term, is_there in terms.items() if is_there)

    @property
    def exported(self) -> "ModelShapes":
        """The shapes of the Hugging Face folder: without an adapter, and without a value head beside a language-model head, which no class of
        transformers has."""
        return replace(self, value_head="none" if self.language_head else self.value_head, lora=None)

    def adapter_rank(self, module: str) -> int:
        """Returns the rank of the adapter of a layer's matrix ``module``, such as ``q_proj``; 0 without one."""
        return self.lora.rank if self.lora is not None and module in self.lora.target_modules else 0

    @property
    def mlp_matrices(self) -> int:
        """The matrices of a plain MLP: gate, up and down, or up and down."""
        return 3 if self.gated_mlp else 2

    @property
    def head_rows(self) -> int:
        """The numbers that the heads compute for a token: a logit for each id of the vocabulary, a value."""
        return self.vocab_size * self.language_head + (self.value_head != "none")

    @property
    def outputs(self) -> int:
        """The numbers that an inference pass keeps for a token: its log-probability, raw and at a temperature, and a value."""
        return 2 * self.language_head + (self.value_head != "none")

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """The numbers of a token's values, of all heads that have their own."""
        return self.key_value_size if self.latent is None else self.num_attention_heads * self.latent.v_head_dim

    @property
    def attended_size(self) -> int:
        """The numbers that attention returns for a token."""
        return self.query_size if self.latent is None else self.num_attention_heads * self.latent.v_head_dim

    @property
    def qkv_size(self) -> int:
        return self.query_size + self.key_value_size + self.value_size

    @property
    def query_rows(self) -> int:
        """The rows of ``q_proj``: queries, and gates if there are any."""
        return self.query_size * (2 if self.attention_gate else 1)

    @property
    def qkv_rows(self) -> int:
        """The rows of ``qkv_proj``: ``qkv_size`` with gates."""
        return self.qkv_size + self.query_rows - self.query_size

    @property
    def attention_matrices(self) -> tuple[AttentionMatrix, ...]:
        """The matrices of a layer's attention, in the order in which a token meets them; queries, keys and values are one unless attention is latent."""
        into = (
            (AttentionMatrix("qkv_proj", self.qkv_rows, self.hidden_size, True),)
            if self.latent is None
            else self.latent.matrices(self.hidden_size, self.num_attention_heads)
        )
        return (*into, AttentionMatrix("o_proj", self.hidden_size, self.attended_size, False))

    def attention_weights(self, layer: int) -> int:
        """Returns the weights of the attention in ``layer`` that a token is multiplied with."""
        return sum(each.outputs * each.inputs for each in self.matrices_of_attention(layer))

    def matrices_of_attention(self, layer: int) -> tuple[AttentionMatrix, ...]:
        """Returns the matrices of the softmax or linear attention in ``layer``, in the order in which a token meets them."""
        linear = self.linear_attention_of(layer)
        return self.attention_matrices if linear is None else linear.matrices(self.hidden_size)


MOST_TENSORS = 2**20
"""A safetensors file names its tensors in a header of at most 100 MB, with about 100 bytes for each."""


def check_tensor_count(num_hidden_layers: int, num_experts: int) -> None:
    """Raises ``ValueError`` for more tensors than a model's file can name, before anything is made for each layer or expert."""
    tensors = num_hidden_layers * (6 + 3 * max(num_experts, 1))
    if tensors > MOST_TENSORS:
        experts = f" with {num_experts} experts each" if num_experts else ""
        raise ValueError(
            f"model num_hidden_layers is {num_hidden_layers}{experts}: {tensors:,} tensors, more than the {MOST_TENSORS:,} that a file of weights can name"
        )


def adapted_shapes(shapes: ModelShapes, lora: LoraConfig | None) -> ModelShapes:
    """Returns ``shapes`` with the adapter ``lora``. Raises ``UserError`` if the model cannot have it."""
    try:
        return replace(shapes, lora=lora)
    except ValueError as error:
        raise UserError(f"'trainer.lora.target_modules': {error}") from None
