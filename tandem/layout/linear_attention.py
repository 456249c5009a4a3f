"""Linear attention by the gated delta rule, as plain data. Imports no torch.

Yang et al. (2024), "Gated Delta Networks", arXiv 2412.06464: a head keeps a matrix in place of keys and values, which each token decays and corrects.
"""

from dataclasses import dataclass, fields, replace

from tandem.config.lora import LINEAR_ATTENTION_MODULES
from tandem.layout.latent_attention import AttentionMatrix

PROJECTIONS, OUTPUT = LINEAR_ATTENTION_MODULES[:-1], LINEAR_ATTENTION_MODULES[-1]
"""The matrices of a layer, and the last of them, which writes to the residual stream."""
GATES = PROJECTIONS[-1]
"""That of them that computes how much heads write and forget."""
CHUNK_TOKENS = 64
"""Tokens that are computed at once where the recurrence is computed in chunks (transformers, flash-linear-attention)."""
L2_EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """The layers of a decoder that have linear attention in place of softmax attention, ascending, and its sizes. ``num_value_heads`` is a multiple of
    ``num_key_heads``: each query and key serves that many heads. ``kernel_size``: tokens that the convolution of queries, keys and values reads, its own among
    them."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int

    def __post_init__(self) -> None:
        for each in fields(self)[1:]:
            if getattr(self, each.name) < 1:
                raise ValueError(f"model linear attention's {each.name} is {getattr(self, each.name)}; it must be at least 1")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"model linear attention's num_value_heads {self.num_value_heads} is not a multiple of its num_key_heads {self.num_key_heads}"
            )

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def mixed_size(self) -> int:
        """The numbers of a token's queries, keys and values, which the convolution reads."""
        return 2 * self.key_size + self.value_size

    @property
    def state_numbers(self) -> int:
        """The numbers that a layer keeps of a sequence, however long it is: the matrices of its heads, and the last inputs of the convolution."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim + (self.kernel_size - 1) * self.mixed_size

    @property
    def state_bytes(self) -> int:
        """The bytes that a layer keeps of a sequence, in fp32."""
        return 4 * self.state_numbers

    @property
    def token_flops(self) -> int:
        """The operations of the recurrence and the convolution of a token in a forward pass: a head's matrix is read for the key, corrected, and read for
        the query."""
        return 6 * self.num_value_heads * self.key_head_dim * self.value_head_dim + 2 * self.kernel_size * self.mixed_size

    def matrices(self, hidden: int) -> tuple[AttentionMatrix, ...]:
        """Returns the matrices of a layer in the order of the forward pass. Those before the output have their rows by key head, each with its value heads."""
        into = (self.mixed_size + self.value_size, 2 * self.num_value_heads)
        return (
            *(AttentionMatrix(name, rows, hidden, True) for name, rows in zip(PROJECTIONS, into, strict=True)),
            AttentionMatrix(OUTPUT, hidden, self.value_size, False),
        )

    def of_one_rank(self, ranks: int) -> "LinearAttention":
        """Returns the sizes on one of ``ranks`` tensor-parallel ranks, which divide the key heads, each with its value heads."""
        return replace(self, num_key_heads=self.num_key_heads // ranks, num_value_heads=self.num_value_heads // ranks)

    def channels(self, rank: int, ranks: int) -> tuple[slice, slice, slice]:
        """Returns the rows of the convolution of all heads that tensor-parallel ``rank`` of ``ranks`` computes with: of queries, of keys and of values."""
        keys, values = self.key_size // ranks, self.value_size // ranks
        starts = (rank * keys, self.key_size + rank * keys, 2 * self.key_size + rank * values)
        return tuple(slice(start, start + size) for start, size in zip(starts, (keys, keys, values), strict=True))  # type: ignore[return-value]

    def parameters(self, hidden: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Returns names in the Hugging Face folder, after ``model.layers.N.linear_attn.``, and shapes of all parameters of a layer."""
        vectors = (("dt_bias", (self.num_value_heads,)), ("A_log", (self.num_value_heads,)), ("conv1d.weight", (self.mixed_size, 1, self.kernel_size)))
        matrices = tuple((f"{name}.weight", (rows, columns)) for name, rows, columns, _ in self.matrices(hidden))
        return (*vectors, *matrices, ("norm.weight", (self.value_head_dim,)))
