"""The channel between two processes: frames (``tandem.types.wire``) over a connected stream socket, a socket pair or TCP.

Needs the standard library alone. Blobs are sent from the memory they are in and received into one buffer, without further copies.
"""

import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.traced import sent_with
from tandem.types.wire import MAX_FRAME_BYTES, PREFIX, Buffer, Frame, decode_body, encode_parts, frame_sizes

if TYPE_CHECKING:
    import asyncio

_SMALL_BYTES = 2**16
_FIRST_ALLOCATION_BYTES = 4 * 2**20
"""The most memory that is allocated for a frame before any of it has arrived, since a broken peer may announce any size."""
_ADMITTED_ALLOCATION_BYTES = 33 * 2**20
"""The same for a peer that has shown its credential: a large frame is received into one buffer, which does not grow."""
_MAX_BUFFERS = 64
"""The number of buffers in one ``sendmsg``; every system allows more."""


class BrokenFrame(Exception):
    """The peer sent bytes that are not a frame, or closed the connection in the middle of one."""


class FrameReader:
    """Reads frames from a stream of bytes.

    Args:
        read_into: ``(view, deadline)``: writes at least one byte of the stream into ``view`` and returns how many, 0 at the end of the stream.
            Raises ``TimeoutError`` past ``deadline`` (``None``: never).
    """

    def __init__(self, read_into: Callable[[memoryview, Deadline | None], int]) -> None:
        self._read_into = read_into
        self._buffer = bytearray(_SMALL_BYTES)
        self._start = self._end = 0
        self.first_allocation_bytes = _FIRST_ALLOCATION_BYTES

    def receive(self, deadline: Deadline | None = None, limit_bytes: int = MAX_FRAME_BYTES) -> Frame:
        """Returns the next frame, of at most ``limit_bytes``. Raises ``EOFError`` where the stream ends between two frames, ``BrokenFrame``,
        and what ``read_into`` raises."""
        while self._end - self._start < PREFIX.size:
            if not self._fill(deadline):
                if self._end > self._start:
                    raise BrokenFrame(f"the connection ended in the middle of a frame's prefix, after {self._end - self._start} bytes")
                raise EOFError
        try:
            with memoryview(self._buffer) as view:
                header_bytes, payload_bytes = frame_sizes(view[self._start : self._end], limit_bytes)
        except ValueError as error:
            raise BrokenFrame(str(error)) from None
        self._start += PREFIX.size
        body = self._take(header_bytes + payload_bytes, deadline)
        try:
            return decode_body(body, header_bytes)
        except ValueError as error:
            raise BrokenFrame(str(error)) from None

    def _fill(self, deadline: Deadline | None) -> int:
        """Reads at least one byte into the buffer; returns the number of bytes."""
        held = self._end - self._start
        if self._start:
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        with memoryview(self._buffer) as view:
            received = self._read_into(view[held:], deadline)
        self._end += received
        return received

    def _take(self, count: int, deadline: Deadline | None) -> bytearray:
        """Returns the next ``count`` bytes, from the buffer first."""
        held = min(count, self._end - self._start)
        body = self._buffer[self._start : self._start + held]
        self._start += held
        while held < count:
            # The buffer doubles as bytes arrive, so that a wrong size allocates no memory.
            grown = bytearray(min(count, max(2 * held, self.first_allocation_bytes)))
            grown[:held] = body
            body = grown
            with memoryview(body) as view:
                while held < len(view):
                    received = self._read_into(view[held:], deadline)
                    if not received:
                        raise BrokenFrame(f"the connection ended in the middle of a frame, after {held} of {count} bytes")
                    held += received
        return body


class Channel:
    """One end of a connection. Any thread may send; one thread at a time receives.

    Args:
        connection: a connected stream socket in blocking mode, owned by the channel from now on.
        watch: a descriptor that becomes readable when the peer's process ends (``os.pidfd_open``). It ends a wait also where a child of the
            peer holds the connection open.
    """

    def __init__(self, connection: socket.socket, *, watch: int | None = None) -> None:
        self._socket, self._watch = connection, watch
        # Under TLS bytes may have arrived that the system knows nothing of any more.
        self._pending: Callable[[], int] = getattr(connection, "pending", lambda: 0)
        self._reader = FrameReader(self._receive_into)
        self._sending = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        if watch is not None:
            self._readable.register(watch, select.POLLIN)
            self._writable.register(watch, select.POLLIN)

    def send(
        self, meta: Mapping[str, Any], blobs: Mapping[str, Buffer] | None = None, *, kind: str, method: str = "", call: int = 0,
        deadline: Deadline | None = None,
    ) -> None:  # fmt: skip
        """Sends one frame. Returns when all of it is in the system's buffers.

        Args:
            deadline: ``None`` waits without end.

        Raises:
            ValueError: ``meta`` is not JSON; nothing was sent.
            TimeoutError: the deadline passed; part of the frame may have been sent, so the channel cannot be used again.
            EOFError, OSError: the peer has closed the connection or has ended.
        """
        parts = encode_parts(meta, blobs, kind, method, call, *sent_with(kind))
        if len(parts) > 1 and sum(map(len, parts)) <= _SMALL_BYTES:
            parts = [b"".join(parts)]
        with self._sending:
            self._send(parts, deadline)

    def receive(self, deadline: Deadline | None = None, limit_bytes: int = MAX_FRAME_BYTES) -> Frame:
        """Returns the next frame.

        Args:
            deadline: ``None`` waits without end.
            limit_bytes: the largest frame that is accepted.

        Raises:
            TimeoutError: the deadline passed; the channel cannot be used again.
            EOFError: the peer closed the connection, or its process ended, between two frames.
            BrokenFrame: the peer sent something else, or the connection ended in the middle of a frame.
            OSError: the connection was reset.
        """
        return self._reader.receive(deadline, limit_bytes)

    def admit(self) -> None:
        """Is told that the peer has shown that it is who it says."""
        self._reader.first_allocation_bytes = _ADMITTED_ALLOCATION_BYTES

    def shutdown(self) -> None:
        """Shuts the connection down in both directions, which also ends another thread's wait in ``send`` or ``receive``."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Closes the socket. Must not be called while another thread uses the channel; see ``shutdown``."""
        self._socket.close()

    def _send(self, parts: list[Buffer], deadline: Deadline | None) -> None:
        at = 0
        while at < len(parts):
            try:
                flags = 0 if deadline is None and self._watch is None else socket.MSG_DONTWAIT
                sent = self._socket.sendmsg(parts[at : at + _MAX_BUFFERS], [], flags)
            except BlockingIOError:
                self._wait(self._writable, deadline)
                continue
            while at < len(parts) and sent >= len(parts[at]):
                sent -= len(parts[at])
                at += 1
            if sent:
                parts[at] = memoryview(parts[at])[sent:]

    def _receive_into(self, view: memoryview, deadline: Deadline | None) -> int:
        while True:
            if (deadline is not None or self._watch is not None) and not self._pending():
                try:
                    self._wait(self._readable, deadline)
                except EOFError:
                    return 0
            try:
                return self._socket.recv_into(view)
            except BlockingIOError:  # Under TLS: what arrived was not for the reader.
                continue

    def _wait(self, poll: "select.poll", deadline: Deadline | None) -> None:
        """Waits until the socket is ready or has failed. Raises ``TimeoutError``, and ``EOFError`` where the peer's process has ended."""
        ready: list[tuple[int, int]] = []
        while not ready:
            nap_s = None if deadline is None else deadline.nap_s()
            ready = poll.poll(None if nap_s is None else nap_s * 1000)
        if all(descriptor == self._watch for descriptor, _ in ready):
            raise EOFError


async def receive_from(reader: "asyncio.StreamReader") -> Frame:
    """Returns the next frame in an event loop. Raises as ``Channel.receive`` does."""
    prefix = await reader.readexactly(PREFIX.size)
    try:
        header_bytes, payload_bytes = frame_sizes(prefix)
        return decode_body(await reader.readexactly(header_bytes + payload_bytes), header_bytes)
    except ValueError as error:
        raise BrokenFrame(str(error)) from None
