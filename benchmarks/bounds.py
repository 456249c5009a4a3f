"""The physical bound of a ratio: what it would be if our side did nothing but what no implementation can leave out.

Of time that is the matrix products of the layers and the head, at the rate of torch's matrix product measured in the same run; of memory the imports of one
process that computes, measured in the same run, and the numbers that training has to keep from step to step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.layout.flops import layer_parameters
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes

FORWARD_AND_BACKWARD = 3
"""Passes: a backward pass has two products for each of the forward pass."""
ADAMW_NUMBERS = 4
"""Of a parameter: itself, its gradient and two moments."""


def forward_flops(shapes: ModelShapes, tokens: float, states: float) -> float:
    """Operations of the products of a forward pass over ``tokens`` tokens, of which the outputs of ``states`` are needed: of the others the last layer has to
    compute keys and values alone."""
    assert shapes.latent is None and shapes.linear_attention is None, "counted for layers with keys and values of their own"
    last = shapes.num_hidden_layers - 1
    key_values = shapes.hidden_size * (shapes.key_value_size + shapes.value_size)
    of_all = sum(layer_parameters(shapes, layer) for layer in range(last)) + key_values
    return 2.0 * (of_all * tokens + (layer_parameters(shapes, last) - key_values + shapes.head_rows * shapes.hidden_size) * states)


def least_s(flops: float, rates: Sequence[Mapping[str, float]], kind: str) -> float:
    """Seconds of ``flops`` operations at the best of the rates that were measured in a run, by ``kind`` of seconds (``serve.matrix_rate``)."""
    return flops / max(rate[kind] for rate in rates)


def held_bytes(shapes: ModelShapes, imports_bytes: int, has_reference: bool) -> int:
    """Bytes that are there between two steps of training in fp32 whatever computes them, ``imports_bytes`` of them of the process."""
    return imports_bytes + 4 * (ADAMW_NUMBERS + has_reference) * parameter_count(shapes)


def with_bound(row: Mapping[str, Any]) -> str:
    """The two cells of a table: the bound of a ratio, and the share of it."""
    if row.get("bound") is None:
        return "none measured | "
    share = row["bound"] / row["ratio"] if row.get("at_most") else row["ratio"] / row["bound"]
    return f"{row['bound']:.2f} | {share:.0%}"
