"""HTTP/1.1 responses from bytes, strictly (RFC 9112): what two readers could take for different answers is none."""

import re

from tandem.gateway.headers import Headers

MOST_HEAD_BYTES = 2**16
"""Of a status line and headers, and of trailers."""
_MOST_LINE_BYTES = 4096
"""Of the line before a chunk: its size and extensions."""
_TEXT = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: " + _TEXT + rb")?\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:" + _TEXT + rb"\r\n)*)\r\n")
_HEADER = re.compile(rb"([^:\r\n]+):([^\r\n]*)\r\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;" + _TEXT + rb")?")
_TRAILERS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:" + _TEXT + rb"\r\n)*\r\n")
_NO_BODY = (204, 304)


class NotHttp(Exception):
    """The bytes are no response, or one that could be read in two ways."""


class ResponseParser:
    """Parses one response to a POST. ``status`` is 0 until its head is there. ``is_complete``: nothing more belongs to it. ``keeps_alive``: the connection
    can be used again, which it cannot if more has come than the response. Interim responses (1xx) are left out."""

    __slots__ = ("_chunk_left", "_data", "_left", "headers", "is_chunked", "is_complete", "keeps_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_complete = self.keeps_alive = self.is_chunked = False
        self._data = b""
        self._left: int | None = 0
        """Bytes of the body that are still to come, ``None``: all until the connection ends."""
        self._chunk_left = 0
        """Bytes of the chunk that are still to come, with the end of its line."""

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of a connection; returns those of the body. Raises ``NotHttp``."""
        if not self.status:
            data = self._head(self._data + data if self._data else data)
            if not self.status:
                return b""
        if self.is_chunked:
            return self._chunks(data)
        if self._left is None:
            return data
        if len(data) > self._left:
            data, self.keeps_alive = data[: self._left], False
        self._left -= len(data)
        self.is_complete = not self._left
        return data

    def end(self) -> bool:
        """Notes that the connection has ended; returns whether the response is complete."""
        if self.status and not self.is_chunked and self._left is None:
            self.is_complete = True
        self.keeps_alive = False
        return self.is_complete

    def _head(self, data: bytes) -> bytes:
        """Parses the head if ``data`` has all of it; returns the rest."""
        while (end := data.find(b"\r\n\r\n") + 4) >= 4:
            found = _HEAD.fullmatch(data, 0, end)
            if found is None or end > MOST_HEAD_BYTES:
                raise NotHttp("the head is not valid")
            status, data = int(found[2]), data[end:]
            if status == 101:
                raise NotHttp("it changes the protocol")
            if status >= 200:
                self._data = b""
                self._begin(status, [(name.lower(), value.strip(b" \t")) for name, value in _HEADER.findall(found[3])], is_old=found[1] == b"0")
                return data
        self._data = data
        if len(data) > MOST_HEAD_BYTES:
            raise NotHttp("the head is too long")
        return b""

    def _begin(self, status: int, headers: Headers, *, is_old: bool) -> None:
        length: int | None = None
        self.keeps_alive = not is_old
        for name, value in headers:
            if name == b"content-length":
                if not value.isdigit() or len(value) > 18 or (length is not None and length != int(value)):
                    raise NotHttp("Content-Length is not a number")
                length = int(value)
            elif name == b"transfer-encoding":
                if self.is_chunked or value.lower() != b"chunked" or is_old:
                    raise NotHttp("Transfer-Encoding is not 'chunked'")
                self.is_chunked = True
            elif name == b"connection":
                self.keeps_alive = self.keeps_alive and b"close" not in value.lower()
        if self.is_chunked and length is not None:
            raise NotHttp("it has both Content-Length and Transfer-Encoding")
        self.status, self.headers = status, headers
        if status in _NO_BODY:
            self.is_chunked, length = False, 0
        self._left = length
        if not self.is_chunked:
            self.is_complete = length == 0
            self.keeps_alive = self.keeps_alive and length is not None

    def _chunks(self, data: bytes) -> bytes:
        """Returns the contents of chunks."""
        if self._data:
            data, self._data = self._data + data, b""
        parts: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self._chunk_left > 2:
                part = data[at : at + self._chunk_left - 2]
                parts.append(part)
                at += len(part)
                self._chunk_left -= len(part)
            elif self._chunk_left:
                if size - at < 2:
                    break
                if data[at : at + 2] != b"\r\n":
                    raise NotHttp("a chunk is longer than its size")
                at, self._chunk_left = at + 2, 0
            elif self._left == 0:
                at = self._trailers(data, at)
                break
            else:
                end = data.find(b"\r\n", at, at + _MOST_LINE_BYTES)
                if end < 0:
                    if size - at > _MOST_LINE_BYTES:
                        raise NotHttp("the size of a chunk is too long")
                    break
                found = _CHUNK.fullmatch(data, at, end)
                if found is None:
                    raise NotHttp("the size of a chunk is not valid")
                length, at = int(found[1], 16), end + 2
                if length:
                    self._chunk_left = length + 2
                else:
                    self._left = 0
        self._data = data[at:]
        if self.is_complete and self._data:
            self.keeps_alive = False
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _trailers(self, data: bytes, at: int) -> int:
        """Reads what follows the last chunk, if all of it is there; returns where it ends."""
        line_end = data.find(b"\r\n" if data.startswith(b"\r\n", at) else b"\r\n\r\n", at)
        if line_end < 0:
            if len(data) - at > MOST_HEAD_BYTES:
                raise NotHttp("the trailers are too long")
            return at
        end = line_end + (2 if line_end == at else 4)
        if _TRAILERS.fullmatch(data, at, end) is None:
            raise NotHttp("the trailers are not valid")
        self.is_complete = True
        return end
