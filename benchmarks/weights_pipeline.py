"""Seconds from the beginning of a registration to the last verified byte in a second pod: read after the publication, and while parts are registered.

    python benchmarks/weights_pipeline.py [--repeat 5] [--threads 2] [--model "500 MB"]

Three processes on one machine, as in a run: the shim that serves the weights, the trainer's rank that writes them, and the shim of the second pod. Over TCP
loopback, and over loopback with the sender's sockets paced by the kernel (``SO_MAX_PACING_RATE``, the rate divided over the connections), which takes the time
of a slower network and none of its processor time. The trainer has the weights in memory, or reads each tensor from the disk (direct I/O), as weights that are
offloaded there (``trainer.offload: nvme``). Serial and pipeline take turns in every round. What an engine of the second pod does then is measured beside: a
private copy of every tensor, verified, or the verification in place of one that makes no copy.
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
from torch import Tensor
from weight_update import MODELS, shards_of

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.storage.direct import BLOCK_BYTES, read_from_disk, write_new
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


def serve(name: str, folder: Path, connections: int) -> None:
    """The shim of the first pod: a line of its input is the rate of the link from then on."""
    pace, plain = [0], tcp_server.limit_sends

    def limit(connection: socket.socket) -> None:
        plain(connection)
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@I", pace[0] or 2**32 - 1))

    tcp_server.limit_sends = limit
    buffers = WeightBuffers.create("bench" + uuid.uuid4().hex[:8], segment_bytes(MODELS[name], "float32"))
    service = WeightService("first", buffers.segments, EmbeddedStore(folder / "shared.sqlite"), CREDENTIAL, ("tcp",))
    print(*buffers.names, flush=True)
    for line in sys.stdin:
        pace[0] = int(float(line) * 1e9 / 8 / connections)
        print("paced", flush=True)
    service.close()


class OnDisk:
    """A tensor in a file, read past the system's memory. ``added``: to every element, so that each version is another."""

    def __init__(self, path: Path, tensor: Tensor) -> None:
        self._path, self._shape, self._count, self.added = path, tensor.shape, tensor.numel(), 0.0
        write_new(path, [memoryview(bytearray(tensor.numpy().tobytes()))], tensor.nbytes)

    def read(self) -> Tensor:
        size = 4 * self._count
        chunk = next(iter(read_from_disk(self._path, size, -(-size // BLOCK_BYTES) * BLOCK_BYTES)))
        return torch.frombuffer(chunk, dtype=torch.float32, count=self._count).view(self._shape).add_(self.added)


def write(name: str, folder: Path, threads: int, first: str, second: str) -> None:
    """The trainer's rank: a line ``SOURCE ANNOUNCES STEP`` of its input is a version; its output the times at which the registration began and ended."""
    shards = shards_of(MODELS[name])
    on_disk = [OnDisk(folder / f"{i}.bin", shard.read()) for i, shard in enumerate(shards)]
    of = {"memory": shards, "disk": [shard._replace(read=each.read) for shard, each in zip(shards, on_disk, strict=True)]}
    placed = {source: place_shards(alone().world, each, [shard.name for shard in shards]) for source, each in of.items()}
    writer = WeightWriter(WeightBuffers.open((first, second)), EmbeddedStore(folder / "shared.sqlite"), threads)
    print("ready", flush=True)
    for line in sys.stdin:
        source, announces, step = line.split()
        for shard, each in zip(shards, on_disk, strict=True):
            shard.read().add_(0.001)
            each.added += 0.001
        began = time.perf_counter()
        writer.publish(placed[source], WeightVersion(1, int(step)), announces=announces == "1")
        print(began, time.perf_counter(), flush=True)


class Pods:
    """The second pod, and how it tells the first one what to do."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.size_bytes, self.step = segment_bytes(MODELS[name], "float32"), 0
        self.shim = self._start("serve", name, str(folder), str(threads))
        self.trainer = self._start("write", name, str(folder), str(threads), *_answer(self.shim).split())
        assert _answer(self.trainer) == "ready\n"

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

    def _start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def update(self, source: str, gbit: float, *, announces: bool) -> Round:
        self.step += 1
        _tell(self.shim, str(gbit))
        assert _answer(self.shim) == "paced\n"
        version = WeightVersion(1, self.step)
        if announces:
            self.mirror.begin_early(version, ("tcp",), Deadline(120.0))
        _tell(self.trainer, f"{source} {int(announces)} {self.step}")
        began, ended = map(float, _answer(self.trainer).split())
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
        for process in (self.trainer, self.shim):
            process.kill()
            process.wait()


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def pipeline(name: str, repeat: int, threads: int) -> str:
    """The table."""
    sides = [(source, link) for source in ("memory", "disk") for link in LINKS]
    rounds: dict[tuple[str, str, bool], list[Round]] = {(*side, announces): [] for side in sides for announces in (False, True)}
    loads = list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Pods(name, Path(folder), threads)) as pods:
        for _ in range(2):  # The first use of each of two buffers is cold.
            pods.update("memory", 0.0, announces=False)
            pods.load()
        for _ in range(repeat):
            for (source, link, announces), found in rounds.items():
                found.append(pods.update(source, LINKS[link], announces=announces))
            loads.append(pods.load())
    lines = [
        "| weights in | link | serial, s | pipeline, s | pipeline / serial | best rounds | registration, s, serial and pipeline | had come when it ended |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for source, link in sides:
        serial, early = rounds[source, link, False], rounds[source, link, True]
        one, two = (statistics.median(each.whole_s for each in side) for side in (serial, early))
        best = min(each.whole_s for each in early) / min(each.whole_s for each in serial)
        registered = [statistics.median(each.register_s for each in side) for side in (serial, early)]
        share = statistics.median(each.early for each in early)
        seconds = f"{one:.3f} | {two:.3f} | {two / one:.2f} | {best:.2f} | {registered[0]:.3f}, {registered[1]:.3f}"
        lines.append(f"| {source} | {link} | {seconds} | {share:.0%} |")
    copied, verified = (statistics.median(each) for each in zip(*loads, strict=True))
    lines += ["", f"An engine of the second pod then: {copied:.3f} s for a verified private copy, or {verified:.3f} s for the verification in place (medians)."]
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    if sys.argv[1:2] == ["write"]:
        write(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6])
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
