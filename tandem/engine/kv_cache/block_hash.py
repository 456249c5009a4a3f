"""Hashes by which full blocks are found again.

The hash of a block is a digest of the hash before it and of the block's own tokens; the first one follows from
``(weight_version, adapter, salt)``. A hash therefore names everything that the block's content depends on: a block of other
weights can never match, and no flush is needed after an update.
"""

import hashlib
from array import array

from tandem.kernels.api import BLOCK_TOKENS
from tandem.types import WeightVersion

_DIGEST_BYTES = 16


def root_hash(version: WeightVersion, adapter: str = "", salt: str = "") -> bytes:
    """Returns the hash that the chain of a sequence starts from."""
    text = f"{version.incarnation}\0{version.step}\0{len(adapter)}\0{adapter}\0{salt}"
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hashes(root: bytes, tokens: list[int], known: list[bytes] | None = None) -> list[bytes]:
    """Returns the hashes of all full blocks of ``tokens``; ``known`` are the first of them."""
    hashes = list(known or ())
    last = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        content = array("q", tokens[end - BLOCK_TOKENS : end]).tobytes()
        last = hashlib.blake2b(last + content, digest_size=_DIGEST_BYTES).digest()
        hashes.append(last)
    return hashes
