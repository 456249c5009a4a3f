"""A call of a sidecar as a wait of the controller, whatever carries the call."""

from tandem.pod.calls import LEARNED_CALLS
from tandem.runtime.process.waits import WAITS
from tandem.runtime.rpc.call_client import NO_PROGRESS, CallClient
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, RpcTimeout
from tandem.types.wire import Frame


def watched_call(
    client: CallClient, name: str, meta: Meta | None, blobs: Blobs | None, on_progress: Progress | None, deadline_s: float, *, learns: bool = False,
    least_s: float = 0.0,
) -> Frame:  # fmt: skip
    """Returns the result of a call. ``learns``: a call of a step ends when it makes no progress until the learned deadline, of at least ``least_s``. Raises as
    ``CallClient.call``; the text of an ``RpcTimeout`` has the wait's id and says where the stacks of all parties are."""
    with WAITS.wait(client.peer, name, deadline_s, learns=learns and name in LEARNED_CALLS, least_s=least_s) as wait:
        try:
            return client.call(name, meta, blobs, deadline_s=deadline_s, on_progress=on_progress, wait=wait)
        except RpcTimeout as error:
            raise RpcTimeout(error.peer, error.call, f"{error} ({WAITS.expired(wait)})") from None


def is_of_worker(error: RpcTimeout) -> bool:
    """Returns whether a worker is stuck and its shim is not: the shim killed it, or lives and tells of no progress."""
    return "killed" in str(error) or NO_PROGRESS in str(error)
