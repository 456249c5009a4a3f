"""The shared memory of blocks that are on their way, which is bounded."""

import contextlib
from collections.abc import Iterator

from tandem.types import RunError
from tandem.weight_transfer.shared_memory import Segment


class TransferMemory:
    """Segments of at most ``limit_bytes`` together. ``held_bytes``: of those that are there now. Used in one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held_bytes, self.segments = limit_bytes, 0, 0

    def create(self, size_bytes: int) -> Segment:
        """Returns a new segment, which ``close`` gives back. Raises ``RunError`` if there is no room for it."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise RunError(
                f"{size_bytes} bytes of KV blocks find no room beside {self.held_bytes} of {self.limit_bytes}; raise --kv-transfer-memory if this happens often"
            )
        segment = Segment.create("serve", "kv", size_bytes, in_huge_pages=False)
        self.held_bytes += segment.size_bytes
        self.segments += 1
        return segment

    def close(self, segment: Segment) -> None:
        """Frees a segment."""
        self.held_bytes -= segment.size_bytes
        self.segments -= 1
        segment.close()

    @contextlib.contextmanager
    def segment(self, size_bytes: int) -> Iterator[Segment]:
        """A segment that is freed at the end."""
        segment = self.create(size_bytes)
        try:
            yield segment
        finally:
            self.close(segment)
