"""The sharding plan: how every parameter is cut, by patterns over its Hugging Face name. Imports no torch.

One table answers for tensor parallelism, conversion, checkpoint resharding, weight updates between different layouts and
the memory count. Nothing else in the house knows how a weight is cut.
"""

import re
from dataclasses import dataclass
from typing import Literal

Placement = Literal["replicated", "column", "row", "vocabulary", "expert"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters whose full name matches ``pattern`` have ``placement``; ``axis`` is the axis that is cut."""

    pattern: str
    placement: Placement
    axis: int | None


PLAN: tuple[Rule, ...] = (
    Rule(r"model\.embed_tokens\.weight|lm_head\.weight", "vocabulary", 0),
    Rule(r"model\.layers\.\d+\.self_attn\.[qkv]_proj\.(weight|bias)", "column", 0),
    Rule(r"model\.layers\.\d+\.self_attn\.o_proj\.weight", "row", 1),
    Rule(r"model\.layers\.\d+\.self_attn\.o_proj\.bias", "replicated", None),
    Rule(r"model\.layers\.\d+\.mlp\.(gate|up)_proj\.(weight|bias)", "column", 0),
    Rule(r"model\.layers\.\d+\.mlp\.down_proj\.weight", "row", 1),
    Rule(r"model\.layers\.\d+\.mlp\.down_proj\.bias", "replicated", None),
    Rule(r"model\.layers\.\d+\.(mlp|block_sparse_moe)\.gate\.weight", "replicated", None),
    Rule(r"model\.layers\.\d+\.(mlp\.experts\.\d+\.(gate|up)_proj|block_sparse_moe\.experts\.\d+\.w[13])\.weight", "column", 0),
    Rule(r"model\.layers\.\d+\.(mlp\.experts\.\d+\.down_proj|block_sparse_moe\.experts\.\d+\.w2)\.weight", "row", 1),
    Rule(r"model\.layers\.\d+\.(self_attn\.[qk]_norm|input_layernorm|post_attention_layernorm)\.weight", "replicated", None),
    Rule(r"model\.norm\.weight", "replicated", None),
)


def rule_for(name: str) -> Rule:
    """The one rule of parameter ``name``. Raises ``KeyError`` for a name that the plan does not know."""
    for rule in PLAN:
        if re.fullmatch(rule.pattern, name):
            return rule
    raise KeyError(f"the sharding plan has no rule for parameter '{name}'")


def stage_of(name: str, num_layers: int, stages: int) -> int:
    """The pipeline stage that holds ``name``: layers are dealt in contiguous runs, the embedding stands on the first
    stage, the final norm and the head on the last."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if match:
        return int(match[1]) * stages // num_layers
    return 0 if name.startswith("model.embed_tokens") else stages - 1


def shard_slices(name: str, shape: tuple[int, ...], rank: int, size: int) -> tuple[slice, ...]:
    """Which part of ``name`` (full ``shape``) tensor-parallel ``rank`` of ``size`` holds, one slice an axis.

    Rows are dealt evenly; a vocabulary that does not divide leaves the last rank the shorter part. Raises ``ValueError``
    where a column or row placement does not divide.
    """
    rule = rule_for(name)
    whole = tuple(slice(0, n) for n in shape)
    if rule.axis is None or size == 1:
        return whole
    length = shape[rule.axis]
    if rule.placement != "vocabulary" and length % size:
        raise ValueError(f"'{name}' has {length} on axis {rule.axis}, which does not divide by {size} tensor-parallel ranks")
    part = -(-length // size)
    start = min(rank * part, length)
    cut = slice(start, min(start + part, length))
    return tuple(cut if axis == rule.axis else s for axis, s in enumerate(whole))
