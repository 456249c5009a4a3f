"""Whether a text has far too many tokens, without encoding all of it."""

from collections.abc import Callable, Sequence

ENCODING_BYTES_PER_BYTE = 128
"""Memory that the tokenizer takes for each byte of a text, at least. Measured: 128 to 298 for BPE and single characters."""
CHARACTERS_PER_TOKEN = 16
"""Four times those of English in a vocabulary of 100,000. A text of fewer for each token of the limit is encoded as a whole."""
SURELY = 2
"""A beginning of the text with so many times the limit decides. Where a text is cut changes only its last tokens."""


def exceeds(encode: Callable[[str], Sequence[int]], text: str, limit: int) -> bool:
    """Returns whether ``text`` has more than ``limit`` tokens for certain, from its beginning."""
    size = CHARACTERS_PER_TOKEN * (limit + 256)
    while size < len(text):
        if len(encode(text[:size])) > SURELY * (limit + 8):
            return True
        size *= 4
    return False
