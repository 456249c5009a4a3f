"""What a layer with linear attention by the gated delta rule computes, moves and saves beside its matrices, for one token. Imports no torch.

A trainer of the literature computes it in chunks (Yang et al., 2024, arXiv 2412.06464, section 3.3), as flash-linear-attention does on GPUs, and so does
Tandem's own there, but for the deterministic forward pass of reinforcement learning, whose tokens follow each other and whose time is not predicted apart.
No published step of a model with such layers was compared.
"""

from tandem.estimate.training.memory_bound import GATED, Moved
from tandem.layout.linear_attention import CHUNK_TOKENS, LinearAttention

WIDE_BYTES = 4
"""Of decays and betas, which are computed in fp32."""
CONVOLUTION = (4, 6)
"""Bytes for a number of a convolution with its activation in one kernel, in 16 bits: it is read and written; backward also its gradient is read."""
BACKWARD = 2.5
"""Times the operations of the forward pass: those of its gradients, and states that are computed again."""


def chunked_flops(linear: LinearAttention) -> int:
    """Returns the operations of the forward pass for a token: three products with a state; within a chunk the products of keys with keys, of queries with
    keys, and of the triangles with keys, values and corrected values; and the inverse of a triangle."""
    keys, values, chunk = linear.key_head_dim, linear.value_head_dim, CHUNK_TOKENS
    return linear.num_value_heads * (6 * keys * values + 6 * chunk * keys + 4 * chunk * values + 2 * chunk * chunk // 3)


def moved_bytes(linear: LinearAttention) -> Moved:
    """Returns the bytes of the elementwise kernels: the convolution, and the norm of the output with its gate."""
    return Moved(*(CONVOLUTION[i] * linear.mixed_size + GATED[i] * linear.value_size for i in (0, 1)))


def saved_in_chunks(linear: LinearAttention, each: int) -> float:
    """Returns the bytes that a forward pass in chunks saves: inputs of the convolution; normalised queries and keys, values; of each value head a row of a
    triangle; gates, the output of the recurrence and that of its gated norm; decays and betas."""
    numbers = 2 * linear.mixed_size + 3 * linear.value_size + CHUNK_TOKENS * linear.num_value_heads
    return each * numbers + 2 * WIDE_BYTES * linear.num_value_heads


def saved_token_by_token(linear: LinearAttention, each: int) -> float:
    """Returns the bytes that Tandem's trainer saves. In at least fp32: each tap of the convolution and both inputs of its activation; queries and keys before
    and after their norms, and values; what betas and decays are computed by, and the squares of norms. Gate and output of the gated norm, its input, and the
    input of the last matrix."""
    wide = (linear.kernel_size + 2) * linear.mixed_size + 4 * linear.key_size + linear.value_size + 10 * linear.num_value_heads + 2 * linear.num_key_heads
    return max(each, WIDE_BYTES) * wide + each * 4 * linear.value_size


def scratch_in_chunks(linear: LinearAttention) -> float:
    """Returns the bytes that the backward pass in chunks on a GPU holds at once beside what is saved (``kernels.triton.gated_delta``), all of it in fp32. Of
    each value head: the states around a chunk and their gradients, and the inverse of its triangle; ``w``, the corrections and their gradients; the gradients
    of query, key, value, decay and beta."""
    keys, values = linear.key_head_dim, linear.value_head_dim
    of_chunk = 2 * keys * values / CHUNK_TOKENS + CHUNK_TOKENS
    return WIDE_BYTES * linear.num_value_heads * (of_chunk + (keys + 2 * values) + (2 * keys + values + 2))
