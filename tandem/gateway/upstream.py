"""What a backend is sent: address, headers and body."""

import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import aiohttp
from yarl import URL

from tandem.gateway.backend import Backend
from tandem.gateway.headers import to_backend
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.resume import REPEATABLE_PATHS, can_resume, seed_of, seeded


class Upstream:
    """Sends requests to backends. ``passes_keys``: a backend without a key of its own is sent the client's."""

    def __init__(self, session: aiohttp.ClientSession, backends: Sequence[Backend], *, passes_keys: bool) -> None:
        self._session, self._backends, self.passes_keys = session, backends, passes_keys

    def post(self, backend: Backend, request: InferenceRequest, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Sends ``request`` to ``backend``. ``body``: sent instead of the client's bytes where the backend is Tandem's server."""
        query = f"?{request.query.decode('latin-1')}" if request.query else ""
        url = URL(f"{backend.config.url.rstrip('/')}{request.path}{query}", encoded=True)
        content = body if backend.is_tandem else request.body
        return self._session.post(url, data=content, headers=self._headers(backend, request), allow_redirects=False, ssl=backend.tls)

    def repeatable_body(self, request: InferenceRequest) -> bytes:
        """Returns the body of a request with a seed, if its answer may have to be repeated at another of Tandem's servers, else its body."""
        is_repeated = bool(request.idempotency_key) and request.path in REPEATABLE_PATHS
        if not (can_resume(request) or is_repeated) or request.has_seed or not any(backend.is_tandem for backend in self._backends):
            return request.body
        return seeded(request.body, seed_of(request.idempotency_key) if request.idempotency_key else random.getrandbits(62))

    def _headers(self, backend: Backend, request: InferenceRequest) -> list[tuple[str, str]]:
        authorization = f"Bearer {backend.api_key}" if backend.api_key else None if self.passes_keys else ""
        headers = to_backend(request.headers, authorization=authorization, client=request.client)
        plain = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name != b"x-request-id"]
        return [*plain, ("x-request-id", request.id)]
