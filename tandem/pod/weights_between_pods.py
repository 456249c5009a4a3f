"""What a sidecar's shim does for weights that go from pod to pod: it serves its segments, or receives a version into segments of its own. No torch."""

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tandem.config.pods import PodsConfig
from tandem.runtime.coordination.open import open_store
from tandem.runtime.coordination.store import Store
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply
from tandem.runtime.rpc.credentials import read_credential
from tandem.runtime.rpc.pod_tls import PodTls, tls_files
from tandem.storage.files import open_storage
from tandem.types import RunError, WeightManifest, WeightVersion
from tandem.weight_transfer.delta import Delta, DeltaMemory, DeltaReference, DeltaWriter, publish_reference
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers
from tandem.weight_transfer.stored.storage_source import StoredWeights
from tandem.weight_transfer.stored.storage_writer import StorageWriter
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer, check_protocols
from tandem.weight_transfer.transport.mirror import WeightMirror
from tandem.weight_transfer.transport.mooncake import MooncakeSource, available
from tandem.weight_transfer.transport.pieces import Source
from tandem.weight_transfer.transport.service import WeightService
from tandem.weight_transfer.transport.tcp_source import TcpSource


class WeightsBetweenPods:
    """The calls of a shim with ``options``. ``buffers``: returns those that the shim has allocated. The lock is held while weights arrive, so that
    one version at a time is written."""

    def __init__(self, options: argparse.Namespace, buffers: Callable[[], WeightBuffers | None]) -> None:
        self._pod, self._threads, self._lease_s = str(options.pod_id), int(options.threads), float(options.lease)
        self._credential = read_credential(Path(options.credential))
        self._tls = pod_tls(options)
        self._buffers = buffers
        self._stores: dict[str, Store] = {}
        self._service: WeightService | None = None
        self._mirror: WeightMirror | None = None
        self._deltas: DeltaWriter | None = None
        self._storage: StorageWriter | None = None
        self._lock = threading.Lock()

    def serve_weights(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Serves the shim's weight buffers over ``protocols`` on ``host`` and ``port`` from now on, and publishes that in the run's ``store``, an address,
        with the host that is ``advertised``. The reply has the ports by protocol."""
        protocols = check_protocols(meta["protocols"])
        buffers = self._buffers()
        if buffers is None:
            raise RunError(f"pod {self._pod} has no weight buffers yet; its trainer's sidecar allocates them before it serves weights")
        with self._lock:
            if self._service is None:
                self._service = WeightService(
                    self._pod, buffers.segments, self._store(meta["store"]), self._credential, protocols,
                    host=meta["host"], port=int(meta["port"]), advertised=meta["advertised"], lease_s=self._lease_s, tls=self._tls,
                )  # fmt: skip
            return {"ports": {offer.protocol: offer.port for offer in self._service.endpoint.offers}}, {}

    def write_delta(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Makes the element-wise delta from the version before to the one that is published in the run's ``store`` now, serves it, and says so in the store.
        Every ``full_every`` steps there is none. With ``weights_url`` the version is also written to that storage, by a thread. The reply has its ``bytes``, 0
        if there is none, the ``stored_bytes`` of the file for the storage, the ``seconds``, and ``trouble``: why there is none although there should be."""
        store, began, trouble, full_every = self._store(meta["store"]), time.monotonic(), "", int(meta["full_every"])
        with self._lock:
            buffers, published = self._buffers(), current(store)
            if buffers is None or published is None:
                raise RunError(f"pod {self._pod} has no weights yet; they are published before a delta of them is made")
            if self._deltas is None:
                self._deltas = DeltaWriter(buffers.segments, self._delta_memory(), self._threads, lambda step: step % full_every == 0)
            try:
                written = self._deltas.write(published[0])
            except RunError as error:
                written, trouble = None, str(error)
            if written is not None and self._service is not None:
                self._service.serve_too(written[1])
            publish_reference(store, None if written is None else written[0])
            stored_bytes = 0
            if meta.get("weights_url"):
                try:
                    stored_bytes = self._store_version(str(meta["weights_url"]), full_every, buffers, published[0], written)
                except RunError as error:
                    trouble = trouble or str(error)
        size_bytes = 0 if written is None else written[0].size_bytes
        return {"bytes": size_bytes, "stored_bytes": stored_bytes, "seconds": time.monotonic() - began, "trouble": trouble}, {}

    def _store_version(
        self, url: str, full_every: int, buffers: WeightBuffers, manifest: WeightManifest, written: tuple[DeltaReference, Segment] | None
    ) -> int:  # fmt: skip
        """Lets ``manifest`` be written to the storage at ``url``. Returns the bytes of its file."""
        if self._storage is None:
            self._storage = StorageWriter(open_storage(url, create=True), buffers.segments, full_every)
        return self._storage.write(manifest, None if written is None else Delta(written[0], written[1].memory))

    def _delta_memory(self) -> DeltaMemory:
        return DeltaMemory(lambda number, size_bytes: Segment.create(self._pod, f"delta-{number}", size_bytes))

    def receive_weights(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Brings the ``version`` that is published in the run's ``store`` (``None``: the newest) to this pod's shared memory over one of ``protocols``
        (empty: all that this machine has) within ``deadline_s``, and publishes it in ``own_store``, which this pod's engines read. The reply has the
        ``version``, the ``bytes`` that came from the other pod, the ``protocol`` (empty: it was here before), the tensors that were read again
        (``rereads``), how often a connection broke (``breaks``), the pods that sent it beside the trainer's (``peers``), the bytes that came before it was
        published (``early_bytes``) and the ``seconds``. ``serves``: the
        ``host``, ``port`` and ``advertised`` host, as of ``serve_weights``, at which this pod sends it on to others from now on. ``deltas``: whether
        element-wise deltas are read; the reply has their ``delta_bytes``, and why they or parts of them were not used (``whole``). ``weights_url``: the storage
        that the version is read from, if it can be."""
        protocols, began = check_protocols(meta["protocols"] or (*available(), "tcp")), time.monotonic()
        version = None if meta["version"] is None else WeightVersion(*meta["version"])
        with self._lock:
            arrived = self._mirror_of(meta).bring(
                version, protocols, Deadline(float(meta["deadline_s"])), lambda done, total: progress({"bytes": done, "total_bytes": total})
            )
            if meta.get("serves"):
                self._send_on(meta["serves"], arrived.manifest)
        rereads, breaks, size_bytes = arrived.fetched
        return {
            "version": list(arrived.manifest.version), "bytes": size_bytes, "protocol": arrived.protocol, "rereads": list(rereads),
            "breaks": breaks, "peers": list(arrived.peers), "seconds": time.monotonic() - began,
            "delta_bytes": arrived.delta_bytes, "whole": list(arrived.whole), "early_bytes": arrived.early_bytes,
        }, {}  # fmt: skip

    def receive_early(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Begins to bring ``version``, which is about to be registered, part by part as the trainer announces them, and returns. ``receive_weights`` ends it,
        and goes on where it was. Arguments as there."""
        protocols = check_protocols(meta["protocols"] or (*available(), "tcp"))
        with self._lock:
            self._mirror_of(meta).begin_early(WeightVersion(*meta["version"]), protocols, Deadline(float(meta["deadline_s"])))
        return {}, {}

    def _mirror_of(self, meta: Meta) -> WeightMirror:
        if self._mirror is None:
            shared, own = self._store(meta["store"]), self._store(meta["own_store"])
            self._mirror = WeightMirror(
                shared, own, lambda size_bytes: WeightBuffers.create(self._pod, size_bytes), self._open_source, pod=self._pod,
                delta_memory=self._delta_memory() if meta.get("deltas") else None, threads=self._threads,
                stored=StoredWeights(open_storage(meta["weights_url"], create=True)) if meta.get("weights_url") else None,
            )  # fmt: skip
        return self._mirror

    def _send_on(self, where: Meta, manifest: WeightManifest) -> None:
        """Serves what the mirror has received, and says so in the run's store."""
        assert self._mirror is not None and self._mirror.buffers is not None and self._mirror.shared is not None
        if self._service is None:
            self._service = WeightService(
                self._pod, self._mirror.buffers.segments, self._mirror.shared, self._credential, ("tcp",),
                host=where["host"], port=int(where["port"]), advertised=where["advertised"], lease_s=self._lease_s, tls=self._tls,
            )  # fmt: skip
        self._service.tell_holding(manifest)

    def close(self) -> None:
        """Ends the service and removes the shared memory that weights were received into."""
        if self._service is not None:
            self._service.close()
        if self._storage is not None:
            self._storage.close()
        if self._deltas is not None:
            self._deltas.close()
        if self._mirror is not None:
            self._mirror.close()
        for store in self._stores.values():
            store.close()

    def _store(self, address: str) -> Store:
        if address not in self._stores:
            self._stores[address] = open_store(address)
        return self._stores[address]

    def _open_source(self, endpoint: Endpoint, offer: Offer) -> Source:
        if offer.protocol != "tcp":
            return MooncakeSource(endpoint, offer)
        # More than two connections gain where a network carries more than a core receives.
        connections = min(8, max(2, self._threads))
        return TcpSource(f"pod {endpoint.pod}", offer.host, offer.port, self._credential, connections=connections, tls=self._tls)


def pod_tls(options: argparse.Namespace) -> PodTls | None:
    """Returns the certificates of ``--tls``, ``None`` without it. Raises ``UserError`` for files that cannot be used."""
    return None if options.tls is None else PodTls(tls_files(*options.tls))


def tls_arguments(pods: PodsConfig) -> list[str]:
    """Returns ``--tls`` for the shim of a pod."""
    paths = (pods.tls_cert_file, pods.tls_key_file, pods.tls_ca_file)
    return ["--tls", *(str(Path(path).absolute()) for path in paths)] if pods.tls_cert_file else []


def add_tls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", nargs=3, default=None, metavar=("CERT", "KEY", "CA"))
