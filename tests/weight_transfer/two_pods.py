"""Two pods of one run for the tests of the transport: one that publishes weights and serves them, and one that receives them."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from whole_tensors import converted

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.pod_tls import PodTls
from tandem.storage.files import open_storage
from tandem.types import WeightManifest, WeightVersion
from tandem.weight_transfer.delta import Delta, DeltaMemory, DeltaWriter, publish_reference
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers
from tandem.weight_transfer.stored.storage_source import StoredWeights
from tandem.weight_transfer.stored.storage_writer import StorageWriter
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer, Protocol
from tandem.weight_transfer.transport.mirror import WeightMirror
from tandem.weight_transfer.transport.mirrored import Mirrored
from tandem.weight_transfer.transport.mooncake import MooncakeSource
from tandem.weight_transfer.transport.pieces import Source
from tandem.weight_transfer.transport.service import WeightService
from tandem.weight_transfer.transport.tcp_source import TcpSource

CREDENTIAL = "a credential of the tests"


def pod_id() -> str:
    return "test" + uuid.uuid4().hex[:8]


def delta_memory() -> DeltaMemory:
    pod = pod_id()
    return DeltaMemory(lambda number, size_bytes: Segment.create(pod, f"delta-{number}", size_bytes))


@dataclass
class TwoPods:
    """``folder`` has the run's store and that of the second pod. ``port``: how the second pod reaches a port of the first one.
    ``full_update_every``: with element-wise deltas, if it is not 0. ``tls``: of each pod. ``weights_url``: the storage that versions are written to, and read
    from first."""

    folder: Path
    size_bytes: int = 2 << 20
    port: Callable[[int], int] = lambda port: port
    silent_s: float = 5.0
    patience_s: float = 10.0
    credential: str = CREDENTIAL
    connections: int = 2
    deadline_s: float = 60.0
    protocols: tuple[Protocol, ...] = ("tcp",)
    full_update_every: int = 0
    tls: tuple[PodTls | None, PodTls | None] = (None, None)
    weights_url: str = ""

    def __post_init__(self) -> None:
        self.shared, self.own = EmbeddedStore(self.folder / "shared.sqlite"), EmbeddedStore(self.folder / "own.sqlite")
        self.buffers = WeightBuffers.create(pod_id(), self.size_bytes)
        self.writer = WeightWriter(WeightBuffers.open(self.buffers.names), self.shared, 1)
        self.service = WeightService("first", self.buffers.segments, self.shared, CREDENTIAL, self.protocols, tls=self.tls[0])
        every = self.full_update_every
        self.deltas = DeltaWriter(self.buffers.segments, delta_memory(), 1, lambda step: step % every == 0) if every else None
        self.stored = StorageWriter(open_storage(self.weights_url, create=True), self.buffers.segments, every) if self.weights_url else None
        self.mirror = WeightMirror(
            self.shared, self.own, lambda size: WeightBuffers.create(pod_id(), size), self.open_source, patience_s=self.patience_s,
            delta_memory=delta_memory() if every else None, stored=StoredWeights(open_storage(self.weights_url)) if self.weights_url else None,
        )  # fmt: skip

    def open_source(self, endpoint: Endpoint, offer: Offer) -> Source:
        if offer.protocol != "tcp":
            return MooncakeSource(endpoint, offer)
        peer = f"pod {endpoint.pod}"
        port, (_, tls) = self.port(offer.port), self.tls
        return TcpSource(peer, offer.host, port, self.credential, connections=self.connections, silent_s=self.silent_s, tls=tls)

    def publish(self, tensors: Sequence[tuple[str, Tensor]], version: WeightVersion) -> WeightManifest:
        manifest = self.writer.publish(converted(tensors), version)
        if self.deltas is not None:
            written = self.deltas.write(manifest)
            self.delta = None if written is None else written[1]
            if written is not None:
                self.service.serve_too(written[1])
            publish_reference(self.shared, None if written is None else written[0])
            if self.stored is not None:
                self.stored_bytes = self.stored.write(manifest, None if written is None else Delta(written[0], written[1].memory))
                assert self.stored.wait(60)
        return manifest

    def bring(self, version: WeightVersion | None = None) -> Mirrored:
        return self.mirror.bring(version, self.protocols, Deadline(self.deadline_s))

    def close(self) -> None:
        self.service.close()
        if self.stored is not None:
            self.stored.close()
        if self.deltas is not None:
            self.deltas.close()
        self.mirror.close()
        self.writer.close()
        self.buffers.close()
        self.shared.close()
        self.own.close()
