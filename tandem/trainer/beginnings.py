"""What packed sequences begin with in common, for layers that compute it once (``kernels.trained_layers``)."""

from collections.abc import Iterable, Sequence

import torch

from tandem.kernels.trained_layers import Beginnings
from tandem.layout.equal_beginnings import MOST_DISTINCT
from tandem.model.decoder import Decoder
from tandem.trainer.prefix_tree import PrefixTree


def computes_beginnings_once(model: object) -> bool:
    """Returns whether training of ``model`` computes equal beginnings once."""
    # What derives from it computes something else.
    return type(model) is Decoder and model.computes_beginnings_once


def beginnings_of(sequences: Iterable[Sequence[int]]) -> Beginnings | None:
    """Returns the beginnings of ``sequences`` of token ids, on the CPU; ``None`` if they have little in common."""
    tree, rows, first, bounds, query_start = PrefixTree(), list[int](), list[int](), [0], [0]
    for tokens in sequences:
        shared, start = tree.add(tokens), query_start[-1]
        first += range(len(rows) + len(shared), len(rows) + len(tokens))
        rows += shared
        rows += range(start, len(tree))
        bounds.append(len(rows))
        query_start.append(len(tree))
    if len(tree) > MOST_DISTINCT * len(rows):
        return None
    return Beginnings(torch.tensor(rows), torch.tensor(first), torch.tensor(bounds, dtype=torch.int32), torch.tensor(query_start, dtype=torch.int32))
