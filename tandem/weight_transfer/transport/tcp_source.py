"""Plain TCP, the side that needs the weights: receives into its own segment, over several connections, and digests what has arrived. No torch."""

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tandem.runtime.process.deadline import LOOK_S, Deadline
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.runtime.rpc.pod_tls import PodTls, RefusedTls, describe_tls
from tandem.types.errors import RunError
from tandem.types.wire import PREFIX, Frame, decode_body, frame_sizes
from tandem.weight_transfer.shared_memory import Contents
from tandem.weight_transfer.transport.handshake import introduce
from tandem.weight_transfer.transport.pieces import BUCKET_BYTES, Piece, SourceLost, VersionMoved, buckets_of
from tandem.weight_transfer.transport.tcp_server import time_value

CHUNK_BYTES = 2**20
"""Received and then digested at once, while it is in the processor's cache."""
_AHEAD = 2
"""The number of requests in flight on a connection, so that the server always has the next one."""
_HEADER_BYTES = 2**16
_READY_BYTES = 2**26
"""The largest frame with the places and digests of parts: those of a million."""


class TcpSource:
    """The weights' server at ``host`` and ``port``, named ``peer`` in messages. ``connections``: as many threads receive. ``silent_s``: the longest
    time without a byte before a connection counts as broken. ``what`` it serves, for messages. ``tls``: both sides show certificates of pods first."""

    def __init__(
        self, peer: str, host: str, port: int, credential: str, *, connections: int = 2, silent_s: float = 10.0, what: str = "weights",
        tls: PodTls | None = None,
    ) -> None:  # fmt: skip
        self.peer, self._address, self._credential = f"{peer} at {host}:{port}", (host, port), credential
        self._silent_s, self._what, self._tls = silent_s, what, tls
        self.connections = connections
        self._open: set[_Connection] = set()

    def read(self, segment: str, contents: Contents, pieces: Sequence[Piece], into: memoryview, deadline: Deadline) -> None:
        """See ``Source.read``. A connection that breaks leaves its pieces to the others."""
        queue = Buckets(pieces)
        with ThreadPoolExecutor(self.connections, thread_name_prefix="weights") as pool:
            ended = [pool.submit(self.drain, queue, segment, contents, into, deadline) for _ in range(min(self.connections, len(queue)))]
        errors = [error for future in ended if (error := future.exception()) is not None]
        if errors and not all(piece.is_complete for piece in pieces):
            # The connection that was refused knows more than one that broke.
            raise min(errors, key=lambda error: isinstance(error, SourceLost))

    def release(self, segment: str, contents: Contents, deadline: Deadline) -> None:
        """Says that the segment, which was made for this reader alone, is needed no longer. Raises ``SourceLost``."""
        with self._connected(deadline) as connection:
            connection.release(segment, contents)

    def follow(self, segment: str, contents: Contents, deadline: Deadline) -> Iterator[Frame]:
        """Yields the frames ``ready`` of the announcement with ``contents``, until all of its parts are. Raises as ``read``, and ends with ``abort``."""
        with self._connected(deadline) as connection:
            yield from connection.follow(segment, contents)

    @contextlib.contextmanager
    def _connected(self, deadline: Deadline) -> "Iterator[_Connection]":
        """Yields a connection. Raises ``SourceLost`` where it breaks."""
        try:
            with self._connection(deadline) as connection:
                yield connection
        except (OSError, EOFError, BrokenFrame) as error:
            raise SourceLost(f"the connection to {self.peer} broke: {describe_loss(error)}") from None

    def _connection(self, deadline: Deadline) -> "_Connection":
        return _Connection(self._address, self.peer, self._credential, self._silent_s, deadline, self._open, self._what, self._tls)

    def abort(self) -> None:
        """Breaks the connections that are open, from another thread."""
        for connection in list(self._open):
            connection.abort()

    def close(self) -> None:
        """Connections end with each ``read``."""

    def drain(self, queue: "Buckets", segment: str, contents: Contents, into: memoryview, deadline: Deadline) -> None:
        """Receives buckets of ``queue`` over one connection until there are none; those that it has not received when it fails are given back."""
        asked: deque[list[Piece]] = deque()
        try:
            with self._connection(deadline) as connection:
                while True:
                    while len(asked) < _AHEAD and (bucket := queue.take(waits=not asked)):
                        asked.append(bucket)
                        for piece in bucket:
                            piece.sender = self.peer
                        connection.ask(segment, contents, bucket)
                    if not asked:
                        return
                    connection.receive(contents, asked[0], into)
                    asked.popleft()
        except (OSError, EOFError, BrokenFrame) as error:
            if deadline.passed:
                raise TimeoutError(f"{self.peer} did not send the {self._what} within {deadline.seconds:g} s") from None
            raise SourceLost(f"the connection to {self.peer} broke: {describe_loss(error)}") from None
        finally:
            queue.give_back(asked)


def describe_loss(error: BaseException) -> str:
    """Returns why a connection broke, in a few words."""
    if isinstance(error, TimeoutError):
        return str(error) or "it was silent for too long"
    if isinstance(error, EOFError):
        return "it was closed"
    if isinstance(error, ssl.SSLError):
        return describe_tls(error)
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


class Buckets:
    """The buckets that no connection has yet."""

    def __init__(self, pieces: Sequence[Piece], limit_bytes: int = BUCKET_BYTES) -> None:
        self._left = deque(buckets_of(pieces, limit_bytes))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def take(self, *, waits: bool) -> list[Piece] | None:
        """Returns the next one. ``waits``: the caller has nothing else to do, where some may still come (``early``); here there are none then."""
        with self._lock:
            return self._left.popleft() if self._left else None

    def give_back(self, buckets: Sequence[list[Piece]]) -> None:
        with self._lock:
            self._left.extendleft(reversed(buckets))


class _Connection:
    """One connection, admitted by the server. A read may take until ``deadline``, and ``silent_s`` without a byte. It is one of ``among`` until it ends."""

    def __init__(
        self, address: tuple[str, int], peer: str, credential: str, silent_s: float, deadline: Deadline, among: "set[_Connection]", what: str,
        tls: PodTls | None,
    ) -> None:  # fmt: skip
        self._peer, self._silent_s, self._deadline, self._among, self._what = peer, silent_s, deadline, among, what
        self._socket = _connected(address, Deadline(silent_s, deadline))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_value(LOOK_S))
            if tls is not None:
                self._socket = _secured(tls, self._socket, peer, Deadline(silent_s, deadline))
            self._channel = Channel(self._socket)
            introduce(self._channel, credential, peer, Deadline(silent_s, deadline))
        except BaseException:
            self._socket.close()
            raise
        among.add(self)

    def abort(self) -> None:
        """Ends what another thread receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._among.discard(self)
        self._socket.close()

    def ask(self, segment: str, contents: Contents, pieces: Sequence[Piece]) -> None:
        meta = {"segment": segment, "version": list(contents.version), "digest": contents.digest, "ranges": [piece.missing for piece in pieces]}
        self._channel.send(meta, kind="read", deadline=Deadline(self._silent_s, self._deadline))

    def release(self, segment: str, contents: Contents) -> None:
        """Says that ``segment`` is needed no longer, and waits for the answer, whatever it is."""
        meta = {"segment": segment, "version": list(contents.version), "digest": contents.digest, "ranges": []}
        self._channel.send(meta, kind="release", deadline=Deadline(self._silent_s, self._deadline))
        self._frame()

    def follow(self, segment: str, contents: Contents) -> Iterator[Frame]:
        """Yields the answers to a request for the parts that are ready, the last of which says that all are."""
        meta = {"segment": segment, "version": list(contents.version), "digest": contents.digest, "ranges": []}
        self._channel.send(meta, kind="follow", deadline=Deadline(self._silent_s, self._deadline))
        is_all = False
        while not is_all:
            frame = self._frame(_READY_BYTES)
            if frame.kind == "refused":
                raise VersionMoved(f"{self._peer} refused to send {self._what}: {frame.meta.get('message')}")
            yield frame
            is_all = bool(frame.meta.get("is_all"))

    def receive(self, contents: Contents, pieces: Sequence[Piece], into: memoryview) -> None:
        """Receives the answer to ``ask``."""
        answer = self._frame()
        if answer.kind == "refused":
            kind = VersionMoved if answer.meta.get("moved") else RunError
            raise kind(f"{self._peer} refused to send {self._what}: {answer.meta.get('message')}")
        told = (answer.kind, answer.meta.get("version"), answer.meta.get("digest"), answer.meta.get("size_bytes"))
        if told != ("bytes", list(contents.version), contents.digest, sum(piece.missing[1] for piece in pieces)):
            raise BrokenFrame(f"the answer to a request for weights is {told}")
        for piece in pieces:
            while not piece.is_complete:
                at, left = piece.missing
                piece.arrived(into, self._receive(into[at : at + min(left, CHUNK_BYTES)]))

    def _frame(self, limit_bytes: int = _HEADER_BYTES) -> Frame:
        """Returns a frame, of which not a byte more is read: weights follow it."""
        try:
            header_bytes, payload_bytes = frame_sizes(self._exactly(PREFIX.size), limit_bytes)
            return decode_body(self._exactly(header_bytes + payload_bytes), header_bytes)
        except ValueError as error:
            raise BrokenFrame(str(error)) from None

    def _exactly(self, count: int) -> bytearray:
        found, held = bytearray(count), 0
        with memoryview(found) as view:
            while held < count:
                held += self._receive(view[held:])
        return found

    def _receive(self, view: memoryview) -> int:
        """Waits for at least one byte, and for as many as ``view`` has while they keep coming. Raises ``TimeoutError`` and ``EOFError``."""
        silent = Deadline(self._silent_s, self._deadline)
        while True:
            try:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                silent.nap_s()
                continue
            if not count:
                raise EOFError
            return count


def _secured(tls: PodTls, connection: socket.socket, peer: str, deadline: Deadline) -> socket.socket:
    try:
        return tls.connect(connection, deadline)
    except RefusedTls as error:
        raise RefusedTls(f"{peer}: {error}") from None


def _connected(address: tuple[str, int], deadline: Deadline) -> socket.socket:
    """Returns a connection in blocking mode. Unlike ``socket.create_connection`` it looks at the clock, see ``PauseClock``."""
    family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        status = connection.connect_ex(resolved)
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while status == errno.EINPROGRESS:
            nap_s = deadline.nap_s()
            if poll.poll(None if nap_s is None else nap_s * 1000):
                status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, os.strerror(status))
        connection.setblocking(True)
    except BaseException:
        connection.close()
        raise
    return connection
