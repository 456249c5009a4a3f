"""Which rows of a flat batch the tokens of a sequence are, where equal beginnings of sequences are in the batch once."""

from collections.abc import Sequence
from itertools import chain


class PrefixTree:
    """The tokens of packed sequences as a tree, in which sequences share a node as long as they begin with the same tokens. Nodes are numbered in the order in
    which they are added: the rows of the flat batch. Its length is their number."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], int] = {}
        """Of (the row of the token before, -1 for none; the token)."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Adds a sequence; returns the rows, in order, of its first tokens that were in the tree already. Its others are the last rows."""
        rows, shared, before = self._rows, list[int](), -1
        for token in tokens:
            row = rows.get((before, token))
            if row is None:
                break
            shared.append(row)
            before = row
        added = range(len(rows), len(rows) + len(tokens) - len(shared))
        rows.update(zip(zip(chain((before,), added), tokens[len(shared) :], strict=False), added, strict=True))
        return shared
