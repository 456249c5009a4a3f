"""Calls between processes: what a method is, and the errors of a call.

A call is one ``call`` frame, answered by any number of ``progress`` and ``heartbeat`` frames and then by exactly one ``result`` or
``error`` frame. Workers (``worker``: a socket pair), sidecars (``rpc_server``: TCP) and remote sidecars (``http_server``: HTTP) use the same
frames.
"""

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from tandem.runtime.process.faults import FaultPoint
from tandem.runtime.records.logs import step_is
from tandem.runtime.rpc.traced import receive_spans
from tandem.types.errors import CollectiveError, DamagedOffload, DamagedWeights, EngineDied, RunError, UserError
from tandem.types.wire import Buffer, Frame

logger = logging.getLogger(__name__)

M = TypeVar("M")
Meta = Mapping[str, Any]
Blobs = Mapping[str, Buffer]
Progress = Callable[[dict[str, Any]], None]
Reply = tuple[dict[str, Any], Blobs]
Method = Callable[[Meta, Blobs, Progress], Reply]
"""A call's implementation: ``(meta, blobs, progress) -> (meta, blobs)``. Its exceptions are raised at the caller."""


class CallError(Exception):
    """A call that got no result. ``peer`` is the name of the other side, ``call`` the name of the call."""

    def __init__(self, peer: str, call: str, text: str) -> None:
        super().__init__(text)
        self.peer, self.call = peer, call


class RpcTimeout(CallError):
    """No result within the deadline, or no heartbeat."""


class PeerDied(CallError):
    """The other side cannot be reached, or closed the connection before it answered."""


class WorkerDied(CallError):
    """A sidecar's worker process ended; the text has its exit status or signal."""


class RemoteError(CallError):
    """A method raised an exception that is not a ``UserError``: a defect. The remote traceback is in this side's log."""


_KINDS: dict[str, type[UserError]] = {
    "UserError": UserError, "RunError": RunError, "CollectiveError": CollectiveError, "DamagedOffload": DamagedOffload, "DamagedWeights": DamagedWeights,
    "EngineDied": EngineDied,
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
    """Raises the error of an ``error`` frame: the same class where it is a ``UserError``, ``CallError`` or a subclass, else
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
    """Returns whether ``frame`` is the result of ``call``. Raises the error of an ``error`` frame; hands progress to ``on_progress``."""
    if frame.spans:
        receive_spans(frame.spans)
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


def with_fault_points(methods: Mapping[str, Method], fault_point: FaultPoint) -> dict[str, Method]:
    """Returns ``methods`` with two fault points around each call of a process: ``before:CALL:STEP``, and ``after:CALL:STEP`` after the work
    and before the answer. ``STEP`` is the call's ``step``, or the step of its ``version``; a call without either takes the newest step that
    any of the process's calls has named."""
    newest_step = 0

    def around(name: str, method: Method) -> Method:
        def call(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
            nonlocal newest_step
            version = meta.get("version")
            if isinstance(meta.get("step"), int):
                newest_step = int(meta["step"])
            elif isinstance(version, (list, tuple)) and len(version) == 2:
                newest_step = int(version[1])
            step = newest_step
            step_is(step)
            fault_point(f"before:{name}:{step}")
            reply = method(meta, blobs, progress)
            fault_point(f"after:{name}:{step}")
            return reply

        return call

    return {name: around(name, method) for name, method in methods.items()}
