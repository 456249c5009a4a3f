"""The patient HTTP/1.1 by httptools, about three times as fast as h11. Importing it needs httptools."""

from array import array
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.runtime.rpc.patient_protocol import Patience
from tandem.runtime.rpc.strict_connection import MOST_HEAD_BYTES


class Parser(httptools.HttpRequestParser):  # type: ignore[misc]
    """A parser for a server that upgrades no connection. ``protocol``: ``FastProtocol``.

    llhttp takes what follows a head with ``Upgrade`` for another protocol. A server may ignore the header (RFC 9110, 7.8), and the clients that send it,
    as Java's does with every request (``h2c``), send an ordinary body after it: the head is parsed again without it."""

    def __init__(self, protocol: "FastProtocol") -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: "bytes | bytearray | memoryview[int] | array[int]") -> None:
        """Parses ``data``. Raises ``httptools.HttpParserError``."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.get_method() == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError("no tunnels") from None
            self.feed_data(self._protocol.head_without_upgrade() + data[upgrade.args[0] :])


class FastProtocol(Patience, HttpToolsProtocol):  # type: ignore[misc]
    """``PatientProtocol`` with the parser of Node.js."""

    next_has_begun = False
    _head_bytes = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.parser = Parser(self)

    def on_message_begin(self) -> None:
        self.next_has_begun, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begins a request. Raises ``ValueError``, which httptools reports as an error of the message, for a head that others may read in another way."""
        if self.parser.should_upgrade():
            return
        self.next_has_begun = False
        names = [name for name, _ in self.headers]
        encodings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        version = self.parser.get_http_version()
        # RFC 9112, 2.3, 3.2 and 6.1: versions with these rules, one host, and no body in an encoding that is not decoded.
        if version not in ("1.0", "1.1") or names.count(b"host") not in ((1,) if version == "1.1" else (0, 1)) or encodings not in ([], [b"chunked"]):
            raise ValueError("the head of the request is ambiguous")
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MOST_HEAD_BYTES:
            raise ValueError("the head of the request is too large")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def head_without_upgrade(self) -> bytes:
        """Returns the head that was parsed last, without ``Upgrade``."""
        lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        version = self.parser.get_http_version().encode()
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.next_has_begun:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")
