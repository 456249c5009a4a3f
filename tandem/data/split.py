"""Splits instances into training and held-out sets, decided by the instance itself.

The split of an instance is a hash of its text, so that training, evaluation and the final accuracy are disjoint for any seed.
"""

import hashlib
from typing import Literal

Split = Literal["train", "held_out", "final"]
Side = Literal["all", "train", "held_out"]


def split_position(text: str) -> float:
    """Returns the position of ``text`` in [0, 1): uniform over texts and the same in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"tandem-split").digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def split_of(text: str, held_out_share: float) -> Split:
    """Returns the split of ``text``: ``held_out_share`` of all texts for the evaluations of a run, and as many for its final accuracy."""
    position = split_position(text)
    if position < held_out_share:
        return "held_out"
    return "final" if position < 2 * held_out_share else "train"


def is_of_side(text: str, side: Side, held_out_share: float) -> bool:
    """Returns whether a document belongs to ``side``: ``held_out_share`` of all texts are held out, the others are trained on."""
    return side == "all" or (split_position(text) < held_out_share) == (side == "held_out")
