"""The round trip of a call to a worker process: a small message, and a blob of 1 MiB there and back.

``python benchmarks/channel.py [--calls N] [--out FOLDER]``. Beside ours, in the same run: ``multiprocessing.connection`` (pickle) and, where they are
installed, pyzmq (a PAIR of sockets over IPC, blobs as frames of their own, not copied) with msgspec. Microseconds, the median of all calls.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

META = {"step": 12, "rows": [3, 5, 8, 13], "phase": "decode", "temperature": 0.7}
BLOB = os.urandom(2**20)
Call = Callable[[dict[str, Any], bytes | None], Any]


def serve_ours(channel: int) -> None:
    from tandem.runtime.process.worker import serve

    serve({"echo": lambda meta, blobs, progress: (dict(meta), blobs)}, channel)


def serve_pickle(connection: Any) -> None:
    while (message := connection.recv()) is not None:
        connection.send(message)


def serve_zmq(address: str) -> None:
    import msgspec
    import zmq

    connection = zmq.Context().socket(zmq.PAIR)
    connection.connect(address)
    while True:
        head, *blobs = connection.recv_multipart(copy=False)
        meta = msgspec.json.decode(head.buffer)
        if not meta:
            return
        connection.send_multipart([msgspec.json.encode(meta), *blobs], copy=False)


def measure(call: Call, calls: int) -> tuple[float, float]:
    found = []
    for blob, count in ((None, calls), (BLOB, max(20, calls // 20))):
        times = []
        for _ in range(count):
            began = time.perf_counter()
            call(META, blob)
            times.append((time.perf_counter() - began) * 1e6)
        found.append(statistics.median(times))
    return found[0], found[1]


def ours(calls: int) -> tuple[float, float]:
    from tandem.runtime.process.processes import Threads
    from tandem.runtime.process.worker import Worker

    worker = Worker("echo", "channel", threads=Threads(1), environment={"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *filter(None, sys.path)))})
    try:
        worker.call("echo", META, deadline_s=60)
        return measure(lambda meta, blob: worker.call("echo", meta, {"blob": blob} if blob else None, deadline_s=60), calls)
    finally:
        worker.stop()


def pickled(calls: int) -> tuple[float, float]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_pickle, args=(there,))
    process.start()

    def call(meta: dict[str, Any], blob: bytes | None) -> Any:
        here.send((meta, blob))
        return here.recv()

    call(META, None)
    try:
        return measure(call, calls)
    finally:
        here.send(None)
        process.join()


def with_zmq(calls: int) -> tuple[float, float] | None:
    try:
        import msgspec
        import zmq
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/socket"
        connection = zmq.Context().socket(zmq.PAIR)
        connection.bind(address)
        process = multiprocessing.get_context("spawn").Process(target=serve_zmq, args=(address,))
        process.start()

        def call(meta: dict[str, Any], blob: bytes | None) -> Any:
            connection.send_multipart([msgspec.json.encode(meta), *([blob] if blob else [])], copy=False)
            head, *blobs = connection.recv_multipart(copy=False)
            return msgspec.json.decode(head.buffer), [part.buffer for part in blobs]

        call(META, None)
        try:
            return measure(call, calls)
        finally:
            connection.send(b"null")
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--out", type=Path, help="the folder of the report")
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.channel is not None:
        serve_ours(options.channel)
        return
    from machine import machine, write_report

    began = machine()
    lines = [f"{'':40} {'small, us':>10} {'1 MiB, us':>10}"]
    sides = {"frames over a socket pair (tandem)": ours, "multiprocessing.connection, pickle": pickled, "pyzmq and msgspec": with_zmq}
    for name, side in sides.items():
        times = side(options.calls)
        lines.append(f"{name:40} " + (f"{times[0]:10.1f} {times[1]:10.1f}" if times else "not installed"))
    print(table := "\n".join(lines))
    if options.out is not None:
        text = "One call to a worker process and its answer, microseconds, the median of all calls."
        write_report("channel", f"# The channel between processes\n\n{began}\n\n{text}\n\n```\n{table}\n```", options.out)


if __name__ == "__main__":
    main()
