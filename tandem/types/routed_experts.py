"""Which experts an engine sent the tokens of a sample to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """``data``: the ids of the experts as unsigned little-endian integers of ``item_bytes`` (1 or 2), [tokens, ``layers``, ``experts_per_token``]: of all
    tokens of prompt and completion but the last, which no engine computes, and of every layer of the model; those of a layer without experts mean nothing."""

    layers: int
    experts_per_token: int
    item_bytes: int
    data: bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of one token."""
        return self.layers * self.experts_per_token * self.item_bytes

    @property
    def tokens(self) -> int:
        return len(self.data) // self.token_bytes
