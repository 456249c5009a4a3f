"""The weights of one bucket on a rank under ZeRO (``trainer.zero``): whole, or the rank's own part in memory or in a file."""

import torch
from torch import Tensor

from tandem.runtime.collectives.communicator import Pending
from tandem.trainer.offload.reserved_memory import PagePool, ReservedMemory
from tandem.trainer.offload.zero_part import PagedPart
from tandem.trainer.parallel.flat_buffer import FlatBuffer


class Shard:
    """The weights of one bucket: all of them in ``whole[length]``, this rank's part in ``own[part]``.

    ``is_sharded``: ``whole`` has memory only between ``gather`` and ``free``, and ``own`` is separate. ``paged``: stores this rank's part
    in a file; ``whole`` keeps its addresses then. ``is_filled``: the parameters have values; otherwise the code that fills them writes to
    this rank's part. ``pages``: the pool that provides the memory of ``whole`` for sharded weights on a CPU."""

    def __init__(
        self, bucket: FlatBuffer, is_sharded: bool, paged: PagedPart | None = None, is_filled: bool = True, pages: PagePool | None = None
    ) -> None:
        self.bucket, self.is_sharded, self.paged, self.is_whole = bucket, is_sharded, paged, True
        self._pages = pages if is_sharded and paged is None and bucket.like.is_cpu else None
        is_reserved = paged is not None or self._pages is not None
        self._reserved = ReservedMemory(bucket.length, bucket.like.dtype) if is_reserved else None
        self.whole = bucket.like.new_zeros(bucket.length) if self._reserved is None else self._reserved.tensor
        with torch.no_grad():
            for name, view in bucket.views(self.whole).items() if is_filled else ():
                view.copy_(bucket.parameters[name])
        # From here on the modules' parameters are views of the flat tensor.
        for name, view in bucket.views(self.whole).items():
            bucket.parameters[name].data = view
        self._bytes = self.whole.untyped_storage().nbytes()
        self._pending: Pending | None = None
        self._sent: Tensor | None = None
        self.own = self._part
        if paged is not None and is_filled:
            paged.put(self._part)
        elif is_sharded and paged is None:
            self.own = self._part.clone()
        if is_sharded:
            self.free()

    @property
    def _part(self) -> Tensor:
        return self.whole.view(self.bucket.ranks.size, -1)[self.bucket.ranks.rank]

    def start_read(self) -> None:
        """Starts to read this rank's part if it is not in memory."""
        if self.paged is not None and not self.is_whole and self._pending is None:
            self.paged.start()

    def start_gather(self) -> None:
        """Starts the all-gather if the weights are not whole."""
        if self.is_whole or self._pending is not None:
            return
        self._sent = self.own if self.paged is None else self.paged.take()
        self._allocate()
        self._pending = self.bucket.ranks.start_all_gather(self._sent, f"weights of {self.bucket.label}", out=self.whole)

    def gather(self) -> None:
        """Gathers every rank's part."""
        self.start_gather()
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._sent, self.is_whole = None, None, True

    def free(self) -> None:
        """Keeps only this rank's part if the weights are sharded."""
        if self.is_sharded and self.is_whole:
            if self._reserved is not None and self._pages is not None:
                self._pages.take(self._reserved)
            elif self._reserved is not None:
                self._reserved.release()
            else:
                self.whole.untyped_storage().resize_(0)
            self.is_whole = False

    def reserve(self) -> None:
        """Gives the parameters addresses without values, until ``free``."""
        if not self.is_whole:
            assert self._pending is None
            if self._reserved is None:
                self._allocate()
            self.is_whole = True

    def _allocate(self) -> None:
        """Allocates the memory of ``whole``."""
        if self._reserved is None:
            self.whole.untyped_storage().resize_(self._bytes)
        elif self._pages is not None:
            self._pages.fill(self._reserved)

    def take_own(self) -> None:
        """Copies this rank's part from ``whole``."""
        if self.paged is not None:
            self.paged.put(self._part)
        elif self.is_sharded:
            self.own.copy_(self._part)

    def publish(self) -> Pending | None:
        """After an update of ``own``: starts to gather the updated parts if the weights are not sharded."""
        if self.is_sharded:
            return None
        return self.bucket.ranks.start_all_gather(self.own.clone(), f"updated weights of {self.bucket.label}", out=self.whole)
