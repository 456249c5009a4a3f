"""Which backend holds which answer of ``/v1/responses``: answers are kept by the server that gave them, and by no other."""

import asyncio
import re
from collections import OrderedDict
from contextlib import AbstractAsyncContextManager
from urllib.parse import quote

import aiohttp
from starlette.responses import Response
from yarl import URL

from tandem.gateway.backend import Backend
from tandem.gateway.bounded_body import read_bounded
from tandem.gateway.headers import Headers, to_backend
from tandem.gateway.pool import Pool
from tandem.gateway.upstream import Upstream
from tandem.serving.errors import ApiError

PATH = "/v1/responses"
_ID = re.compile(rb'"id"\s*:\s*"(resp[\w-]{1,128})"')
_MOST = 50_000
_MOST_BYTES = 2**26
_LOOK_S = 5.0
_ANSWER_S = 30.0


class StoredResponses:
    """Remembers a bounded number of ids, the oldest of which are forgotten. Of an id that another gateway gave, all backends are asked."""

    def __init__(self, pool: Pool, upstream: Upstream, session: aiohttp.ClientSession) -> None:
        self._pool, self._upstream, self._session = pool, upstream, session
        self._held: OrderedDict[str, tuple[str, str, int]] = OrderedDict()
        """Of each id the tenant, and the backend with how often that was away."""

    def note(self, tenant: str, beginning: bytes, backend: Backend) -> None:
        """Notes where the answer with this ``beginning`` is kept."""
        found = _ID.search(beginning)
        if found is None:
            return
        self._held[found.group(1).decode()] = tenant, backend.name, backend.restarts
        if len(self._held) > _MOST:
            self._held.popitem(last=False)

    async def home(self, id: str, tenant: str, headers: Headers, client: str) -> Backend | None:
        """Returns the backend that holds the answer ``id``, ``None`` if none does. Raises ``ApiError`` if it is another tenant's."""
        owner, name, restarts = self._held.get(id, (tenant, "", 0))
        if owner != tenant:
            raise _not_held(id)
        backend = next((each for each in self._pool.backends if each.name == name and each.restarts == restarts), None)
        if backend is not None:
            return backend
        able = [each for each in self._pool.backends if each.is_ready]
        statuses = await asyncio.gather(*(self._status(each, id, headers, client) for each in able))
        backend = next((each for each, status in zip(able, statuses, strict=True) if status == 200), None)
        if backend is not None:
            self._held[id] = tenant, backend.name, backend.restarts
        return backend

    async def answer(self, method: str, id: str, tenant: str, headers: Headers, client: str) -> Response:
        """Answers GET or DELETE of the answer ``id``. Raises ``ApiError`` if no backend holds it."""
        backend = await self.home(id, tenant, headers, client)
        if backend is None:
            raise _not_held(id)
        try:
            async with asyncio.timeout(_ANSWER_S), self._ask(method, backend, id, headers, client) as response:
                body = await read_bounded(response, _MOST_BYTES)
                if method == "DELETE" and response.status == 200:
                    self._held.pop(id, None)
                return Response(body, response.status, media_type=response.content_type)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            raise ApiError(502, "the backend that holds the response does not answer", kind="backend_error", code="backend_failed") from None

    async def _status(self, backend: Backend, id: str, headers: Headers, client: str) -> int:
        try:
            async with asyncio.timeout(_LOOK_S), self._ask("GET", backend, id, headers, client) as response:
                return response.status
        except (TimeoutError, aiohttp.ClientError, OSError):
            return 0

    def _ask(self, method: str, backend: Backend, id: str, headers: Headers, client: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        url = URL(f"{backend.config.url.rstrip('/')}{PATH}/{quote(id, safe='')}", encoded=True)
        passed = to_backend(headers, authorization=self._upstream.authorization(backend), client=client)
        plain = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in passed]
        return self._session.request(method, url, headers=plain, allow_redirects=False, ssl=backend.tls)


def _not_held(id: str) -> ApiError:
    message = f"the response {id[:100]!r} is not held by any backend: it was not stored, is among the oldest, or its server was started again"
    return ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
