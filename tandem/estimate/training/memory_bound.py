"""Bytes that the elementwise kernels of a training step move: norms, residuals, rotary embedding, activations, the loss. Imports no torch.

Each kernel reads its operands and writes its results once, in 16 bits. Fused, a norm is one kernel; without fusion it is the six of the formula in fp32
(cast, square, mean, scale, cast, weight).
"""

from typing import NamedTuple

FUSED_NORM, EAGER_NORM = (4, 8), (34, 52)
"""Bytes for an element of a norm, forward and backward."""
RESIDUAL = (6, 6)
"""Two summands are read, the sum written; backward the gradients of both branches are added."""
FUSED_ROTARY, EAGER_ROTARY = (4, 4), (20, 20)
"""For an element of queries and keys; eager in fp32."""
GATED, EAGER_GATED, PLAIN = (6, 10), (10, 16), (4, 6)
"""For an element of the inner dimension: a gated activation reads two and writes one (eager: two kernels); a plain one reads one."""
LOGITS = 58
"""For a logit: the product writes it, it is cast to fp32, its maximum taken and subtracted, exponentiated, summed, divided, its gradient subtracted,
scaled, cast, and read by two products (Megatron-LM's vocabulary-parallel cross-entropy)."""
FUSED_LOGITS = 20
"""The same in a kernel that makes the gradient where the logit was: 2 of the product, 4 read twice, 4 written, cast, 4 read by two products."""
ROUTED = 16
"""For an element of a token on its way to an expert: four kernels read and write it. Tokens are sorted by the rank of their expert, after the exchange by
expert, after the experts by the rank that they came from, and added up by token (Megatron-Core, ``MoEAlltoAllTokenDispatcher``)."""
QUANTISED = 4
"""For an element of an operand of an fp8 product: read in 16 bits, its largest value first, written in 8 and transposed."""


class Moved(NamedTuple):
    """Bytes forward and backward."""

    forward: float
    backward: float


def layer_bytes(
    tokens: float, shared_tokens: float, hidden: int, rotary: float, inner: float, gated: bool, fused: bool, norms: float = 2.0
) -> Moved:
    """Returns the bytes of a layer on a GPU: ``shared_tokens`` of ``hidden`` elements in two residuals and ``norms`` norms, ``rotary`` and ``inner`` elements
    of ``tokens``."""
    norm, turn = (FUSED_NORM, FUSED_ROTARY) if fused else (EAGER_NORM, EAGER_ROTARY)
    activation = PLAIN if not gated else GATED if fused else EAGER_GATED
    return Moved(
        *(
            (norms * norm[i] + 2 * RESIDUAL[i]) * shared_tokens * hidden + turn[i] * tokens * rotary + activation[i] * tokens * inner
            for i in (0, 1)
        )
    )
