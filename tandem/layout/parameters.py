"""The parameters of a model of given shapes, by their names in its Hugging Face folder. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tandem.config.lora import ATTENTION_MODULES, LATENT_MODULES, LINEAR_ATTENTION_MODULES, LINEAR_MODULES
from tandem.layout.expert_shapes import CHOICE_BIAS, SHARED_GATE, ExpertShapes
from tandem.layout.latent_attention import WITHIN_HEADS, LatentAttention
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes

SINKS = "self_attn.sinks"
"""The name of a layer's attention sinks, after ``model.layers.N.``."""
_OF_ATTENTION = (*ATTENTION_MODULES, *LATENT_MODULES)


class Parameter(NamedTuple):
    """A parameter by its Hugging Face name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def parameters(shapes: ModelShapes) -> Iterator[Parameter]:
    """Yields every parameter of the Hugging Face folder, each matrix followed by its adapter, in the order in which checkpoints list them."""
    own = shapes.own_parameters if shapes.transformers is None else shapes.transformers.parameters
    if own:
        adapted = set() if shapes.lora is None or shapes.transformers is None else set(shapes.transformers.linears)
        for name, shape in own:
            yield Parameter(name, shape)
            if (matrix := name.removesuffix(".weight")) in adapted:
                yield from _adapter_parameters(shapes, matrix, *shape)
        return
    hidden, inner = shapes.hidden_size, shapes.intermediate_size
    yield Parameter("model.embed_tokens.weight", (shapes.vocab_size, hidden))
    for layer in range(shapes.num_hidden_layers):
        at, linear = f"model.layers.{layer}.", shapes.linear_attention_of(layer)
        if linear is None:
            yield from _attention_parameters(shapes, at, hidden)
        else:
            yield from _linear_attention_parameters(shapes, linear, at, hidden)
        experts = shapes.experts_of(layer)
        if experts is not None:
            yield from _expert_parameters(experts, at, hidden)
        else:
            gate = (("gate_proj", inner, hidden),) if shapes.gated_mlp else ()
            for name, rows, columns in (*gate, ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
                yield Parameter(f"{at}mlp.{name}.weight", (rows, columns))
                if shapes.mlp_bias:
                    yield Parameter(f"{at}mlp.{name}.bias", (rows,))
                yield from _adapter_parameters(shapes, f"{at}mlp.{name}", rows, columns)
        for name in shapes.layer_norms:
            yield Parameter(f"{at}{name}.weight", (hidden,))
    yield Parameter("model.norm.weight", (hidden,))
    if shapes.language_head and not shapes.tie_word_embeddings:
        yield Parameter("lm_head.weight", (shapes.vocab_size, hidden))
    if shapes.value_head != "none":
        yield Parameter("score.weight", (shapes.num_labels, hidden))
    if shapes.value_head == "token":
        yield Parameter("score.bias", (shapes.num_labels,))


def trained_parameters(shapes: ModelShapes) -> Iterator[Parameter]:
    """Yields those of ``parameters`` that training changes, which checkpoints hold: all, or with an adapter only the adapter's."""
    return (p for p in parameters(shapes) if shapes.lora is None or is_of_adapter(p.name))


def published_parameters(shapes: ModelShapes) -> Iterator[Parameter]:
    """Yields those of ``trained_parameters`` that engines receive: without a value head beside the language-model head, which is the trainer's alone."""
    return trained_parameters(replace(shapes.exported, lora=shapes.lora))


def matrix_name(layer: int, module: str) -> str:
    """Returns the name, without ``.weight``, of a layer's matrix ``module``, such as ``q_proj``."""
    kind = "self_attn" if module in _OF_ATTENTION else "linear_attn" if module in LINEAR_ATTENTION_MODULES else "mlp"
    return f"model.layers.{layer}.{kind}.{module}"


def linear_name(shapes: ModelShapes, layer: int, module: str) -> str:
    """Does ``matrix_name`` in a model where a layer with a mixture of experts has its shared experts in the place of the MLP."""
    experts = shapes.experts_of(layer)
    if experts is None or module in (*_OF_ATTENTION, *LINEAR_ATTENTION_MODULES):
        return matrix_name(layer, module)
    return f"model.layers.{layer}.{experts.names.shared}.{module}"


def linear_matrices(shapes: ModelShapes) -> set[str]:
    """Returns the names, without ``.weight``, of the layers' matrices that may be quantized, those of layers of all kinds; experts have none but the shared
    ones, nor has the one that latent attention multiplies head by head. Of a module of transformers those that an adapter can change."""
    if shapes.transformers is not None:
        return set(shapes.transformers.linears)
    modules = (*(name for name in LATENT_MODULES if name != WITHIN_HEADS), *LINEAR_ATTENTION_MODULES, *LINEAR_MODULES)
    return {linear_name(shapes, layer, module) for layer in range(shapes.num_hidden_layers) for module in modules}


def is_of_adapter(name: str) -> bool:
    """Returns whether ``name`` is a parameter of a low-rank adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def _adapter_parameters(shapes: ModelShapes, matrix: str, rows: int, columns: int) -> Iterator[Parameter]:
    rank = shapes.adapter_rank(matrix.rpartition(".")[2])
    if rank:
        yield Parameter(f"{matrix}.lora_A.weight", (rank, columns))
        yield Parameter(f"{matrix}.lora_B.weight", (rows, rank))


def _attention_parameters(shapes: ModelShapes, at: str, hidden: int) -> Iterator[Parameter]:
    if shapes.latent is None:
        yield from _projection_parameters(shapes, at, hidden)
    else:
        yield from _latent_parameters(shapes, shapes.latent, at, hidden)
    yield Parameter(f"{at}self_attn.o_proj.weight", (hidden, shapes.attended_size))
    if shapes.output_bias:
        yield Parameter(f"{at}self_attn.o_proj.bias", (hidden,))
    yield from _adapter_parameters(shapes, f"{at}self_attn.o_proj", hidden, shapes.attended_size)
    if shapes.attention_sinks:
        yield Parameter(f"{at}{SINKS}", (shapes.num_attention_heads,))
    for name, shape in zip("qk", shapes.qk_norm_shapes, strict=False):
        yield Parameter(f"{at}self_attn.{name}_norm.weight", shape)


def _projection_parameters(shapes: ModelShapes, at: str, hidden: int) -> Iterator[Parameter]:
    for name, rows in (("q_proj", shapes.query_rows), ("k_proj", shapes.key_value_size), ("v_proj", shapes.key_value_size)):
        yield Parameter(f"{at}self_attn.{name}.weight", (rows, hidden))
        if shapes.attention_bias:
            yield Parameter(f"{at}self_attn.{name}.bias", (rows,))
        yield from _adapter_parameters(shapes, f"{at}self_attn.{name}", rows, hidden)


def _linear_attention_parameters(shapes: ModelShapes, linear: LinearAttention, at: str, hidden: int) -> Iterator[Parameter]:
    for name, shape in linear.parameters(hidden):
        yield Parameter(f"{at}linear_attn.{name}", shape)
        if len(shape) == 2:
            yield from _adapter_parameters(shapes, f"{at}linear_attn.{name.removesuffix('.weight')}", *shape)


def _latent_parameters(shapes: ModelShapes, latent: LatentAttention, at: str, hidden: int) -> Iterator[Parameter]:
    for name, rows, columns, by_head in latent.matrices(hidden, shapes.num_attention_heads):
        yield Parameter(f"{at}self_attn.{name}.weight", (rows, columns))
        if shapes.attention_bias and not by_head:
            yield Parameter(f"{at}self_attn.{name}.bias", (rows,))
        yield from _adapter_parameters(shapes, f"{at}self_attn.{name}", rows, columns)
    for name, size in latent.norms:
        yield Parameter(f"{at}self_attn.{name}.weight", (size,))


def _expert_parameters(experts: ExpertShapes, at: str, hidden: int) -> Iterator[Parameter]:
    names, inner = experts.names, experts.intermediate_size
    yield Parameter(f"{at}{names.router}.weight", (experts.num_experts, hidden))
    if experts.biased:
        yield Parameter(f"{at}{names.router}.bias", (experts.num_experts,))
    if experts.sigmoid is not None:
        yield Parameter(f"{at}{CHOICE_BIAS}", (experts.num_experts,))
    for expert in range(experts.num_experts):
        for name, shape in ((names.gate, (inner, hidden)), (names.up, (inner, hidden)), (names.down, (hidden, inner))):
            yield Parameter(f"{at}{name.format(expert)}.weight", shape)
            if experts.biased:
                yield Parameter(f"{at}{name.format(expert)}.bias", shape[:1])
    shared = experts.shared_intermediate_size
    if shared:
        for name, shape in (("gate", (shared, hidden)), ("up", (shared, hidden)), ("down", (hidden, shared))):
            yield Parameter(f"{at}{names.shared}.{name}_proj.weight", shape)
    if experts.shared_gate:
        yield Parameter(f"{at}{SHARED_GATE}", (1, hidden))


def parameter_count(shapes: ModelShapes) -> int:
    """Returns the number of parameters; tied embeddings count once, and biases by which experts are chosen not, which have no gradient."""
    return sum(p.numel for p in parameters(shapes) if not p.name.endswith(CHOICE_BIAS))
