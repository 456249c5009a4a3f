"""A worker that a fork server starts: answers what it is and has."""

import os
import signal
import sys
from collections.abc import Sequence

from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply

IMPORTED_BY = os.getpid()


def describe(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
    listener = int(sys.argv[1])
    return {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "imported_by": IMPORTED_BY, "variable": os.environ.get("FORKED_TEST"),
        "listens": listener < 0 or os.fstat(listener) is not None, "interrupt": str(signal.getsignal(signal.SIGINT)),
    }, {}  # fmt: skip


def fail(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
    os._exit(int(meta["status"]))


def run(arguments: Sequence[str]) -> None:
    serve({"describe": describe, "fail": fail}, int(arguments[arguments.index("--channel") + 1]))


if __name__ == "__main__":
    run(sys.argv[1:])
