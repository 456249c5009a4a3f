"""Where the gradient of each parameter is complete, and over which ranks it must be summed."""

import re
from typing import Literal, NamedTuple

from tandem.layout.mesh import GroupName
from tandem.model.decoder import Decoder

OverTensorRanks = Literal["cut", "partial", "whole"]


class Placement(NamedTuple):
    """``tensor``: the tensor-parallel ranks each hold a part of the parameter (``cut``), or all hold it and either the sum of
    their gradients is the gradient (``partial``) or each has it already (``whole``). ``replicas``: the group whose ranks hold the
    same numbers and see different tokens; gradients are summed over it."""

    tensor: OverTensorRanks
    replicas: GroupName


def placement(model: Decoder, name: str) -> Placement:
    """Of the parameter ``name`` of ``model.named_parameters()``."""
    # Of what stands in the residual stream.
    residual: OverTensorRanks = "partial" if model.parallel is not None and model.parallel.sequence else "whole"
    if re.search(r"\.experts\.(gate_up|down)_proj$", name):
        # Without expert parallelism the group has every rank of ``tokens``.
        return Placement("cut", "expert_data")
    if re.search(r"(embed_tokens|lm_head\.weight|(qkv|gate_up)_proj\.(weight|bias)|(o|down)_proj\.weight)$", name):
        return Placement("cut", "tokens")
    if re.search(r"(o|down)_proj\.bias$", name):
        return Placement("cut" if model.cut.deterministic else residual, "tokens")
    if re.search(r"([qk]_norm\.weight|experts\.router)$", name):
        # They see this rank's heads, or weigh this rank's part of what experts return.
        return Placement("partial", "tokens")
    assert re.search(r"(^|layer|attention_layer|\.)norm\.weight$", name), name
    return Placement(residual, "tokens")


def is_tied_copy(model: Decoder, name: str) -> bool:
    """Whether ``name`` is the copy that the last pipeline stage has of a tied embedding: no number of its own."""
    return name == "embed_tokens" and not model.spans[0].is_first
