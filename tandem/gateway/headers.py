"""Headers that a proxy passes on, and those that belong to one connection only."""

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip
"""RFC 9110, section 7.6.1."""
_OF_REQUEST = frozenset((b"host", b"content-length", b"expect"))
"""Written anew for the request to the backend."""


def first_values(headers: Headers) -> dict[bytes, bytes]:
    """Returns the first value of each header; names are in lower case, as ASGI servers give them."""
    return dict(reversed(headers))


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns ``headers``, with names in lower case, without those of the connection: the well-known ones and those that ``Connection`` names."""
    plain = [(name.lower(), value) for name, value in headers]
    left_out = _HOP_BY_HOP
    for name, value in plain:
        if name == b"connection":
            left_out = left_out.union(each.strip().lower() for each in value.split(b","))
    return [header for header in plain if header[0] not in left_out]


def to_backend(headers: Iterable[tuple[bytes, bytes]], *, authorization: str | None, client: str) -> Headers:
    """Returns the headers of the request to a backend. ``authorization``: replaces the client's, which is passed on if it is ``None`` and left out
    if it is empty. ``client``: the address that is added to ``X-Forwarded-For`` (empty: unknown)."""
    passed = [(name, value) for name, value in end_to_end(headers) if name not in _OF_REQUEST]
    if authorization is not None:
        passed = [(name, value) for name, value in passed if name not in (b"authorization", b"x-api-key")]
        if authorization:
            passed.append((b"authorization", authorization.encode()))
    if client:
        before = [value for name, value in passed if name == b"x-forwarded-for"]
        passed = [(name, value) for name, value in passed if name != b"x-forwarded-for"]
        # A load balancer in front has added it.
        last = before[-1].rpartition(b",")[2].strip() if before else b""
        passed.append((b"x-forwarded-for", b", ".join([*before, *([] if last == client.encode() else [client.encode()])])))
    return passed
