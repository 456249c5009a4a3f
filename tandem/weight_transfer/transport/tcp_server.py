"""Plain TCP, the side that has the weights: sends ranges of its segments from their pages, without a copy by this process (but under TLS). No torch.

After the handshake a client sends ``read`` frames with the segment, the version and manifest digest that it must hold, and ranges ``[offset, bytes]``.
Each is answered by a frame ``bytes`` with the same version and digest, and the bytes behind it; or by ``refused``. A segment whose label changes while it
is sent is not sent on: the connection is closed, and the client's next request is refused. A client that has all that it wants of a segment that was made for
it alone says so with ``release``, which is answered by ``released``.

Of a version that is announced and not published yet, parts that are ready are sent in the same way, to a request with the announcement's attempt in the place
of the digest. Which are ready a client is told by frames ``ready`` after it has asked for them with ``follow`` (``announced_parts``).
"""

import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.runtime.rpc.pod_tls import PodTls, TlsSocket, wait_for
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.types.sample import WeightVersion
from tandem.types.wire import Frame
from tandem.weight_transfer.announcement import is_announced
from tandem.weight_transfer.publication import describe
from tandem.weight_transfer.shared_memory import Contents, Segment
from tandem.weight_transfer.transport.announced_parts import AnnouncedParts
from tandem.weight_transfer.transport.handshake import admits

logger = logging.getLogger(__name__)

SLICE_BYTES = 4 * 2**20
"""The label of a segment is looked at again after as many bytes."""
_REQUEST_BYTES = 2**20
_LOOK_S = 0.25


class WeightServer(RpcServer):
    """Serves ``segments`` to clients with the ``credential``. ``silent_s``: how long a client may take nothing of what is sent, or ask nothing. ``released``:
    called, in any thread, with the name of a segment that its only client needs no longer; it must not wait for ``withdraw``. ``what``: the segments hold, for
    messages. ``tls``: clients show a certificate of a pod first, and what is sent is encrypted."""

    def __init__(
        self, segments: Sequence[Segment], credential: str, *, name: str, host: str = "127.0.0.1", port: int = 0, silent_s: float = 60.0,
        released: Callable[[str], None] = lambda segment: None, what: str = "weights", tls: PodTls | None = None,
    ) -> None:  # fmt: skip
        self._segments = {segment.name: segment for segment in segments}
        self._secret, self._silent_s, self._released, self._what = credential, silent_s, released, what
        self._announced = AnnouncedParts()
        self._readers: Counter[str] = Counter()
        self._changed = threading.Condition()
        super().__init__({}, credential, name=name, host=host, port=port, tls=tls)

    def serve_too(self, segment: Segment) -> None:
        """Serves one more segment from now on, which must stay open as long as this server, or until ``withdraw``."""
        self._segments[segment.name] = segment

    def close(self) -> None:
        super().close()
        self._announced.close()

    def withdraw(self, segment: Segment) -> None:
        """Serves ``segment`` no longer, and returns when it has no reader, so that it can be closed."""
        self._segments.pop(segment.name, None)
        # A client to which it is sent now finds no label before the next slice.
        segment.contents = None
        with self._changed:
            self._changed.wait_for(lambda: not self._readers[segment.name])
            del self._readers[segment.name]

    def _converse(self, channel: Channel, connection: socket.socket) -> None:
        limit_sends(connection)
        if not admits(channel, self._secret, Deadline(self.request_s)):
            logger.warning("%s: a connection without the credential was refused", self.name)
            return self._refuse(channel, connection, "wrong credential")
        channel.send({}, kind="welcome", deadline=Deadline(self.request_s))
        with contextlib.suppress(EOFError):
            while True:
                request = channel.receive(Deadline(self._silent_s), _REQUEST_BYTES)
                with self._reading(str(request.meta.get("segment"))):
                    self._answer_read(channel, connection, request)
        return None

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Keeps the segment ``name`` from being closed."""
        with self._changed:
            self._readers[name] += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers[name] -= 1
                self._changed.notify_all()

    def _answer_read(self, channel: Channel, connection: socket.socket, request: Frame) -> None:
        segment, contents, ranges = self._asked(request)
        held = None if segment is None else segment.contents
        deadline = Deadline(self._silent_s)
        if segment is not None and request.kind == "follow":
            return self._announced.tell(channel, segment, contents, self._silent_s)
        if segment is None or (held != contents and not self._announced.are_ready(segment, contents, ranges)):
            what = "nothing" if held is None else f"the {self._what} {describe(held.version)}"
            text = f"it holds {what} in the place of the {self._what} {describe(contents.version)}"
            return channel.send({"message": text, "moved": True}, kind="refused", deadline=deadline)
        if any(offset < 0 or size < 0 or offset + size > segment.size_bytes for offset, size in ranges):
            text = f"a range lies outside the {segment.size_bytes} bytes of segment {segment.name}"
            return channel.send({"message": text, "moved": False}, kind="refused", deadline=deadline)
        if request.kind == "release":
            self._released(segment.name)
            return channel.send({}, kind="released", deadline=deadline)
        meta = {"version": list(contents.version), "digest": contents.digest, "size_bytes": sum(size for _, size in ranges)}
        with corked(connection):
            channel.send(meta, kind="bytes", deadline=deadline)
            for offset, size in ranges:
                self._send(connection, segment, contents, offset, size)
        return None

    def _asked(self, request: Frame) -> tuple[Segment | None, Contents, list[tuple[int, int]]]:
        """Returns the segment (``None``: another owner's), what it must hold, and the ranges. Raises ``BrokenFrame``."""
        meta = request.meta
        try:
            incarnation, step = meta["version"]
            contents = Contents(WeightVersion(int(incarnation), int(step)), str(meta["digest"]))
            ranges = [(int(offset), int(size)) for offset, size in meta["ranges"]]
        except (KeyError, TypeError, ValueError):
            raise BrokenFrame(f"a frame '{request.kind}' is not a request for ranges") from None
        return self._segments.get(str(meta.get("segment"))), contents, ranges

    def _send(self, connection: socket.socket, segment: Segment, contents: Contents, offset: int, size: int) -> None:
        silent = Deadline(self._silent_s)
        while size:
            if segment.contents != contents and not is_announced(segment, contents):
                raise BrokenFrame(f"the {self._what} {describe(contents.version)} were replaced while they were sent")
            count = min(size, SLICE_BYTES)
            try:
                if isinstance(connection, TlsSocket):
                    sent = connection.send(segment.memory[offset : offset + count])
                else:
                    sent = os.sendfile(connection.fileno(), segment.fileno(), offset, count)
            except BlockingIOError:
                nap_s = silent.nap_s()
                if isinstance(connection, TlsSocket):
                    wait_for(connection, select.POLLOUT, nap_s)
                continue
            silent = Deadline(self._silent_s)
            offset, size = offset + sent, size - sent


def limit_sends(connection: socket.socket) -> None:
    """Makes a send to a peer that takes nothing return after ``_LOOK_S``, so that its deadline is looked at."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, time_value(_LOOK_S))


def time_value(seconds: float) -> bytes:
    """Returns the C ``struct timeval`` of ``seconds``."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


@contextlib.contextmanager
def corked(connection: socket.socket) -> Iterator[None]:
    """Fills every packet while small ranges follow each other."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    yield
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
