"""Calls to a sidecar in another process, from the side of the controller: frames over TCP. Every wait has an owner and a deadline."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.runtime.rpc.calls import Blobs, Meta, PeerDied, Progress, RpcTimeout, is_result
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.types.errors import RunError
from tandem.types.wire import Frame


@dataclass(frozen=True, slots=True)
class Caller:
    """What every call to a sidecar knows, and how it waits.

    Args:
        peer: what errors call the sidecar.
        heartbeat_timeout_s: how long the sidecar may be silent while a call is in progress. A sidecar speaks every second, so silence
            means that it is stopped or gets no processor time.
    """

    peer: str
    port: int
    credential: str
    host: str = "127.0.0.1"
    heartbeat_timeout_s: float = 30.0

    def result(self, name: str, receive: Callable[[float], Frame], ends: float, deadline_s: float, on_progress: Progress | None) -> Frame:
        """Returns the result among the frames of a call's answer. ``receive``: the next frame by a time, or ``TimeoutError``."""
        while True:
            # The clock of silence starts with each frame and is not wound up by a frame that trickles in.
            frame = receive(min(time.monotonic() + self.heartbeat_timeout_s, ends))
            if is_result(frame, self.peer, name, on_progress):
                return frame
            if frame.kind == "refused":
                raise self.refused(name, str(frame.meta.get("message")))
            if time.monotonic() >= ends:
                raise self.timeout(name, ends, deadline_s)

    def refused(self, name: str, text: str) -> RunError:
        return RunError(f"{self.peer} refused the call '{name}': {text}")

    def timeout(self, name: str, ends: float, deadline_s: float) -> RpcTimeout:
        if time.monotonic() >= ends:
            return RpcTimeout(self.peer, name, f"{self.peer} is stuck in '{name}': no result within {deadline_s:g} s")
        return RpcTimeout(self.peer, name, f"{self.peer} is stuck in '{name}': no sign of life for {self.heartbeat_timeout_s:g} s")

    def died(self, name: str, error: BaseException) -> PeerDied:
        if isinstance(error, BrokenFrame):
            return PeerDied(self.peer, name, f"{self.peer} answered '{name}' with a broken frame: {error}")
        reason = "the connection ended before the answer" if isinstance(error, EOFError) else str(error) or type(error).__name__
        return PeerDied(self.peer, name, f"{self.peer} is gone: no answer to '{name}' ({reason})")


class RpcClient(Caller):
    """Calls a sidecar's ``RpcServer``, with a connection for each call."""

    __slots__ = ()

    def call(
        self,
        name: str,
        meta: Meta | None = None,
        blobs: Blobs | None = None,
        *,
        deadline_s: float,
        on_progress: Progress | None = None,
    ) -> Frame:
        """Returns the result of the call ``name``.

        Raises:
            RpcTimeout: no result within ``deadline_s``, or no sign of life.
            PeerDied: the sidecar is not there, or went away before it answered.
            UserError, RunError, WorkerDied: as the method raised it.
            RemoteError: the method raised anything else.
        """
        ends = time.monotonic() + deadline_s
        patience_s = min(self.heartbeat_timeout_s, deadline_s)
        try:
            with socket.create_connection((self.host, self.port), patience_s) as connection:
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = Channel(connection)
                until = min(time.monotonic() + patience_s, ends)
                channel.send({"credential": self.credential}, kind="hello", method=name, ends=until)
                # A call is sent once it has been admitted, so that no large body is sent and then refused.
                if (answer := channel.receive(until)).kind == "refused":
                    raise self.refused(name, str(answer.meta.get("message")))
                channel.send(meta or {}, blobs, kind="call", method=name, ends=ends)
                return self.result(name, channel.receive, ends, deadline_s, on_progress)
        except TimeoutError:
            raise self.timeout(name, ends, deadline_s) from None
        except (OSError, EOFError, BrokenFrame) as error:
            raise self.died(name, error) from None
