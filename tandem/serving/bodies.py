"""Receives the bodies of requests: within a time, a size, and a sum over all bodies that are not complete yet."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from starlette.types import Receive

from tandem.runtime.rpc.client_connections import client_of
from tandem.serving.errors import ApiError, overloaded

_FREE_BYTES = 2**14
"""What every body may hold uncounted, so that large uploads of one client do not keep its small requests out. Connections are bounded anyway."""


@dataclass
class UnfinishedBodies:
    """Bytes of bodies that were received and not yet parsed, in sum and by client. ``limit_bytes``, ``client_limit_bytes``: their bounds."""

    limit_bytes: int
    client_limit_bytes: int
    held_bytes: int = 0
    _by_client: Counter[str] = field(default_factory=Counter)

    def of(self, address: str) -> "Share":
        """Returns the share of one body of the client at ``address``, which it has until the end of the context."""
        return Share(self, client_of(address))

    def add(self, client: str, count: int) -> None:
        self.held_bytes += count
        self._by_client[client] += count
        if not self._by_client[client]:
            del self._by_client[client]

    def take(self, client: str, count: int) -> None:
        """Raises ``ApiError`` where ``count`` more bytes exceed a bound."""
        if self._by_client[client] + count > self.client_limit_bytes:
            raise overloaded(f"your unfinished requests have more than {self.client_limit_bytes} bytes; send fewer at once")
        if self.held_bytes + count > self.limit_bytes:
            raise overloaded(f"the unfinished requests of all clients have more than {self.limit_bytes} bytes; try again")
        self.add(client, count)


@dataclass
class Share:
    """What one body holds. ``size``: bytes received. ``held_bytes``: those that count in ``UnfinishedBodies``. ``is_complete``: nothing more comes."""

    bodies: UnfinishedBodies
    client: str
    size: int = 0
    held_bytes: int = 0
    is_complete: bool = False

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_: object) -> None:
        if self.held_bytes:
            self.bodies.add(self.client, -self.held_bytes)

    def take(self, count: int) -> None:
        """Counts ``count`` more bytes. Raises ``ApiError`` where they exceed a bound."""
        self.size += count
        more = max(0, self.size - _FREE_BYTES) - self.held_bytes
        if more:
            self.bodies.take(self.client, more)
            self.held_bytes += more


def too_large(limit_bytes: int) -> ApiError:
    """Returns the error for a body of more than ``limit_bytes``."""
    return ApiError(413, f"the request's body is larger than {limit_bytes} bytes", code="request_too_large")


async def read_body(receive: Receive, share: Share, limit_bytes: int, limit_s: float | None) -> bytes | None:
    """Returns a request's body, ``None`` if the client left. ``limit_s``: ``None`` for a body that is there.

    Raises:
        ApiError: it did not arrive within ``limit_s`` (408), is larger than ``limit_bytes`` (413), or there are too many unfinished bodies (429).
    """
    if limit_s is None:
        return await _received(receive, share, limit_bytes)
    try:
        async with asyncio.timeout(limit_s):
            return await _received(receive, share, limit_bytes)
    except TimeoutError:
        raise ApiError(408, f"the request's body did not arrive within {limit_s:g} s") from None


async def _received(receive: Receive, share: Share, limit_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        if share.size + len(part) > limit_bytes:
            parts.clear()
            raise too_large(limit_bytes)
        share.take(len(part))
        parts.append(part)
        share.is_complete = not message.get("more_body", False)
        if share.is_complete:
            return b"".join(parts)
