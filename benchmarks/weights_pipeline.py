"""Seconds from the beginning of a registration to the last verified byte in a second pod: read after the publication, and while parts are registered.

    python benchmarks/weights_pipeline.py [--repeat 5] [--threads 2] [--model "500 MB"]

Two processes on one machine, over TCP loopback, and over loopback with the sender's sockets paced by the kernel (``SO_MAX_PACING_RATE``, the rate divided over
the connections), which takes the time of a slower network and none of its processor time. Serial and pipeline take turns in every round. What an engine of
the second pod does then is measured beside: a private copy of every tensor, verified, or the verification in place of one that makes no copy.
"""

import contextlib
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import torch
from machine import machine, write_report
from options import parser as shared_parser
from weight_update import MODELS, shards_of

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.trainer.parallel.ranks import alone
from tandem.types import WeightVersion
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.transport import tcp_server
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer
from tandem.weight_transfer.transport.mirror import WeightMirror
from tandem.weight_transfer.transport.pieces import Source
from tandem.weight_transfer.transport.service import WeightService
from tandem.weight_transfer.transport.tcp_source import TcpSource
from tandem.weight_transfer.update import WeightReader
from tandem.weight_transfer.verify import PublishedVerifier

CREDENTIAL = "a credential of the benchmark"
LINKS = {"loopback": 0.0, "10 Gbit/s": 10.0, "2.5 Gbit/s": 2.5}
_SO_MAX_PACING_RATE = 47


class Round(NamedTuple):
    """``whole_s``: from the beginning of the registration to the last verified byte; ``register_s``: of which the registration; ``early``: the share of the
    bytes that had come when it ended."""

    whole_s: float
    register_s: float
    early: float


def serve(name: str, folder: Path, threads: int) -> None:
    """The first pod: a line ``GBIT_PER_S ANNOUNCES STEP`` of its input is a version; its output the times at which the registration began and ended."""
    pace, plain = [0], tcp_server.limit_sends

    def limit(connection: socket.socket) -> None:
        plain(connection)
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@I", pace[0] or 2**32 - 1))

    tcp_server.limit_sends = limit
    shards, size_bytes = shards_of(MODELS[name]), segment_bytes(MODELS[name], "float32")
    placed = place_shards(alone().world, shards, [shard.name for shard in shards])
    buffers, store = WeightBuffers.create("bench" + uuid.uuid4().hex[:8], size_bytes), EmbeddedStore(folder / "shared.sqlite")
    writer = WeightWriter(buffers, store, threads)
    service = WeightService("first", buffers.segments, store, CREDENTIAL, ("tcp",))
    print("ready", flush=True)
    for line in sys.stdin:
        gbit, announces, step = line.split()
        pace[0] = int(float(gbit) * 1e9 / 8 / threads)
        for shard in shards:
            shard.read().add_(0.001)
        began = time.perf_counter()
        writer.publish(placed, WeightVersion(1, int(step)), announces=announces == "1")
        print(began, time.perf_counter(), flush=True)
    service.close()


class Pods:
    """The second pod, and how it tells the first one what to do."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.size_bytes, self.step = segment_bytes(MODELS[name], "float32"), 0
        command = [sys.executable, __file__, "serve", name, str(folder), str(threads)]
        self.first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready\n"

        def create(size_bytes: int) -> WeightBuffers:
            buffers = WeightBuffers.create("bench" + uuid.uuid4().hex[:8], size_bytes)
            for segment in buffers.segments:
                segment.touch()
            return buffers

        def open_source(endpoint: Endpoint, offer: Offer) -> Source:
            return TcpSource("pod first", offer.host, offer.port, CREDENTIAL, connections=threads)

        own = EmbeddedStore(folder / "own.sqlite")
        self.mirror = WeightMirror(EmbeddedStore(folder / "shared.sqlite"), own, create, open_source, threads=threads)
        self.own, self.reader, self.verifier = own, WeightReader(own, threads), PublishedVerifier(own, threads)

    def _answer(self) -> str:
        assert self.first.stdout is not None
        return self.first.stdout.readline()

    def update(self, gbit: float, *, announces: bool) -> Round:
        assert self.first.stdin is not None
        self.step += 1
        version = WeightVersion(1, self.step)
        if announces:
            self.mirror.begin_early(version, ("tcp",), Deadline(120.0))
        self.first.stdin.write(f"{gbit} {int(announces)} {self.step}\n")
        self.first.stdin.flush()
        began, ended = map(float, self._answer().split())
        got = self.mirror.bring(version, ("tcp",), Deadline(120.0))
        assert (got.fetched.breaks, got.fetched.rereads) == (0, ())
        return Round(time.perf_counter() - began, ended - began, got.early_bytes / self.size_bytes)

    def load(self) -> tuple[float, float]:
        """Seconds of a verified private copy, and of a verification in place."""
        published = current(self.own)
        assert published is not None
        began = time.perf_counter()
        self.reader.read(published[0].version)
        copied = time.perf_counter()
        self.verifier.verify(published[0].version, {published[1]})
        return copied - began, time.perf_counter() - copied

    def close(self) -> None:
        self.reader.close()
        self.verifier.close()
        self.mirror.close()
        self.first.kill()
        self.first.wait()


def pipeline(name: str, repeat: int, threads: int) -> str:
    """The table."""
    rounds: dict[tuple[str, bool], list[Round]] = {(link, announces): [] for link in LINKS for announces in (False, True)}
    loads = list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Pods(name, Path(folder), threads)) as pods:
        for _ in range(2):  # The first use of each of two buffers is cold.
            pods.update(0.0, announces=False)
            pods.load()
        for _ in range(repeat):
            for (link, announces), found in rounds.items():
                found.append(pods.update(LINKS[link], announces=announces))
            loads.append(pods.load())
    lines = [
        "| link | serial, s | pipeline, s | pipeline / serial | best rounds | registration, s, serial and pipeline | had come when it ended |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for link in LINKS:
        serial, early = rounds[link, False], rounds[link, True]
        one, two = (statistics.median(each.whole_s for each in side) for side in (serial, early))
        best = min(each.whole_s for each in early) / min(each.whole_s for each in serial)
        registered = [statistics.median(each.register_s for each in side) for side in (serial, early)]
        share = statistics.median(each.early for each in early)
        lines.append(f"| {link} | {one:.3f} | {two:.3f} | {two / one:.2f} | {best:.2f} | {registered[0]:.3f}, {registered[1]:.3f} | {share:.0%} |")
    copied, verified = (statistics.median(each) for each in zip(*loads, strict=True))
    lines += ["", f"An engine of the second pod then: {copied:.3f} s for a verified private copy, or {verified:.3f} s for the verification in place (medians)."]
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    parser = shared_parser(__doc__ or "", threads=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--model", choices=tuple(MODELS), default="500 MB")
    options = parser.parse_args()
    text = (
        f"# Weights in a pipeline between two pods\n\n{machine()}\n\nMedians of {options.repeat} interleaved rounds; a model of "
        f"{segment_bytes(MODELS[options.model], 'float32') / 1e6:.0f} MB in fp32 with the tensors of a Qwen3, all of which change. Sender and receiver share "
        f"the machine's cores. Seconds from the beginning of the registration to the last verified byte in the second pod.\n\n"
        f"{pipeline(options.model, options.repeat, options.threads)}\n"
    )
    print(text)
    print(f"wrote {write_report('weights-pipeline', text, options.out)}")


if __name__ == "__main__":
    main()
