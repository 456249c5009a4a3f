"""Connections to backends, kept for the next request only while they are silent."""

from typing import Any

import aiohttp


class SilentConnector(aiohttp.TCPConnector):
    """Gives no request a connection on which its backend has said more than it was asked: the bytes that are there already would be taken for the answer
    to the next request, which may be another client's. aiohttp looks at that when a request ends, and not when the next one begins."""

    @property
    def busy(self) -> int:
        """Connections on which a request is being answered, or that are being made."""
        return len(self._acquired)

    @property
    def idle(self) -> int:
        """Connections that are kept for the next request."""
        return sum(map(len, self._conns.values()))

    async def _get(self, *given: Any, **options: Any) -> Any:
        """Returns a connection that was kept, ``None`` if there is none."""
        while (connection := await super()._get(*given, **options)) is not None:
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()
        return None
