"""Collectives of another library that fail because a rank has ended."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tandem.trainer.parallel.ranks import Ranks
from tandem.types import CollectiveError


@contextmanager
def collectives_of(library: str, what: str, ranks: Ranks) -> Iterator[None]:
    """Is a context in which a collective of ``library`` that fails raises ``CollectiveError`` like those of ``Communicator``, so that the supervisor looks for
    the lost rank. ``what``: is done in it."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if isinstance(error, dist.DistError) or "gloo" in reason:
            raise CollectiveError(f"rank {ranks.mesh.rank} of {ranks.mesh.shape.world} ({library}): {what} failed: {reason}") from None
        raise
