"""Requests whose end two servers could see at different places, and a backend that records what reaches it.

The families are those of RFC 9112, section 11.2, and of Linhart et al., "HTTP Request Smuggling" (2005); Kettle, "HTTP Desync Attacks" (2019).
"""

import contextlib
import re
import socket
import threading
from dataclasses import dataclass, field

BODY = b'{"model":"m","prompt":"x"}'
HIDDEN_BODY = b'{"model":"m","prompt":"hidden"}'
LINE = b"POST /v1/completions HTTP/1.1\r\n"
HOST = b"Host: a\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
HIDDEN = LINE + HOST + b"Content-Length: %d\r\n\r\n" % len(HIDDEN_BODY) + HIDDEN_BODY
"""A request behind the end of the first, where that is seen in time."""
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
_SIZE = b"%x" % len(BODY)


def _of_length(header: bytes) -> bytes:
    return LINE + HOST + header + b"\r\n" + BODY + HIDDEN


def _in_chunks(header: bytes) -> bytes:
    return LINE + HOST + header + b"\r\n" + CHUNKS + HIDDEN


def _first_size(size: bytes, end: bytes = b"\r\n") -> bytes:
    return LINE + HOST + CHUNKED + b"\r\n" + size + end + BODY + b"\r\n0\r\n\r\n" + HIDDEN


REFUSED: dict[str, bytes] = {
    "CL.TE": _in_chunks(b"Content-Length: 5\r\n" + CHUNKED),
    "TE.CL": _in_chunks(CHUNKED + b"Content-Length: 4\r\n"),
    "CL and TE with space": _of_length(b"Transfer-Encoding : chunked\r\n" + LENGTH),
    "CL and TE identity": _of_length(b"Transfer-Encoding: identity\r\n" + LENGTH),
    "CL and empty TE": _of_length(b"Transfer-Encoding:\r\n" + LENGTH),
    "CL and TE without colon": _of_length(b"Transfer-Encoding chunked\r\n" + LENGTH),
    "TE in a folded line": _in_chunks(b"Transfer-Encoding:\r\n chunked\r\n"),
    "TE behind a folded header": _of_length(b"X-A: b\r\n Transfer-Encoding: chunked\r\n" + LENGTH),
    "TE in the first line, folded": LINE + b" Transfer-Encoding: chunked\r\n" + HOST + LENGTH + b"\r\n" + BODY + HIDDEN,
    "TE behind LF": _of_length(b"X-A: b\nTransfer-Encoding: chunked\r\n" + LENGTH),
    "TE behind CR": _of_length(b"X-A: b\rTransfer-Encoding: chunked\r\n" + LENGTH),
    "TE unknown": _in_chunks(b"Transfer-Encoding: xchunked\r\n"),
    "TE with parameter": _in_chunks(b"Transfer-Encoding: chunked;a=b\r\n"),
    "TE in quotes": _in_chunks(b'Transfer-Encoding: "chunked"\r\n'),
    "TE with vertical tab": _in_chunks(b"Transfer-Encoding: \x0bchunked\r\n"),
    "TE with NUL": _in_chunks(b"Transfer-Encoding: chun\0ked\r\n"),
    "TE with two CR": _in_chunks(b"Transfer-Encoding: chunked\r\r\n"),
    "TE chunked, identity": _in_chunks(b"Transfer-Encoding: chunked, identity\r\n"),
    "TE identity, chunked": _in_chunks(b"Transfer-Encoding: identity, chunked\r\n"),
    "TE gzip, chunked": _in_chunks(b"Transfer-Encoding: gzip, chunked\r\n"),
    "TE twice": _in_chunks(CHUNKED + CHUNKED),
    "TE identity and chunked": _in_chunks(b"Transfer-Encoding: identity\r\n" + CHUNKED),
    "two CL": _of_length(LENGTH + b"Content-Length: 3\r\n"),
    "CL list": _of_length(b"Content-Length: 26, 3\r\n"),
    "CL with sign": _of_length(b"Content-Length: +26\r\n"),
    "CL negative": _of_length(b"Content-Length: -1\r\n"),
    "CL hexadecimal": _of_length(b"Content-Length: 0x1a\r\n"),
    "CL with underscore": _of_length(b"Content-Length: 2_6\r\n"),
    "CL with space": _of_length(b"Content-Length: 2 6\r\n"),
    "CL empty": _of_length(b"Content-Length:\r\n"),
    "CL in Arabic digits": _of_length("Content-Length: ٢٦\r\n".encode()),
    "CL with vertical tab": _of_length(b"Content-Length: \x0b26\r\n"),
    "CL folded": _of_length(b"Content-Length: 2\r\n 6\r\n"),
    "CL in a folded line": _of_length(b"Content-Length:\r\n 26\r\n"),
    "CL with space before the colon": _of_length(b"Content-Length : 26\r\n"),
    "chunk size 0x": _first_size(b"0x" + _SIZE),
    "chunk size with sign": _first_size(b"+" + _SIZE),
    "chunk size negative": _first_size(b"-" + _SIZE),
    "chunk size behind space": _first_size(b" " + _SIZE),
    "chunk size empty": _first_size(b""),
    "chunk size ends with LF": _first_size(_SIZE, b"\n"),
    "chunk extension with LF": _first_size(_SIZE + b";a\nb"),
    "chunk longer than its size": LINE + HOST + CHUNKED + b"\r\n" + _SIZE + b"\r\n" + BODY + b"XX0\r\n\r\n" + HIDDEN,
    "chunk ends with LF": LINE + HOST + CHUNKED + b"\r\n" + _SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n" + HIDDEN,
    "last chunk ends with LF": LINE + HOST + CHUNKED + b"\r\n" + _SIZE + b"\r\n" + BODY + b"\r\n0\n\n" + HIDDEN,
    "lines end with LF": (LINE + HOST + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY + HIDDEN,
    "head ends with LF": LINE + HOST + LENGTH + b"\n" + BODY + HIDDEN,
    "NUL in a header": _of_length(b"X-A: b\0c\r\n" + LENGTH),
    "control character in a header": _of_length(b"X-A: b\x01c\r\n" + LENGTH),
    "space in a name": _of_length(b"X A: b\r\n" + LENGTH),
    "no name": _of_length(b": chunked\r\n" + LENGTH),
    "no host": LINE + LENGTH + b"\r\n" + BODY + HIDDEN,
    "two hosts": _of_length(b"Host: b\r\n" + LENGTH),
    "no version": b"POST /v1/completions\r\n" + HOST + LENGTH + b"\r\n" + BODY + HIDDEN,
    "HTTP/1.2": b"POST /v1/completions HTTP/1.2\r\n" + HOST + LENGTH + b"\r\n" + BODY + HIDDEN,
    "HTTP/2.0": b"POST /v1/completions HTTP/2.0\r\n" + HOST + LENGTH + b"\r\n" + BODY + HIDDEN,
    "version in the target": b"POST /v1/completions?a= HTTP/1.1 HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY + HIDDEN,
    "tabs in the first line": b"POST\t/v1/completions\tHTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY + HIDDEN,
    "control character in the target": b"POST /v1/completions?a=\x01 HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY + HIDDEN,
    "head of 100 KB": _of_length(b"X-A: " + b"b" * 100_000 + b"\r\n" + LENGTH),
    "20,000 headers": _of_length(b"X: y\r\n" * 20_000 + LENGTH),
    "target of 100 KB": b"POST /v1/completions?" + b"a" * 100_000 + b" HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY,
}
"""Their connections are closed, at the latest behind an error, and nothing of them reaches a backend."""

COUNTED: dict[str, tuple[bytes, int, int]] = {
    "one": (LINE + HOST + LENGTH + b"\r\n" + BODY, 1, 1),
    "two in a row": (_of_length(LENGTH), 2, 2),
    "in chunks": (_in_chunks(CHUNKED), 2, 2),
    "TE in mixed case": (_in_chunks(b"transfer-encoding: ChUnKeD\r\n"), 2, 2),
    "chunk extension": (_first_size(_SIZE + b";a=b"), 2, 2),
    "CL with leading zero": (_of_length(b"Content-Length: 026\r\n"), 2, 2),
    "TE in HTTP/1.0, which ends": (b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\n" + HOST + CHUNKED + b"\r\n" + CHUNKS + HIDDEN, 1, 1),
    "a request in a body": (LINE + HOST + b"Content-Length: %d\r\n\r\n" % (len(BODY) + len(HIDDEN)) + BODY + HIDDEN, 1, 0),
    "a request in the body of another path": (b"POST /pause HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN, 1, 0),
    "a request in the body of a GET": (b"GET /v1/models HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN, 1, 0),
    "behind HEAD": (b"HEAD /v1/models HTTP/1.1\r\n" + HOST + b"\r\n" + HIDDEN, 2, 1),
    "Connection names the length": (_of_length(b"Connection: content-length, host, keep-alive\r\n" + LENGTH), 2, 2),
    "line breaks in the target, escaped": (b"POST /v1/completions?a=%0d%0aX:%20y HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY, 1, 1),
    "upgrade that is not taken": (_of_length(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n" + LENGTH), 2, 2),
}
"""Requests with one reading, with how many answers they get, and how many of them reach a backend."""

EITHER: dict[str, tuple[bytes, int, int]] = {
    "CL twice, equal": (_of_length(LENGTH + LENGTH), 2, 2),
    "CL list of equals": (_of_length(b"Content-Length: 26, 26\r\n"), 2, 2),
    "chunk size before space": (_first_size(_SIZE + b" "), 2, 2),
    "chunk size with many zeros": (_first_size(b"0" * 40 + _SIZE), 2, 2),
    "trailers": (LINE + HOST + CHUNKED + b"\r\n" + _SIZE + b"\r\n" + BODY + b"\r\n0\r\nContent-Length: 5\r\nAuthorization: Bearer x\r\n\r\n", 1, 1),
    "line breaks before": (b"\r\n\r\n" + LINE + HOST + LENGTH + b"\r\n" + BODY, 1, 1),
    "line breaks between": (LINE + HOST + LENGTH + b"\r\n" + BODY + b"\r\n\r\n" + HIDDEN, 2, 2),
    "absolute target": (b"POST http://evil/v1/completions HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY, 1, 1),
    "tunnel": (b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n" + HIDDEN, 2, 1),
}
"""What the RFC lets a server take or refuse; the two parsers differ. Where it is taken, as many answers and requests as stated."""


@dataclass
class RecordingBackend:
    """Answers every POST, whatever it is, and records head and body of each. ``afterwards``: bytes that it sends behind each answer, unasked."""

    afterwards: bytes = b""
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    said: threading.Event = field(default_factory=threading.Event)
    """``afterwards`` has been sent."""

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        data = b""
        # What is sent unasked must not wait until the answer is acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                while b"\r\n\r\n" not in data:
                    data += connection.recv(2**16) or _gone()
                head, _, data = data.partition(b"\r\n\r\n")
                length = max(map(int, re.findall(rb"(?i)\r\ncontent-length:\s*(\d+)", head)), default=0)
                while len(data) < length:
                    data += connection.recv(2**16) or _gone()
                body, data = data[:length], data[length:]
                is_asked = not head.startswith(b"GET ")
                if is_asked:
                    self.requests.append((head, body))
                answer = b'{"choices":[{"index":0,"text":%d}]}' % len(self.requests) if is_asked else b'{"object":"list","data":[{"id":"m","object":"model"}]}'
                connection.sendall(_framed(answer))
                if is_asked and self.afterwards:
                    connection.sendall(self.afterwards)
                    self.said.set()
        except OSError:
            connection.close()


_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
"""The first line of an answer: no body here has it."""


def _gone() -> bytes:
    raise ConnectionResetError


def _framed(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


OTHER_ANSWER = _framed(b'{"choices":[{"index":0,"text":"of another request"}]}')


def what_is_wrong(head: bytes, body: bytes) -> list[str]:
    """Returns what a request that has reached the backend has that no backend must see."""
    lines = head.split(b"\r\n")
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    wrong = [] if lines[0].startswith(LINE.split()[0] + b" " + LINE.split()[1]) else ["another path"]
    wrong += [] if names.count(b"content-length") == 1 and b"transfer-encoding" not in names and names.count(b"host") == 1 else ["its framing"]
    wrong += ["a line break in a header"] if re.search(rb"[\r\n\0]", head.replace(b"\r\n", b"")) else []
    return wrong + ([] if body in (BODY, HIDDEN_BODY) else ["its body"])


def send(url: str, payload: bytes, most_answers: int) -> list[int]:
    """Sends ``payload`` on a connection of its own; returns the statuses of the answers, until ``most_answers`` have begun or the connection is closed."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        data = b""
        with contextlib.suppress(OSError):  # It may be refused before it is whole.
            connection.sendall(payload)
        while len(statuses := [int(status) for status in _STATUS.findall(data)]) < most_answers:
            try:
                part = connection.recv(2**16)
            except ConnectionResetError:
                break
            if not part:
                break
            data += part
        return statuses
