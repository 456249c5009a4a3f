"""Multi-head latent attention, as plain data. Imports no torch.

DeepSeek-AI (2024), "DeepSeek-V2", arXiv 2405.04434, section 2.1 and appendix C: keys and values of all heads are products with one compressed vector of a
token, which the cache holds in their place; a rotated part of the key is shared by all heads.

It is computed in the absorbed form (section 2.1.2 there): a head's queries are multiplied into the space of the compressed
vector, whose row is key and value at once, and what attention returns is multiplied out of it. So all heads share one key of ``cached_size`` numbers.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple


class AttentionMatrix(NamedTuple):
    """A matrix of a layer's attention: what it is called in the Hugging Face folder, its outputs and inputs; ``by_head``: outputs are those of heads, which
    tensor-parallel ranks divide."""

    name: str
    outputs: int
    inputs: int
    by_head: bool


NORM_EPS = 1e-6
"""Of the norms of the compressed vectors, whatever the ``rms_norm_eps`` of a model is: transformers and the models' own code leave it at its default."""
WITHIN_HEADS = "kv_b_proj"
"""The matrix that is multiplied head by head, on the side of the queries and of attention's output."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """``kv_lora_rank``, ``q_lora_rank``: numbers of the compressed vector of keys and values, and of queries (0: queries are not compressed).
    ``qk_nope_head_dim``, ``qk_rope_head_dim``: numbers of a head of queries and keys without and with rotation. ``v_head_dim``: of a head of values."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            least = 0 if each.name == "q_lora_rank" else 1
            if getattr(self, each.name) < least:
                raise ValueError(f"model {each.name} is {getattr(self, each.name)}; it must be at least {least}")

    @property
    def head_dim(self) -> int:
        """Numbers of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def norms(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of the norms of the compressed vectors."""
        of_queries = (("q_a_layernorm", self.q_lora_rank),) if self.q_lora_rank else ()
        return *of_queries, ("kv_a_layernorm", self.kv_lora_rank)

    @property
    def compressed_size(self) -> int:
        """Numbers of a token's compressed vectors that a forward pass computes: before and after their norms, and the rotated key."""
        return 2 * (self.q_lora_rank + self.kv_lora_rank) + self.qk_rope_head_dim

    @property
    def cached_size(self) -> int:
        """Numbers of a token and layer in the KV cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def absorbed_size(self) -> int:
        """Numbers that a head multiplies for a pair of a query and a key: with the row, and with the compressed vector that is its value."""
        return self.cached_size + self.kv_lora_rank

    def matrices(self, hidden: int, heads: int) -> tuple[AttentionMatrix, ...]:
        """Returns the matrices before the attention's output."""
        queries = heads * self.head_dim
        of_queries = (
            (AttentionMatrix("q_a_proj", self.q_lora_rank, hidden, False), AttentionMatrix("q_b_proj", queries, self.q_lora_rank, True))
            if self.q_lora_rank
            else (AttentionMatrix("q_proj", queries, hidden, True),)
        )
        return (
            *of_queries,
            AttentionMatrix("kv_a_proj_with_mqa", self.cached_size, hidden, False),
            AttentionMatrix("kv_b_proj", heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank, True),
        )
