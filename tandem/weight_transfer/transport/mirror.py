"""Brings the published weights of another pod to the shared memory of this one, and publishes them to the engines here. No torch."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from tandem.runtime.coordination.store import Store
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import CallError
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.copying import Threads
from tandem.weight_transfer.delta import Delta, DeltaMemory, publish_reference, reference_to
from tandem.weight_transfer.publication import current, describe, publish, replaceable
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers, check_free, contents_of
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer, Protocol, choose, endpoint_of, peers_with
from tandem.weight_transfer.transport.fetch import Fetched, fetch
from tandem.weight_transfer.transport.local_parts import LocalParts
from tandem.weight_transfer.transport.pieces import Source, SourceStuck
from tandem.weight_transfer.transport.receive_delta import receive_delta
from tandem.weight_transfer.transport.several_senders import Sender, SeveralSenders
from tandem.weight_transfer.transport.tcp_source import TcpSource

logger = logging.getLogger(__name__)

OpenSource = Callable[[Endpoint, Offer], Source]
"""(endpoint of the other pod, the chosen one of its offers) -> what reads from it."""
NOTHING_FETCHED = Fetched((), 0)
_DELTA_PROTOCOLS: tuple[Protocol, ...] = ("tcp",)


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A version that this pod's engines can read now. ``protocol``: what carried it, empty if it was here before. ``peers``: the pods beside the trainer's that
    it was asked of. ``delta_bytes``: of the element-wise delta that came instead of whole parts, and ``whole``: why it, or parts of it, were not used."""

    manifest: WeightManifest
    protocol: str
    fetched: Fetched
    peers: tuple[str, ...] = ()
    delta_bytes: int = 0
    whole: tuple[str, ...] = ()


class WeightMirror:
    """``shared``: the store of the run, in which the trainer's pod publishes; ``own``: the store of this pod, which its engines read.

    Two buffers take turns, as in the trainer's pod: what the engines may be reading is not written to. They are made by ``create`` for the first
    version, of its size, and live as long as the mirror. ``patience_s``: as of ``fetch``. ``pod``: this one's id, which is not asked for its own weights.
    ``delta_memory``: for element-wise deltas, which are read where the trainer's pod has one; ``None``: they are not. ``threads``: as many copy within this
    pod.
    """

    def __init__(
        self, shared: Store, own: Store, create: Callable[[int], WeightBuffers], open_source: OpenSource, *, patience_s: float = 10.0, pod: str = "",
        delta_memory: DeltaMemory | None = None, threads: int = 1,
    ) -> None:  # fmt: skip
        self.shared, self.own, self._patience_s, self._pod = shared, own, patience_s, pod
        self._create, self._open_source = create, open_source
        self.buffers: WeightBuffers | None = None
        self._source: tuple[Endpoint, Offer, Source] | None = None
        self._stuck: SourceStuck | None = None
        self._delta_memory, self._threads = delta_memory, Threads(threads)
        # What each segment holds, of what this mirror has brought, and the revision of the last.
        self._brought: dict[str, WeightManifest] = {}
        self._revision = 0

    def bring(
        self, version: WeightVersion | None, protocols: Collection[Protocol], deadline: Deadline,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Mirrored:  # fmt: skip
        """Reads, verifies and publishes ``version`` (``None``: the one that is published now); at once if it is here already.

        Pods that have received it already send it, all of them at once; the trainer's, if there are none, or none is left. Only parts whose digest no
        memory here has, and that no delta makes of such parts, are read. If the same version was published again, because it was found damaged somewhere,
        everything that is here is compared with its digest.

        Raises ``RunError`` if nothing or another version is published, no pod serves it, or the shared memory of this machine is too small; and
        what ``fetch`` raises. The engines' published version stays as it was then.
        """
        if self._stuck is not None:
            raise SourceStuck(str(self._stuck))
        published = current(self.shared)
        if published is None:
            raise RunError("no weights are published; the trainer registers them before other pods receive them")
        manifest = published[0]
        if version is not None and manifest.version != version:
            raise RunError(f"weights {describe(version)} were requested, but {describe(manifest.version)} are published")
        before = replaceable(self.own)
        held = before[0] if before else None
        is_again = held is not None and (held.version, held.digest) == (manifest.version, manifest.digest) and self._owns(held)
        if held is not None and is_again and published[1] == self._revision:
            return Mirrored(held, "", NOTHING_FETCHED)
        segment = _segment_of(manifest)
        endpoint = endpoint_of(self.shared, segment)
        offer = choose(endpoint, protocols)
        into = self._buffers(manifest).other(None if held is None else held.tensors[0].segment)
        peer, patience_s = endpoint.pod, self._patience_s
        delta, whole = (None, ()) if is_again or held is None else self._receive_delta(manifest, endpoint, deadline)
        known = self._known(into, held, is_again, delta)
        self._brought.pop(into.name, None)
        try:
            source = self._source_of(endpoint, offer)
            peers = peers_with(self.shared, contents_of(manifest), self._pod) if isinstance(source, TcpSource) else []
            if isinstance(source, TcpSource) and peers:
                source = SeveralSenders([self._sender(*each) for each in peers], Sender(source, segment))
            fetched = fetch(source, manifest, segment, into, known, peer=peer, deadline=deadline, patience_s=patience_s, on_progress=on_progress)
        except SourceStuck as stuck:
            self._stuck = stuck
            raise
        except BaseException:
            self._close_source()
            raise
        ours = replace(manifest, tensors=tuple(replace(entry, segment=into.name) for entry in manifest.tensors))
        if self._delta_memory is not None:
            publish_reference(self.own, None if delta is None else delta.reference)
        publish(self.own, ours, before)
        self._brought[into.name], self._revision = ours, published[1]
        names = tuple(peer.pod for peer, _, _ in peers)
        told, delta_bytes = describe(manifest.version), delta.reference.size_bytes if delta else 0
        logger.info("weights %s came from pod %s over %s", told, ", ".join(names) or endpoint.pod, offer.protocol)
        logger.info("of the %d bytes of weights %s %d came whole, and %d of a delta", manifest.size_bytes, told, fetched.size_bytes, delta_bytes)
        return Mirrored(ours, offer.protocol, fetched, names, delta_bytes, (*whole, *known.whole))

    def _receive_delta(self, manifest: WeightManifest, endpoint: Endpoint, deadline: Deadline) -> tuple[Delta | None, tuple[str, ...]]:
        """Returns the delta that leads to ``manifest`` if the pod of ``endpoint`` has one, in this pod's memory; and why it could not be read."""
        reference = None if self._delta_memory is None else reference_to(self.shared, manifest)
        if reference is None or self._delta_memory is None:
            return None, ()
        try:
            if not elementwise.is_available():
                raise RunError("numpy is not installed here: pip install 'tandem-rl[deltas]'")
            source = self._open_source(endpoint, choose(endpoint, _DELTA_PROTOCOLS))
            return receive_delta(source, reference, self._delta_memory.begin, peer=endpoint.pod, deadline=deadline, patience_s=self._patience_s), ()
        except (RunError, CallError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            logger.warning("the delta to weights %s is not used: %s", describe(manifest.version), error)
            return None, (f"the delta to weights {describe(manifest.version)}: {error}",)

    def _sender(self, endpoint: Endpoint, offer: Offer, segment: str) -> Sender:
        source = self._open_source(endpoint, offer)
        assert isinstance(source, TcpSource)
        return Sender(source, segment)

    def _known(self, into: Segment, held: WeightManifest | None, is_again: bool, delta: Delta | None) -> LocalParts:
        """Returns the parts of earlier versions that are in this pod's memory: in ``into`` itself, from the version before the last, and those of the last."""
        own = self._brought.get(into.name)
        before = None if own is None or into.contents != contents_of(own) else own
        if self.buffers is None or held is None or not self._owns(held):
            return LocalParts(before, trusts=not is_again, delta=delta, threads=self._threads)
        segment = next(each for each in self.buffers.segments if each.name == _segment_of(held))
        beside = held if segment.contents == contents_of(held) else None
        return LocalParts(before, beside, segment, trusts=not is_again, delta=delta, threads=self._threads)

    def close(self) -> None:
        """Removes the buffers, unless a transfer may still write to them: then they are removed with the process."""
        self._threads.close()
        if self._delta_memory is not None:
            self._delta_memory.close()
        if self._stuck is not None:
            return
        self._close_source()
        if self.buffers is not None:
            self.buffers.close()

    def _source_of(self, endpoint: Endpoint, offer: Offer) -> Source:
        """Returns a source that is kept between versions, because memory that is registered for RDMA is registered once."""
        if self._source is None or self._source[:2] != (endpoint, offer):
            self._close_source()
            self._source = (endpoint, offer, self._open_source(endpoint, offer))
        return self._source[2]

    def _close_source(self) -> None:
        if self._source is not None:
            self._source[2].close()
        self._source = None

    def _owns(self, manifest: WeightManifest) -> bool:
        return self.buffers is not None and _segment_of(manifest) in self.buffers.names

    def _buffers(self, manifest: WeightManifest) -> WeightBuffers:
        needed = max((entry.offset_bytes + entry.size_bytes for entry in manifest.tensors), default=0)
        if self.buffers is None:
            check_free(2 * needed)
            self.buffers = self._create(needed)
        if needed > self.buffers.size_bytes:
            raise RunError(
                f"weights {describe(manifest.version)} need {needed} bytes and this pod's shared memory has {self.buffers.size_bytes}; their shapes "
                "have changed, so the pod must be started again"
            )
        return self.buffers


def _segment_of(manifest: WeightManifest) -> str:
    """Returns the segment of all tensors. Raises ``RunError`` if there are none, or several segments."""
    names = {entry.segment for entry in manifest.tensors}
    if len(names) != 1:
        raise RunError(f"weights {describe(manifest.version)} are in {len(names)} segments of shared memory; other pods can receive those in one")
    return names.pop()
