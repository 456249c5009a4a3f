"""Calls between processes: what a method is, and the errors of a call.

A call is one ``call`` frame, answered by any number of ``progress`` and ``heartbeat`` frames and then by exactly one ``result`` or
``error`` frame. Workers (``worker``: a socket pair), sidecars (``rpc``: TCP) and remote sidecars (``http_client``: HTTP) speak it alike.
"""

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from tandem.runtime.process.faults import FaultPoint
from tandem.types.errors import CollectiveError, DamagedWeights, RunError, UserError
from tandem.types.wire import Buffer, Frame

logger = logging.getLogger(__name__)

M = TypeVar("M")
Meta = Mapping[str, Any]
Blobs = Mapping[str, Buffer]
Progress = Callable[[dict[str, Any]], None]
Reply = tuple[dict[str, Any], Blobs]
Method = Callable[[Meta, Blobs, Progress], Reply]
"""A call's implementation: ``(meta, blobs, progress) -> (meta, blobs)``. What it raises reaches the caller."""


class CallError(Exception):
    """A call that was not answered with a result. ``peer`` names the other side, ``call`` what was asked of it."""

    def __init__(self, peer: str, call: str, text: str) -> None:
        super().__init__(text)
        self.peer, self.call = peer, call


class RpcTimeout(CallError):
    """No answer within the deadline, or no sign of life."""


class PeerDied(CallError):
    """The other side is not there, or went away before it answered."""


class WorkerDied(CallError):
    """A sidecar's worker ended, however: the text has its exit status or signal."""


class RemoteError(CallError):
    """A method raised something that no user can mend: a defect. The remote traceback is in this side's log."""


_KINDS: dict[str, type[UserError]] = {
    "UserError": UserError, "RunError": RunError, "CollectiveError": CollectiveError, "DamagedWeights": DamagedWeights,
}  # fmt: skip
_CALL_KINDS: dict[str, type[CallError]] = {"WorkerDied": WorkerDied, "RpcTimeout": RpcTimeout, "PeerDied": PeerDied}


def error_meta(error: BaseException) -> dict[str, Any]:
    """The meta of an ``error`` frame."""
    meta: dict[str, Any] = {"class": type(error).__name__, "message": str(error)}
    for name, kind in [*_KINDS.items(), *_CALL_KINDS.items()]:
        # From the widest class to the narrowest: the last match is the more exact one.
        if isinstance(error, kind):
            meta["class"] = name
    if isinstance(error, CallError):
        meta.update(peer=error.peer, call=error.call)
    elif not isinstance(error, UserError):
        meta["traceback"] = "".join(traceback.format_exception(error))
    return meta


def raise_error(meta: Meta, peer: str, call: str) -> None:
    """Raise on this side what an ``error`` frame says: the same ``UserError`` (or its subclass) or ``CallError``, else
    ``RemoteError``."""
    name, message = str(meta.get("class")), str(meta.get("message"))
    if name in _KINDS:
        raise _KINDS[name](message)
    if name in _CALL_KINDS:
        raise _CALL_KINDS[name](str(meta.get("peer", peer)), str(meta.get("call", call)), message)
    logger.error("'%s' raised in %s:\n%s", call, peer, meta.get("traceback", message))
    first = message.splitlines()[0] if message else ""
    raise RemoteError(peer, call, f"'{call}' raised {name} in {peer}: {first} (traceback in the log)")


def is_result(frame: Frame, peer: str, call: str, on_progress: Progress | None) -> bool:
    """Whether ``frame`` of the answer to ``call`` is its result. Raises what an ``error`` frame says, and passes on progress."""
    if frame.kind == "error":
        raise_error(frame.meta, peer, call)
    if frame.kind == "progress" and on_progress is not None:
        on_progress(frame.meta)
    return frame.kind == "result"


def message_meta(message: Any) -> dict[str, Any]:
    """Returns the fields of a message, a dataclass instance, as a frame's meta. Values are not copied."""
    return {field.name: getattr(message, field.name) for field in fields(message)}


def message_from(kind: type[M], meta: Meta) -> M:
    """Returns the message of class ``kind`` that ``message_meta`` made. Raises ``ValueError`` where fields are missing or unknown."""
    try:
        return kind(**meta)
    except TypeError as error:
        raise ValueError(f"a message is not a valid {kind.__name__}: {error}") from None


class StepPoints:
    """Fault points around a process's calls: ``before:CALL:STEP`` and ``after:CALL:STEP`` (after the work, before the
    answer). A call that names no step counts to the newest step that one has named."""

    def __init__(self, fault_point: FaultPoint) -> None:
        self._fault_point = fault_point
        self._step = 0

    def around(self, name: str, method: Method) -> Method:
        def call(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
            version = meta.get("version")
            if isinstance(meta.get("step"), int):
                self._step = int(meta["step"])
            elif isinstance(version, (list, tuple)) and len(version) == 2:
                self._step = int(version[1])
            step = self._step
            self._fault_point(f"before:{name}:{step}")
            reply = method(meta, blobs, progress)
            self._fault_point(f"after:{name}:{step}")
            return reply

        return call
