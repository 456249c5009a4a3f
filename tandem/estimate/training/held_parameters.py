"""How many parameters a GPU holds, from the sharding plan that divides the real weights. Imports no torch."""

import functools
from dataclasses import dataclass, replace

from tandem.layout.pipeline_stages import Span
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec, local_parameters


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters of one tensor- and expert-parallel rank: ``dense`` are the same on every rank of the data and context axes, ``expert`` on those of them that
    have the same experts."""

    dense: int
    expert: int

    def __add__(self, other: "Held") -> "Held":
        return Held(self.dense + other.dense, self.expert + other.expert)

    def __mul__(self, times: int) -> "Held":
        return Held(self.dense * times, self.expert * times)

    @property
    def total(self) -> int:
        return self.dense + self.expert


NOTHING = Held(0, 0)


@dataclass(frozen=True, slots=True)
class HeldByPart:
    """The parameters of the parts of a model: a layer with a plain MLP, one with experts, the embedding, and what follows the last layer. ``linear_attention``:
    how many more a layer has with linear attention than with softmax attention."""

    plain_layer: Held
    expert_layer: Held
    embedding: Held
    head: Held
    linear_attention: Held = NOTHING


@functools.cache
def held_by_part(shapes: ModelShapes, tensor: int, expert: int) -> HeldByPart:
    """Returns the parameters on the first of ``tensor`` x ``expert`` ranks, which has the most. All layers of a kind have the same, so that one of each is
    counted. Raises ``ValueError`` for a model that cannot be divided this way."""
    spec = ShardSpec(size=tensor, deterministic=False, expert_size=expert)
    spec.check(shapes)
    plain = _one_layer(shapes, spec, has_experts=False)
    with_experts = _one_layer(shapes, spec, has_experts=True) if shapes.experts is not None else (NOTHING, NOTHING, NOTHING)
    return HeldByPart(plain[1], with_experts[1], plain[0], plain[2], _more_by_linear_attention(shapes, replace(spec, expert_size=1)))


def _more_by_linear_attention(shapes: ModelShapes, spec: ShardSpec) -> Held:
    linear = shapes.linear_attention
    if linear is None:
        return NOTHING
    two = replace(shapes, num_hidden_layers=2, layer_windows=(), unrotated_layers=(), linear_attention=replace(linear, layers=(0,)), experts=None)
    of = {".linear_attn.": 0, ".self_attn.": 0}
    for parameter in local_parameters(two, spec):
        for kind in of:
            of[kind] += parameter.numel if kind in parameter.name else 0
    return Held(of[".linear_attn."] - of[".self_attn."], 0)


def _one_layer(shapes: ModelShapes, spec: ShardSpec, *, has_experts: bool) -> tuple[Held, Held, Held]:
    """Returns the parameters before, in and after the layer of a model of one layer."""
    experts = replace(shapes.experts, dense_layers=()) if has_experts and shapes.experts is not None else None
    one = replace(shapes, num_hidden_layers=1, layer_windows=(), unrotated_layers=(), experts=experts, linear_attention=None)
    if experts is None:
        spec = replace(spec, expert_size=1)
    parts = [[0, 0], [0, 0], [0, 0]]
    for parameter in local_parameters(one, spec):
        name = parameter.name
        part = 1 if name.startswith("model.layers.") else 0 if name.startswith("model.embed_tokens") else 2
        parts[part][".experts." in name] += parameter.numel
    before, inside, after = (Held(dense, expert) for dense, expert in parts)
    return before, inside, after


def held_on_span(shapes: ModelShapes, span: Span, tensor: int, expert: int, *, whole_embedding: bool = False) -> Held:
    """Returns the parameters of the layers of ``span``, and of the embedding and the heads at the ends of the model. ``whole_embedding``: each tensor-parallel
    rank has all of it."""
    parts = held_by_part(shapes, tensor, expert)
    if whole_embedding:
        parts = replace(parts, embedding=held_by_part(shapes, 1, expert).embedding)
    held = NOTHING
    for layer in range(span.start, span.stop):
        held += parts.plain_layer if shapes.experts_of(layer) is None else parts.expert_layer
        held += NOTHING if shapes.linear_attention_of(layer) is None else parts.linear_attention
    # The last stage of several has a copy of a tied embedding.
    if span.is_first or (span.is_last and shapes.tie_word_embeddings):
        held += parts.embedding
    return held + parts.head if span.is_last else held
