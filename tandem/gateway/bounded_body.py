"""Bodies of answers that the gateway itself reads."""

import aiohttp


async def read_bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Returns the body of ``response``. Raises ``ValueError`` if it has more than ``most_bytes``."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most_bytes:
            raise ValueError(f"{response.url.path} has more than {most_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
