"""How tensor parallelism places each parameter's gradient, and the group that it is summed over."""

import re
from typing import Literal, NamedTuple

from tandem.layout.mesh import GroupName
from tandem.model.decoder import Decoder
from tandem.model.trained_adapter import is_adapter_parameter

OverTensorRanks = Literal["shard", "partial", "replicate"]


class Placement(NamedTuple):
    """``tensor``: each tensor-parallel rank holds a shard of the parameter (``shard``), or all hold it whole and either the gradient is the
    sum of theirs (``partial``) or each already has it (``replicate``). ``replicas``: the group whose ranks hold the same elements and see
    different tokens; gradients are summed over it."""

    tensor: OverTensorRanks
    replicas: GroupName


def placement(model: Decoder, name: str) -> Placement:
    """Returns the placement of the parameter ``name`` of ``model.named_parameters()``."""
    if model.shapes.transformers is not None or model.shapes.own_parameters:
        return Placement("replicate", "tokens")
    # For parameters applied to the residual stream.
    residual: OverTensorRanks = "partial" if model.parallel is not None and model.parallel.sequence else "replicate"
    if name.endswith(".experts.down_bias") and not model.shard_spec.deterministic:
        # One rank adds it to the sum of partial products.
        return Placement("partial", "expert_data")
    if re.search(r"\.experts\.(gate_up|down)_(proj|bias)$", name):
        # Without expert parallelism this group has the same ranks as ``tokens``.
        return Placement("shard", "expert_data")
    if re.search(r"(embed_tokens|lm_head\.weight|(qkv|gate_up)_proj\.(weight|bias)|(o|down|latent\.(q|q_b|kv_b))_proj\.weight)$", name):
        return Placement("shard", "tokens")
    if name.endswith(".sinks"):
        return Placement("shard", "tokens")
    if re.search(r"(o|down)_proj\.bias$", name):
        return Placement("shard" if model.shard_spec.deterministic else residual, "tokens")
    if re.search(r"([qk]_norm\.weight|experts\.(router|router_bias|shared_gate|choice_bias))$", name):
        # These are applied to this rank's heads, or weigh this rank's part of the experts' outputs.
        is_own = model.shapes.qk_norm_by_head and name.endswith("_norm.weight")
        return Placement("shard" if is_own else "partial", "tokens")
    if re.search(r"\.latent\.(q_a_proj|kv_a_proj_with_mqa)\.|\.latent\.(q|kv)_a_norm$", name):
        # Every rank computes the compressed vectors of its part of the residual stream.
        return Placement(residual, "tokens")
    if is_adapter_parameter(name):
        # The second matrix is sharded as the rows of the weight are, and the first as its columns.
        by_rows = r"((qkv|gate_up|latent\.(q|q_b|kv_b))_proj|linear_attention\.in_proj_\w+)\."
        is_by_rows = model.shard_spec.deterministic or re.search(by_rows, name) is not None
        return Placement("shard" if name.endswith(".lora_B") == is_by_rows else "partial", "tokens")
    if ".linear_attention." in name:
        # Every rank computes its own heads, for which it reads some rows of the convolution; all heads have one norm.
        return Placement("partial" if name.endswith((".convolution", ".norm")) else "shard", "tokens")
    assert re.search(r"((^|layer|attention_layer|\.)norm\.weight|^score\.(weight|bias))$", name), name
    return Placement(residual, "tokens")


def is_tied_copy(model: Decoder, name: str) -> bool:
    """Returns whether ``name`` is the last pipeline stage's copy of a tied embedding, which has no elements of its own."""
    return name == "embed_tokens" and not model.spans[0].is_first
