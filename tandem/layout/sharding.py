"""The sharding plan: how every parameter is sharded, by patterns over its Hugging Face name. Imports no torch.

The same table is used for tensor parallelism, conversion, checkpoint resharding, weight updates between different layouts and memory
estimates. No other code knows how a weight is sharded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from tandem.layout.expert_shapes import ExpertNames
from tandem.layout.parameters import Parameter, parameters
from tandem.layout.shapes import ModelShapes

Placement = Literal["replicated", "column", "row", "vocabulary", "expert"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters whose full name matches ``pattern`` have ``placement``; ``axis`` is the sharded axis."""

    pattern: str
    placement: Placement
    axis: int | None


PLAN: tuple[Rule, ...] = (
    Rule(r"model\.embed_tokens\.weight|lm_head\.weight", "vocabulary", 0),
    Rule(r"model\.layers\.\d+\.self_attn\.[qkv]_proj\.(weight|bias)", "column", 0),
    Rule(r"model\.layers\.\d+\.self_attn\.o_proj\.weight", "row", 1),
    Rule(r"model\.layers\.\d+\.self_attn\.o_proj\.bias", "replicated", None),
    Rule(r"model\.layers\.\d+\.self_attn\.sinks", "column", 0),
    Rule(r"model\.layers\.\d+\.self_attn\.(q|kv)_b_proj\.weight", "column", 0),
    Rule(r"model\.layers\.\d+\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.(weight|bias)", "replicated", None),
    Rule(r"model\.layers\.\d+\.mlp\.shared_experts?\.(gate|up)_proj\.weight", "column", 0),
    Rule(r"model\.layers\.\d+\.mlp\.shared_experts?\.down_proj\.weight", "row", 1),
    Rule(r"model\.layers\.\d+\.mlp\.(shared_expert_gate\.weight|gate\.e_score_correction_bias)", "replicated", None),
    Rule(r"model\.layers\.\d+\.mlp\.(gate|up)_proj\.(weight|bias)", "column", 0),
    Rule(r"model\.layers\.\d+\.mlp\.down_proj\.weight", "row", 1),
    Rule(r"model\.layers\.\d+\.mlp\.down_proj\.bias", "replicated", None),
    Rule(r"model\.layers\.\d+\.self_attn\.([qk]_norm|(q|kv)_a_layernorm)\.weight", "replicated", None),
    Rule(r"model\.layers\.\d+\.(input|post_attention|pre_feedforward|post_feedforward)_?layernorm\.weight", "replicated", None),
    Rule(r"model\.layers\.\d+\.(self_attn\.([qkv]|q_b|kv_b)|mlp\.(gate|up))_proj\.lora_B\.weight", "column", 0),
    Rule(r"model\.layers\.\d+\.linear_attn\.in_proj_(qkvz|ba)\.lora_B\.weight", "column", 0),
    Rule(r"model\.layers\.\d+\.linear_attn\.out_proj\.lora_A\.weight", "row", 1),
    Rule(r"model\.layers\.\d+\.linear_attn\.(in_proj_(qkvz|ba)\.lora_A|out_proj\.lora_B)\.weight", "replicated", None),
    Rule(r"model\.layers\.\d+\.(self_attn\.o|mlp\.down)_proj\.lora_A\.weight", "row", 1),
    Rule(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj(_with_mqa)?\.lora_[AB]\.weight", "replicated", None),
    Rule(r"model\.layers\.\d+\.linear_attn\.(in_proj_(qkvz|ba)\.weight|dt_bias|A_log)", "column", 0),
    Rule(r"model\.layers\.\d+\.linear_attn\.out_proj\.weight", "row", 1),
    # The channels of a rank's heads are three runs of the convolution's rows, which are few: every rank has them all.
    Rule(r"model\.layers\.\d+\.linear_attn\.(conv1d|norm)\.weight", "replicated", None),
    Rule(r"model\.norm\.weight|score\.(weight|bias)", "replicated", None),
)


EXPERT_PLAN: tuple[tuple[str, Placement, int | None], ...] = (
    ("router", "replicated", None), ("gate", "column", 0), ("up", "column", 0), ("down", "row", 1)
)  # fmt: skip
"""Placement and axis of a mixture's matrices by the field of ``ExpertNames`` that has the family's name for them."""

_OF_OUTPUTS = tuple(f"{matrix}_proj.{kind}" for matrix in ("o", "out", "down") for kind in ("bias", "lora_B.weight"))
"""Parameters beside a ``row`` placement with an axis of its outputs."""
_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
"""Parameters of which each rank holds the rows of its heads, where heads have rows of their own."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@cache
def plan_with(names: ExpertNames) -> tuple[Rule, ...]:
    """Returns ``PLAN`` with the rules of a mixture whose matrices have ``names``."""
    patterns = {field: re.escape(name).replace(re.escape("{}"), r"\d+") for field, name in names._asdict().items()}
    experts = (Rule(rf"model\.layers\.\d+\.{patterns[field]}\.weight", placement, axis) for field, placement, axis in EXPERT_PLAN)
    biases = (
        Rule(rf"model\.layers\.\d+\.{patterns[field]}\.bias", *(("column", 0) if placement == "column" else ("replicated", None)))
        for field, placement, _ in EXPERT_PLAN
    )
    # Expert rules come first, because most names of a mixture are those of experts.
    return (*experts, *biases, *PLAN)


def rule_for(name: str, names: ExpertNames | None = None) -> Rule:
    """Returns the rule of parameter ``name``, in a model whose experts have ``names`` (``None``: no experts). Raises ``KeyError`` for an
    unknown name."""
    for rule in PLAN if names is None else plan_with(names):
        if re.fullmatch(rule.pattern, name):
            return rule
    raise KeyError(f"the sharding plan has no rule for parameter '{name}'")


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The shard of tensor-parallel ``rank`` of ``size``, with the experts of ``expert_rank`` of ``expert_size``: contiguous runs.

    ``deterministic``: a ``row`` placement is sharded by its output (axis 0, its bias too) instead of its sum: every product keeps its whole
    sum, and so the bits of a single rank, at the cost of one more gather of its input. The first matrix of an adapter is whole on every rank then.
    """

    rank: int = 0
    size: int = 1
    deterministic: bool = True
    expert_rank: int = 0
    expert_size: int = 1

    def check(self, shapes: ModelShapes) -> None:
        """Raises ``ValueError`` for a model that cannot be sharded this way."""
        size, where = self.size, f"{self.size} tensor-parallel ranks"
        if size < 1 or not 0 <= self.rank < size:
            raise ValueError(f"rank {self.rank} of {size} does not exist")
        if self.expert_size > 1 and (shapes.experts is None or shapes.experts.num_experts % self.expert_size):
            experts = "no experts" if shapes.experts is None else f"{shapes.experts.num_experts} experts"
            raise ValueError(f"the model has {experts}, which are not divisible by {self.expert_size} expert-parallel ranks")
        counts = {"num_attention_heads": shapes.num_attention_heads, "intermediate_size": shapes.intermediate_size}
        if self.deterministic:
            counts["hidden_size"] = shapes.hidden_size
        if shapes.experts is not None:
            counts["the experts' intermediate_size"] = shapes.experts.intermediate_size
            counts["the shared experts' intermediate_size"] = shapes.experts.shared_intermediate_size
        if size > 1 and shapes.qk_norm_all_heads:
            raise ValueError(f"this {shapes.architecture} model has norms of queries and keys over all heads")
        if shapes.linear_attention is not None:
            counts["linear attention's num_key_heads"] = shapes.linear_attention.num_key_heads
        for name, count in counts.items():
            if count % size:
                raise ValueError(f"the model's {name} {count} is not divisible by {where}")
        if shapes.num_key_value_heads % size and size % shapes.num_key_value_heads:
            raise ValueError(f"the model's num_key_value_heads {shapes.num_key_value_heads} is neither divisible by nor a divisor of {where}")
        if shapes.vocab_size <= vocabulary_part(shapes, self) * (size - 1):
            raise ValueError(f"the model's vocabulary of {shapes.vocab_size} is too small for {where}")


WHOLE = ShardSpec()


def vocabulary_part(shapes: ModelShapes, shard_spec: ShardSpec) -> int:
    """Returns the rows of the embedding on every rank but the last, which has the rest."""
    return -(-shapes.vocab_size // shard_spec.size)


def local_shapes(shapes: ModelShapes, shard_spec: ShardSpec) -> ModelShapes:
    """Returns ``shapes`` with the heads, inner sizes and vocabulary of one rank. Key-value heads are replicated if there are fewer heads
    than ranks. Raises ``ValueError`` for a model that cannot be sharded this way."""
    if shard_spec.size == 1 and shard_spec.expert_size == 1:
        return shapes
    shard_spec.check(shapes)
    part, experts = vocabulary_part(shapes, shard_spec), shapes.experts
    return replace(
        shapes,
        vocab_size=min(part, shapes.vocab_size - shard_spec.rank * part),
        num_attention_heads=shapes.num_attention_heads // shard_spec.size,
        num_key_value_heads=max(1, shapes.num_key_value_heads // shard_spec.size),
        intermediate_size=shapes.intermediate_size // shard_spec.size,
        linear_attention=shapes.linear_attention and shapes.linear_attention.of_one_rank(shard_spec.size),
        experts=experts and replace(
            experts, intermediate_size=experts.intermediate_size // shard_spec.size,
            shared_intermediate_size=experts.shared_intermediate_size // shard_spec.size,
        ),
    )


def shard_slices(shapes: ModelShapes, name: str, shape: tuple[int, ...], shard_spec: ShardSpec) -> tuple[slice, ...]:
    """Returns the part of parameter ``name`` (whole ``shape``) that a rank holds, one slice per axis. Raises ``KeyError`` for an unknown
    name."""
    if shapes.transformers is not None or shapes.own_parameters:
        assert shard_spec.size == 1, "a module of transformers and a draft head are never sharded"
        return tuple(slice(0, n) for n in shape)
    rule = rule_for(name, shapes.experts.names if shapes.experts is not None else None)
    axis = 0 if shapes.qk_norm_by_head and name.endswith(_HEAD_NORMS) else rule.axis
    if shard_spec.deterministic and name.endswith(".lora_A.weight"):
        axis = None
    elif shard_spec.deterministic and (rule.placement == "row" or name.endswith(_OF_OUTPUTS)):
        axis = 0
    if axis is None or shard_spec.size == 1:
        return tuple(slice(0, n) for n in shape)
    length = shape[axis]
    if rule.placement == "vocabulary":
        part = vocabulary_part(shapes, shard_spec)
        start = shard_spec.rank * part
    elif re.search(r"\.([kv]_proj|k_norm)\.", name):
        each = length // shapes.num_key_value_heads
        part = max(1, shapes.num_key_value_heads // shard_spec.size) * each
        start = shard_spec.rank * shapes.num_key_value_heads // shard_spec.size * each
    else:
        part = length // shard_spec.size
        start = shard_spec.rank * part
    return tuple(slice(start, min(start + part, length)) if i == axis else slice(0, n) for i, n in enumerate(shape))


def is_held(shapes: ModelShapes, name: str, shard_spec: ShardSpec) -> bool:
    """Returns whether the rank of ``shard_spec`` holds any of parameter ``name``: all parameters except the experts of other
    ranks."""
    expert = _EXPERT.search(name)
    if expert is None or shapes.experts is None:
        return True
    return int(expert[1]) * shard_spec.expert_size // shapes.experts.num_experts == shard_spec.expert_rank


def local_parameters(shapes: ModelShapes, shard_spec: ShardSpec) -> Iterator[Parameter]:
    """Yields ``layout.shapes.parameters`` with the shapes that a rank holds, without parameters that it does not hold."""
    for name, shape in parameters(shapes):
        if is_held(shapes, name, shard_spec):
            yield Parameter(name, tuple(s.stop - s.start for s in shard_slices(shapes, name, shape, shard_spec)))
