"""Who may read the runs: on this machine every client at one of its own addresses, from elsewhere clients with the token."""

import hmac
import ipaddress
import json
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_LOCAL_NAMES = ("localhost", "ip6-localhost")


def is_loopback(host: str) -> bool:
    """Whether ``host``, an address or a name without port, is this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in _LOCAL_NAMES


def host_of_header(value: str) -> str:
    """Returns the host of a header ``Host`` without its port."""
    return value[: value.index("]") + 1] if value.startswith("[") and "]" in value else value.rpartition(":")[0] or value


@dataclass(frozen=True)
class Guard:
    """Lets GET and HEAD through. ``token``: what ``/api`` needs; empty on a loopback address, where the name in the request must be of this machine: a page of
    another host whose name was changed to 127.0.0.1 in the meantime (DNS rebinding) has its own."""

    app: ASGIApp
    token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        refused = self._refusal(scope["method"], scope["path"], headers)
        await (self.app if refused is None else refused)(scope, receive, send)

    def _refusal(self, method: str, path: str, headers: dict[bytes, str]) -> Response | None:
        if method not in ("GET", "HEAD"):
            return error_response(405, "the dashboard is read only", {"Allow": "GET, HEAD"})
        if not self.token:
            host = headers.get(b"host", "")
            if is_loopback(host_of_header(host)):
                return None
            return error_response(403, f"'{host[:200]}' is not a name of this machine; open the dashboard at 127.0.0.1")
        if not path.startswith("/api/"):
            return None
        kind, _, given = headers.get(b"authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1", "replace"), self.token.encode()):
            return None
        return error_response(401, "the dashboard needs its token; 'tandem dashboard' has printed it", {"WWW-Authenticate": "Bearer"})


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps({"error": {"message": message}})
    return Response(body, status, {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})}, media_type="application/json")
