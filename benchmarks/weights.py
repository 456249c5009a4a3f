"""Weights in a pod beside a plain copy, and between two pods beside a raw socket, every byte verified.

    python benchmarks/weights.py [--repeat 7] [--threads 2] [--model "500 MB"]
    python benchmarks/weights.py --elementwise 25M      element-wise deltas (weights_elementwise.py)

In every round, one after the other, so that all see the same machine. In the pod, beside a copy between two warm private buffers on as many threads: the
update of an engine that computes with the published weights where they are (the default, ``rollout.weights: auto``; ``weights_shared.py``: the bytes are moved
once), and the one of an engine that copies them (``weight_update.py``). Between two processes over TCP loopback: a raw socket (``sendall`` from a warm
buffer, ``recv_into`` a warm segment, nothing verified), a whole transfer over plain TCP (manifest from the store, connections, handshakes, every part's
xxh3-128 compared, publication in the second pod) and, where it is installed, the same over Mooncake's TCP. The best of the rounds counts.
"""

import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import torch
from machine import machine, write_report
from options import parser as shared_parser
from weight_update import MODELS, measure
from weights_broadcast import broadcast
from weights_deltas import Model, deltas
from weights_elementwise import MODELS as TRAINED
from weights_elementwise import elementwise
from weights_shared import measure as measure_shared

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.types import WeightVersion
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers
from tandem.weight_transfer.transport import mooncake
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer, Protocol, check_protocols
from tandem.weight_transfer.transport.mirror import WeightMirror
from tandem.weight_transfer.transport.pieces import Source
from tandem.weight_transfer.transport.service import WeightService
from tandem.weight_transfer.transport.tcp_source import TcpSource

CREDENTIAL = "a credential of the benchmark"
CHUNK_BYTES = 2**20


def serve(name: str, folder: Path, protocols: str) -> None:
    """The first pod: publishes a version for each line on its standard input, and serves a raw socket too."""
    model, size_bytes = Model(name), segment_bytes(MODELS[name], "float32")
    buffers, store = WeightBuffers.create("bench" + uuid.uuid4().hex[:8], size_bytes), EmbeddedStore(folder / "shared.sqlite")
    writer = WeightWriter(buffers, store, 2)
    service = WeightService("first", buffers.segments, store, CREDENTIAL, check_protocols(protocols.split(",")))
    with socket.create_server(("127.0.0.1", 0)) as raw:
        print(raw.getsockname()[1], flush=True)
        for line in sys.stdin:
            if line == "raw\n":
                connection, _ = raw.accept()
                with connection:
                    connection.sendall(buffers.segments[0].memory[:size_bytes])
            else:
                kind, step = line.split()
                writer.publish(model.train(kind), WeightVersion(1, int(step)))
                print("published", flush=True)
    service.close()


class TwoPods:
    """The second pod, and how it tells the first one what to do."""

    def __init__(self, name: str, protocols: tuple[Protocol, ...], folder: Path, threads: int) -> None:
        self.size_bytes, self.threads, self.step = segment_bytes(MODELS[name], "float32"), threads, 0
        command = [sys.executable, __file__, "serve", name, str(folder), ",".join(protocols)]
        self.first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.raw_port = int(self._answer())
        self.mirrors = {protocol: self._mirror(folder, protocol) for protocol in protocols}
        self.raw_into = Segment.create("bench" + uuid.uuid4().hex[:8], "raw", self.size_bytes)

    def _mirror(self, folder: Path, protocol: Protocol) -> WeightMirror:
        def create(size_bytes: int) -> WeightBuffers:
            buffers = WeightBuffers.create("bench" + uuid.uuid4().hex[:8], size_bytes)
            for segment in buffers.segments:
                segment.touch()
            return buffers

        def open_source(endpoint: Endpoint, offer: Offer) -> Source:
            if offer.protocol != "tcp":
                return mooncake.MooncakeSource(endpoint, offer)
            return TcpSource("pod first", offer.host, offer.port, CREDENTIAL, connections=self.threads)

        return WeightMirror(EmbeddedStore(folder / "shared.sqlite"), EmbeddedStore(folder / f"{protocol}.sqlite"), create, open_source)

    def _tell(self, line: str) -> None:
        assert self.first.stdin is not None
        self.first.stdin.write(line + "\n")
        self.first.stdin.flush()

    def _answer(self) -> str:
        assert self.first.stdout is not None
        return self.first.stdout.readline()

    def raw(self) -> float:
        """Seconds to receive as many bytes through a socket, in the way that is plain in Python."""
        self._tell("raw")
        with socket.create_connection(("127.0.0.1", self.raw_port)) as connection:
            began, at = time.perf_counter(), 0
            while count := connection.recv_into(self.raw_into.memory[at : at + CHUNK_BYTES]):
                at += count
            return time.perf_counter() - began

    def publish(self, kind: str = "full") -> None:
        """``kind``: how much of it has changed, as of ``weights_deltas``."""
        self.step += 1
        self._tell(f"{kind} {self.step}")
        assert self._answer() == "published\n"

    def bring(self, protocol: Protocol) -> float:
        """Seconds until the published version is verified and published here."""
        began = time.perf_counter()
        got = self.mirrors[protocol].bring(WeightVersion(1, self.step), (protocol,), Deadline(120.0))
        seconds = time.perf_counter() - began
        assert (got.protocol, got.fetched.breaks, got.fetched.rereads) == (protocol, 0, ())
        return seconds

    def close(self) -> None:
        for mirror in self.mirrors.values():
            mirror.close()
        self.raw_into.close()
        self.first.kill()
        self.first.wait()


def between_pods(name: str, repeat: int, threads: int) -> str:
    protocols: tuple[Protocol, ...] = ("mooncake", "tcp") if "mooncake" in mooncake.available() else ("tcp",)
    seconds: dict[str, list[float]] = {"raw": [], **{protocol: [] for protocol in protocols}}
    with tempfile.TemporaryDirectory() as folder:
        pods = TwoPods(name, protocols, Path(folder), threads)
        try:
            for turn in range(repeat + 2):
                pods.publish()
                found = {"raw": pods.raw(), **{protocol: pods.bring(protocol) for protocol in protocols}}
                if turn > 1:  # The first use of each of two buffers is cold.
                    for key, value in found.items():
                        seconds[key].append(value)
            size = pods.size_bytes
        finally:
            pods.close()
    rate = {key: size / min(values) / 1e9 for key, values in seconds.items()}
    lines = ["| between two pods over TCP loopback | GB/s | share of the raw socket | verified |", "| --- | --- | --- | --- |"]
    lines.append(f"| raw socket | {rate['raw']:.2f} | 100% | no |")
    titles = {"tcp": f"plain TCP, {threads} connections", "mooncake": "Mooncake over TCP"}
    lines += [f"| {titles[key]} | {rate[key]:.2f} | {rate[key] / rate['raw']:.0%} | yes |" for key in reversed(protocols)]
    if "mooncake" not in protocols:
        lines.append("| Mooncake over TCP | not installed | | |")
    return "\n".join(lines)


def between_pods_deltas(name: str, repeat: int, threads: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        pods = TwoPods(name, ("tcp",), Path(folder), threads)

        def publish_and_bring(kind: str) -> float:
            pods.publish(kind)
            return pods.bring("tcp")

        try:
            return deltas(name, repeat, threads, publish_and_bring)
        finally:
            pods.close()


def in_pod(name: str, repeat: int, threads: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        _, size, shared = measure_shared(name, repeat, threads, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        _, _, rounds = measure(name, repeat, threads, 1, Path(folder))
    sides = {
        "shared": (shared["copy"], shared["register"], [verify + swap for verify, swap in zip(shared["verify"], shared["swap"], strict=True)]),
        "copied": (rounds["copy"].wall_s, rounds["register"].wall_s, rounds["update"].wall_s),
    }
    titles = {
        "shared": (
            "the default (`rollout.weights: auto`), register: in the engine's layout, digests written", "update: digests verified, memory taken", "both",
        ),
        "copied": ("`rollout.weights: copied`, register: digests written", "update: a verified private copy, not packed yet", "both"),
    }  # fmt: skip
    lines = [f"| in the pod, {threads} threads | GB/s | share of the copy, best rounds | medians | verified |", "| --- | --- | --- | --- | --- |"]
    for side, (copy, register, update) in sides.items():
        lines.append(f"| plain copy between warm buffers | {size / min(copy) / 1e9:.1f} | 100% | 100% | no |")
        both = [one + other for one, other in zip(register, update, strict=True)]
        for title, values in zip(titles[side], (register, update, both), strict=True):
            shares = f"{min(copy) / min(values):.0%} | {statistics.median(copy) / statistics.median(values):.0%}"
            lines.append(f"| {title} | {size / min(values) / 1e9:.1f} | {shares} | yes |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
        return
    parser = shared_parser(__doc__ or "", threads=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--model", choices=tuple(MODELS), default="500 MB")
    parser.add_argument("--elementwise", choices=tuple(TRAINED), help="only element-wise deltas, of a model of this size that is trained")
    options = parser.parse_args()
    if options.elementwise:
        tables = [elementwise(options.elementwise, options.repeat, 3e-6, "bfloat16"), elementwise(options.elementwise, options.repeat, 1e-6, "bfloat16")]
        text = "\n\n".join(["# Element-wise deltas", machine(), *tables])
        print(text)
        print(f"wrote {write_report('weights-elementwise', text, options.out)}")
        return
    described, size = machine(), segment_bytes(MODELS[options.model], "float32")
    text = (
        f"# Weights in a pod and between pods\n\n{described}\n\nBest of {options.repeat} interleaved rounds; a model of {size / 1e6:.0f} MB in fp32 "
        f"with the tensors of a Qwen3. Sender and receiver share the machine's cores.\n\n{in_pod(options.model, options.repeat, options.threads)}\n\n"
        f"{broadcast(options.model, options.repeat, options.threads)}\n\nMedians, until every engine has verified tensors.\n\n"
        f"{between_pods(options.model, options.repeat, options.threads)}\n\n"
        f"{between_pods_deltas(options.model, options.repeat, options.threads)}\n"
    )
    print(text)
    print(f"wrote {write_report('weights', text, options.out)}")


if __name__ == "__main__":
    main()
