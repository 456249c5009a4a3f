"""The weights of one bucket as a rank of ZeRO holds them (``trainer.zero``): whole, or its own part in memory or in a file."""

import torch
from torch import Tensor

from tandem.runtime.collectives.communicator import Pending
from tandem.trainer.offload.reserved_memory import PagePool, ReservedMemory
from tandem.trainer.offload.zero_part import PagedPart
from tandem.trainer.parallel.flat_buffer import FlatBuffer


class Shard:
    """The weights of one bucket: all of them in ``whole[length]``, and this rank's part in ``own[part]``. ``is_cut``: ``whole`` has memory
    only between ``gather`` and ``free``, and ``own`` has its own. ``paged``: where this rank's part lies instead, if it does; ``whole`` keeps its
    addresses then. ``is_filled``: the parameters have values; otherwise the code that fills them writes to this rank's part. ``pages``: where weights that are
    cut have the memory of ``whole`` from, on a CPU."""

    def __init__(
        self, bucket: FlatBuffer, is_cut: bool, paged: PagedPart | None = None, is_filled: bool = True, pages: PagePool | None = None
    ) -> None:
        self.bucket, self.is_cut, self.paged, self.is_whole = bucket, is_cut, paged, True
        self._pages = pages if is_cut and paged is None and bucket.like.is_cpu else None
        lasts = paged is not None or self._pages is not None
        self._lasting = ReservedMemory(bucket.length, bucket.like.dtype) if lasts else None
        self.whole = bucket.like.new_zeros(bucket.length) if self._lasting is None else self._lasting.tensor
        with torch.no_grad():
            for name, view in bucket.views(self.whole).items() if is_filled else ():
                view.copy_(bucket.parameters[name])
        # The modules' parameters are views from now on; what reads a layer finds whatever the flat tensor holds.
        for name, view in bucket.views(self.whole).items():
            bucket.parameters[name].data = view
        self._bytes = self.whole.untyped_storage().nbytes()
        self._pending: Pending | None = None
        self._sent: Tensor | None = None
        self.own = self._part
        if paged is not None and is_filled:
            paged.put(self._part)
        elif is_cut and paged is None:
            self.own = self._part.clone()
        if is_cut:
            self.free()

    @property
    def _part(self) -> Tensor:
        return self.whole.view(self.bucket.ranks.size, -1)[self.bucket.ranks.rank]

    def start_read(self) -> None:
        """Begin to have this rank's part in memory, where it is not."""
        if self.paged is not None and not self.is_whole and self._pending is None:
            self.paged.start()

    def start_gather(self) -> None:
        """Begin to bring every rank's part here, where it is not here."""
        if self.is_whole or self._pending is not None:
            return
        self._sent = self.own if self.paged is None else self.paged.take()
        self._come()
        self._pending = self.bucket.ranks.start_all_gather(self._sent, f"weights of {self.bucket.label}", out=self.whole)

    def gather(self) -> None:
        """Have every rank's part here."""
        self.start_gather()
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._sent, self.is_whole = None, None, True

    def free(self) -> None:
        """Hold this rank's part alone, where the weights are cut."""
        if self.is_cut and self.is_whole:
            if self._lasting is not None and self._pages is not None:
                self._pages.take(self._lasting)
            elif self._lasting is not None:
                self._lasting.release()
            else:
                self.whole.untyped_storage().resize_(0)
            self.is_whole = False

    def reserve(self) -> None:
        """The parameters have addresses, and no numbers, up to ``free``."""
        if not self.is_whole:
            assert self._pending is None
            if self._lasting is None:
                self._come()
            self.is_whole = True

    def _come(self) -> None:
        """Have memory."""
        if self._lasting is None:
            self.whole.untyped_storage().resize_(self._bytes)
        elif self._pages is not None:
            self._pages.fill(self._lasting)

    def take_own(self) -> None:
        """This rank's part is what ``whole`` has there now."""
        if self.paged is not None:
            self.paged.put(self._part)
        elif self.is_cut:
            self.own.copy_(self._part)

    def publish(self) -> Pending | None:
        """After an update of ``own``: begin to bring the others' to where all hold all."""
        if self.is_cut:
            return None
        return self.bucket.ranks.start_all_gather(self.own.clone(), f"updated weights of {self.bucket.label}", out=self.whole)
