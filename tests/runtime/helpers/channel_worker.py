"""The worker process of the tests of workers: ``python -m channel_worker --channel FD``."""

import argparse
import os
import signal
import sys
import time

from tandem.runtime.process.faults import FaultPlan, no_fault
from tandem.runtime.process.worker import serve
from tandem.types import RunError, UserError


def echo(meta, blobs, progress):
    for i in range(meta.get("progress", 0)):
        progress({"done": i})
    return dict(meta), dict(blobs)


def fail(meta, blobs, progress):
    kinds = {"UserError": UserError, "RunError": RunError, "ValueError": ValueError, "ConnectionError": ConnectionError}
    raise kinds[meta["kind"]](meta["text"])


def die(meta, blobs, progress):
    if "status" in meta:
        os._exit(meta["status"])
    os.kill(os.getpid(), signal.SIGKILL)


def hang(meta, blobs, progress):
    progress({"pid": os.getpid()})
    print("hanging", file=sys.stderr, flush=True)
    time.sleep(60)
    return {}, {}


def rubbish(meta, blobs, progress):
    """Writes bytes to the channel that are not a frame."""
    os.write(CHANNEL, b"<html>" * 100)
    time.sleep(60)
    return {}, {}


def orphan(meta, blobs, progress):
    """Exits and leaves a child that keeps the channel open."""
    if os.fork() == 0:
        time.sleep(2)
        os._exit(0)
    os._exit(3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--fault", default="")
    parser.add_argument("--directory", default=".")
    options = parser.parse_args()
    CHANNEL = options.channel
    from pathlib import Path

    point = FaultPlan.parse(options.fault).point("trainer_worker", Path(options.directory)) if options.fault else no_fault
    methods = {"echo": echo, "fail": fail, "die": die, "hang": hang, "orphan": orphan, "rubbish": rubbish, "train": echo}
    serve(methods, options.channel, fault_point=point)
