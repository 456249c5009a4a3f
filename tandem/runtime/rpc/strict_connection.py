"""h11 without what it accepts beyond RFC 9112. A request whose end a load balancer in front may see elsewhere could carry another one past it, unseen."""

import re

import h11

MOST_HEAD_BYTES = 2**16
"""Of a request's line and headers. h11 looks at the size only of what is not complete yet."""
_HEAD_END = re.compile(rb"\n\r?\n")
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\r\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""A line that ends with LF alone, a header that goes on in the next line (``obs-fold``), a control character."""
_VERSIONS = (b"1.0", b"1.1")


class StrictConnection(h11.Connection):
    """The server's side of a connection. ``next_event`` raises ``h11.RemoteProtocolError`` also for heads with both ``Content-Length`` and
    ``Transfer-Encoding`` (RFC 9112, 6.1), with lines that end with LF alone (2.2), folded headers (5.2), control characters (RFC 9110, 5.5), for versions other
    than HTTP/1.0 and 1.1, and for more than ``MOST_HEAD_BYTES``."""

    def next_event(self) -> "h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]":
        if self.their_state is h11.IDLE:
            data, _ = self.trailing_data
            end = _HEAD_END.search(data)
            size = end.end() if end else len(data)
            if size > MOST_HEAD_BYTES:
                raise h11.RemoteProtocolError("the head of the request is too large")
            if _AMBIGUOUS.search(data, 0, size):
                raise h11.RemoteProtocolError("the head of the request is ambiguous")
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if event.http_version not in _VERSIONS or {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("the head of the request is ambiguous")
        return event
