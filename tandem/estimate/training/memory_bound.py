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
HALF_LOGITS = 18
"""Of eager PyTorch's cross-entropy in 16 bits: the product writes a logit, log-softmax reads and writes, its gradient is filled and written from two, and two
products read it."""
ROUTED = {"copies": 16, "once": 8}
"""For an element of a token on its way to an expert, by ``expert_dispatch``. Four kernels read and write it: tokens are sorted by the rank of their expert,
after the exchange by expert, after the experts by the rank that they came from, and added up by token (Megatron-Core, ``MoEAlltoAllTokenDispatcher``). Sent
once, it is spread to its experts after the exchange and added up before the way back (``_DeepepManager``)."""
ALIGNED = 8
"""For the same element in fp8 without a capacity: the groups of the experts are copied to whole tiles of rows, and back (Transformer Engine, ``Fp8Padding`` and
``Fp8Unpadding`` in Megatron-Core's ``TEGroupedMLP``)."""
QUANTISED = {"delayed": 4, "current": 6, "block": 4}
"""For an element of an operand of an fp8 product, by ``fp8_scaling``: read in 16 bits, written in 8 and transposed; scaled by its own largest value, it is read
for that before."""


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
