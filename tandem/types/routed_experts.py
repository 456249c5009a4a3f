"""Which experts an engine sent the tokens of a sample to."""

from dataclasses import dataclass, replace


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

    def first(self, tokens: int) -> "RoutedExperts":
        """Returns the routing of the first ``tokens`` tokens; zeros stand for those that no engine has computed yet."""
        size = tokens * self.token_bytes
        return replace(self, data=self.data[:size].ljust(size, b"\0"))

    def extended_by(self, longer: "RoutedExperts") -> "RoutedExperts":
        """Returns this routing, and after it that of the further tokens of ``longer``, whose sequence begins with the same tokens: an engine that computes a
        token again may send it elsewhere, and what was drawn after it was drawn with the first."""
        return replace(longer, data=self.data + longer.data[len(self.data) :])


def extended(known: RoutedExperts | None, longer: RoutedExperts | None) -> RoutedExperts | None:
    """Returns ``known.extended_by(longer)``, or the one that there is."""
    return longer if known is None else known if longer is None else known.extended_by(longer)
