"""What the servers of a sidecar's calls share, whatever carries the frames: ``rpc_server`` (TCP) and ``http_server`` (HTTP)."""

import hmac
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.runtime.rpc.calls import Blobs, Meta, Method, error_meta, with_fault_points
from tandem.runtime.rpc.listener import listen
from tandem.runtime.rpc.traced import call_span
from tandem.types.errors import UserError
from tandem.types.wire import MAX_FRAME_BYTES, Frame


class CallServer(ABC):
    """Listens on a port and answers calls, each in a thread of its own.

    Args:
        methods: the implementation of each call by its name.
        credential: the pod's secret; a caller without it is refused.
        name: the sidecar's name in error messages and logs.
        port: 0 takes a free port; the attribute ``port`` is its number.
        heartbeat_s: the interval of the heartbeats that are sent while a call is in progress.
        request_s: the time limit for a caller to send its call, and to take each frame of the answer.
        max_body_bytes: the largest call that is accepted.
        max_connections: the number of connections at once; further ones are refused.
        fault_point: called before and after each call, see ``with_fault_points``.

    Raises:
        UserError: the port cannot be taken.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        credential: str,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        heartbeat_s: float = 1.0,
        request_s: float = 10.0,
        max_body_bytes: int = MAX_FRAME_BYTES,
        max_connections: int = 64,
        fault_point: FaultPoint = no_fault,
    ) -> None:
        self.name, self.heartbeat_s, self.request_s = name, heartbeat_s, request_s
        self.max_body_bytes, self.max_connections = max_body_bytes, max_connections
        self.methods = with_fault_points(methods, fault_point)
        self._credential = credential.encode()
        try:
            self._listener = listen(host, port)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self.serve_forever, name=f"{name}-server", daemon=True)
        self._open()

    def start(self) -> None:
        """Answers calls from a background thread."""
        self._thread.start()

    def close(self) -> None:
        """Accepts no more calls. Calls in progress are left to their threads, which end with the process."""
        self._stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()

    @abstractmethod
    def _open(self) -> None:
        """Makes what ``serve_forever`` needs. The constructor calls it last."""

    @abstractmethod
    def serve_forever(self) -> None:
        """Answers calls from this thread until ``close``."""

    @abstractmethod
    def _stop(self) -> None:
        """Makes ``serve_forever`` return."""

    def _is_credential(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._credential)


def run_call(method: Method, call: Frame, send: Callable[[Meta, Blobs, str], None]) -> None:
    """Runs ``method`` on ``call`` and sends its progress, and then its result or its error: ``send(meta, blobs, kind)``."""
    try:
        with call_span(call):
            meta, blobs = method(call.meta, call.blobs, lambda progress: send(progress, {}, "progress"))
        send(meta, blobs, "result")
    except BaseException as error:
        send(error_meta(error), {}, "error")
