"""Brings the published weights of another pod to the shared memory of this one, and publishes them to the engines here. No torch."""

import logging
from collections.abc import Callable, Collection

from tandem.runtime.coordination.store import Store
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import CallError
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.announcement import Announcement
from tandem.weight_transfer.copying import Threads
from tandem.weight_transfer.delta import Delta, DeltaMemory, publish_reference, reference_to
from tandem.weight_transfer.publication import current, describe, publish, replaceable
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers, check_free, contents_of
from tandem.weight_transfer.stored.storage_source import StorageSource, StoredWeights
from tandem.weight_transfer.stored.stored_file import SEGMENT, StoredDamage
from tandem.weight_transfer.transport.early import Arrived, Begun, EarlyReading
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer, Protocol, choose, endpoint_of, peers_with
from tandem.weight_transfer.transport.fetch import fetch
from tandem.weight_transfer.transport.local_parts import LocalParts
from tandem.weight_transfer.transport.mirrored import NOTHING_FETCHED, Mirrored, Received, in_segment, segment_of
from tandem.weight_transfer.transport.pieces import Source, SourceStuck, pieces_of
from tandem.weight_transfer.transport.receive_delta import receive_delta
from tandem.weight_transfer.transport.several_senders import Sender, SeveralSenders
from tandem.weight_transfer.transport.tcp_source import TcpSource

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
OpenSource = Callable[[Endpoint, Offer], Source]
"""(endpoint of the other pod, the chosen one of its offers) -> what reads from it."""
_DELTA_PROTOCOLS: tuple[Protocol, ...] = ("tcp",)


class WeightMirror:
    """``shared``: the store of the run, in which the trainer's pod publishes; ``own``: the store of this pod, which its engines read. ``stored``: the object
    storage that the run writes its versions to, which is read first; without ``shared``, alone.

    Two buffers take turns, as in the trainer's pod: what the engines may be reading is not written to. They are made by ``create`` for the first
    version, of its size, and live as long as the mirror. ``patience_s``: as of ``fetch``. ``pod``: this one's id, which is not asked for its own weights.
    ``delta_memory``: for element-wise deltas, which are read where the trainer's pod has one; ``None``: they are not. ``threads``: as many copy within this
    pod.
    """

    def __init__(
        self, shared: Store | None, own: Store, create: Callable[[int], WeightBuffers], open_source: OpenSource | None, *, patience_s: float = 10.0,
        pod: str = "", delta_memory: DeltaMemory | None = None, threads: int = 1, stored: StoredWeights | None = None,
    ) -> None:  # fmt: skip
        self.shared, self.own, self._patience_s, self._pod, self._stored = shared, own, patience_s, pod, stored
        self._create, self._open_source = create, open_source
        self.buffers: WeightBuffers | None = None
        self._source: tuple[Endpoint, Offer, Source] | None = None
        self._stuck: SourceStuck | None = None
        self._delta_memory, self._threads = delta_memory, Threads(threads)
        # What each segment holds, of what this mirror has brought, and the revision of the last.
        self._brought: dict[str, WeightManifest] = {}
        self._revision = 0
        self._early: EarlyReading | None = None

    def begin_early(self, version: WeightVersion, protocols: Collection[Protocol], deadline: Deadline) -> None:
        """Begins to read ``version``, which is not published yet, when the trainer's pod announces it, part by part as they are ready, to the buffer that is
        free, and returns. What has come until ``bring`` is not read again. Nothing of it is published, and it is no error where that cannot be: if the
        version is never announced, over another protocol than TCP, with too little memory, or after ``deadline`` it is read as without this."""
        self._end_early(None, deadline, lambda done, total: None)
        before = replaceable(self.own)
        if self.shared is None or self._stuck is not None or (before is not None and before[0] is not None and before[0].version >= version):
            return
        held = None if before is None else before[0]
        self._early = EarlyReading(
            self.shared, version, lambda announcement: self._begin(announcement, held, protocols, version), deadline, self._patience_s
        )

    def _begin(
        self, announcement: Announcement, held: WeightManifest | None, protocols: Collection[Protocol], version: WeightVersion
    ) -> Begun:  # fmt: skip
        """Chooses where an announced version is read from, and takes the free buffer for it. Raises ``RunError`` if it cannot be read early."""
        assert self.shared is not None
        endpoint = endpoint_of(self.shared, announcement.segment)
        offer = choose(endpoint, protocols)
        if offer.protocol != "tcp":
            raise RunError(f"over {offer.protocol} they are read when they are published")
        source, follower = self._opened(endpoint, offer), self._opened(endpoint, offer)
        assert isinstance(source, TcpSource) and isinstance(follower, TcpSource)
        into = self._allocated(announcement.size_bytes, version).other(None if held is None else held.tensors[0].segment)
        known = self._known(into, held, False, None)
        self._brought.pop(into.name, None)
        into.contents = None
        logger.info("weights %s are read from pod %s while they are registered", describe(version), endpoint.pod)
        return Begun(source, follower, into, known)

    def _end_early(self, published: WeightManifest | None, deadline: Deadline, on_progress: OnProgress) -> Arrived | None:
        """Ends what is read early; if that is what is ``published``, when all of it has come, or nothing more comes. Returns what has."""
        early, self._early = self._early, None
        try:
            if early is None or published is None or published.version != early.version:
                return None if early is None else early.end()
            return early.finish(pieces_of(published), deadline, lambda done: on_progress(done, published.size_bytes))
        except SourceStuck as stuck:
            self._stuck = stuck
            raise

    def bring(
        self, version: WeightVersion | None, protocols: Collection[Protocol], deadline: Deadline,
        on_progress: OnProgress = lambda done, total: None,
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
        manifest, revision = self._published(version)
        early = self._end_early(manifest, deadline, on_progress)
        before = replaceable(self.own)
        held = before[0] if before else None
        is_again = held is not None and (held.version, held.digest) == (manifest.version, manifest.digest) and self._owns(held)
        if held is not None and is_again and revision == self._revision:
            return Mirrored(held, "", NOTHING_FETCHED)
        arrived = self._from_storage(manifest, held, is_again, deadline, on_progress) if self._stored is not None else None
        if arrived is None:
            # What was read from the storage may be in the place of what came early.
            early = early if self._stored is None else None
            arrived = self._from_pods(manifest, held, is_again, protocols, deadline, on_progress, early)
        if self._delta_memory is not None:
            publish_reference(self.own, None if arrived.delta is None else arrived.delta.reference)
        publish(self.own, arrived.manifest, before)
        self._brought[segment_of(arrived.manifest)], self._revision = arrived.manifest, revision
        told, delta_bytes = describe(manifest.version), arrived.delta.reference.size_bytes if arrived.delta else 0
        logger.info("weights %s came from %s over %s", told, arrived.origin, arrived.protocol)
        logger.info("of the %d bytes of weights %s %d came whole, and %d of a delta", manifest.size_bytes, told, arrived.fetched.size_bytes, delta_bytes)
        if arrived.early_bytes:
            logger.info("%d bytes of weights %s came before they were published", arrived.early_bytes, told)
        return Mirrored(arrived.manifest, arrived.protocol, arrived.fetched, arrived.peers, delta_bytes, arrived.whole, arrived.early_bytes)

    def _published(self, version: WeightVersion | None) -> tuple[WeightManifest, int]:
        """Returns the manifest of ``version`` and the revision of its publication."""
        if self.shared is None:
            assert self._stored is not None
            newest = self._stored.newest()
            published = None if newest is None else (newest.manifest, 0)
        else:
            published = current(self.shared)
        if published is None:
            raise RunError("no weights are published; the trainer registers them before other pods receive them")
        if version is not None and published[0].version != version:
            raise RunError(f"weights {describe(version)} were requested, but {describe(published[0].version)} are published")
        return published

    def _from_storage(
        self, manifest: WeightManifest, held: WeightManifest | None, is_again: bool, deadline: Deadline, on_progress: OnProgress
    ) -> Received | None:
        """Reads ``manifest`` from the storage; ``None`` if that cannot be, and it can be read from other pods."""
        assert self._stored is not None
        stored, contents = self._stored, contents_of(manifest)

        def begin(size_bytes: int) -> Segment:
            assert self._delta_memory is not None
            return self._delta_memory.begin(size_bytes)

        try:
            stored.wait_for(contents, Deadline(self._patience_s, deadline))
            uses_delta = self._delta_memory is not None and not is_again and held is not None and elementwise.is_available()
            delta = stored.delta_to(contents, begin) if uses_delta else None
            into, known = self._into(manifest, held, is_again, delta)
            source = StorageSource(stored)
            fetched = fetch(
                source, manifest, SEGMENT, into, known, peer=stored.url, deadline=deadline, patience_s=self._patience_s, on_progress=on_progress
            )
            return Received(in_segment(manifest, into), "storage", fetched, f"'{stored.url}'", delta, whole=tuple(known.whole))
        except (RunError, CallError, FileNotFoundError) as error:
            if isinstance(error, StoredDamage):
                stored.ask_for_anchor(str(error))
            if self.shared is None:
                raise
            logger.warning("weights %s are read from other pods: %s", describe(manifest.version), error)
            return None

    def _into(self, manifest: WeightManifest, held: WeightManifest | None, is_again: bool, delta: Delta | None) -> tuple[Segment, LocalParts]:
        """Returns the segment that the version is brought to, and what is here of it."""
        into = self._buffers(manifest).other(None if held is None else held.tensors[0].segment)
        known = self._known(into, held, is_again, delta)
        self._brought.pop(into.name, None)
        return into, known

    def _from_pods(
        self, manifest: WeightManifest, held: WeightManifest | None, is_again: bool, protocols: Collection[Protocol], deadline: Deadline,
        on_progress: OnProgress, early: Arrived | None,
    ) -> Received:  # fmt: skip
        """Reads ``manifest`` from the pods that have it; ``early``: what has come of it."""
        assert self.shared is not None
        segment = segment_of(manifest)
        endpoint = endpoint_of(self.shared, segment)
        offer = choose(endpoint, protocols)
        self._buffers(manifest)
        delta, whole = (None, ()) if is_again or held is None else self._receive_delta(manifest, endpoint, deadline)
        into, known = self._into(manifest, held, is_again, delta)
        early = early if early is not None and early.segment is into and not is_again else None
        early_bytes = 0 if early is None else early.early_bytes
        try:
            source = self._source_of(endpoint, offer)
            peers = peers_with(self.shared, contents_of(manifest), self._pod) if isinstance(source, TcpSource) else []
            if isinstance(source, TcpSource) and peers:
                source = SeveralSenders([self._sender(*each) for each in peers], Sender(source, segment))
            fetched = fetch(
                source, manifest, segment, into, known, peer=endpoint.pod, deadline=deadline, patience_s=self._patience_s, on_progress=on_progress,
                early=early,
            )  # fmt: skip
        except SourceStuck as stuck:
            self._stuck = stuck
            raise
        except BaseException:
            self._close_source()
            raise
        names = tuple(peer.pod for peer, _, _ in peers)
        origin = f"pod {', '.join(names) or endpoint.pod}"
        return Received(in_segment(manifest, into), offer.protocol, fetched, origin, delta, names, (*whole, *known.whole), early_bytes)

    def _receive_delta(self, manifest: WeightManifest, endpoint: Endpoint, deadline: Deadline) -> tuple[Delta | None, tuple[str, ...]]:
        """Returns the delta that leads to ``manifest`` if the pod of ``endpoint`` has one, in this pod's memory; and why it could not be read."""
        reference = None if self._delta_memory is None or self.shared is None else reference_to(self.shared, manifest)
        if reference is None or self._delta_memory is None:
            return None, ()
        try:
            if not elementwise.is_available():
                raise RunError("numpy is not installed here: pip install 'tandem-rl[deltas]'")
            source = self._opened(endpoint, choose(endpoint, _DELTA_PROTOCOLS))
            return receive_delta(source, reference, self._delta_memory.begin, peer=endpoint.pod, deadline=deadline, patience_s=self._patience_s), ()
        except (RunError, CallError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            logger.warning("the delta to weights %s is not used: %s", describe(manifest.version), error)
            return None, (f"the delta to weights {describe(manifest.version)}: {error}",)

    def _sender(self, endpoint: Endpoint, offer: Offer, segment: str) -> Sender:
        source = self._opened(endpoint, offer)
        assert isinstance(source, TcpSource)
        return Sender(source, segment)

    def _opened(self, endpoint: Endpoint, offer: Offer) -> Source:
        assert self._open_source is not None
        return self._open_source(endpoint, offer)

    def _known(self, into: Segment, held: WeightManifest | None, is_again: bool, delta: Delta | None) -> LocalParts:
        """Returns the parts of earlier versions that are in this pod's memory: in ``into`` itself, from the version before the last, and those of the last."""
        own = self._brought.get(into.name)
        before = None if own is None or into.contents != contents_of(own) else own
        if self.buffers is None or held is None or not self._owns(held):
            return LocalParts(before, trusts=not is_again, delta=delta, threads=self._threads)
        segment = next(each for each in self.buffers.segments if each.name == segment_of(held))
        beside = held if segment.contents == contents_of(held) else None
        return LocalParts(before, beside, segment, trusts=not is_again, delta=delta, threads=self._threads)

    def close(self) -> None:
        """Removes the buffers, unless a transfer may still write to them: then they are removed with the process."""
        if self._early is not None:
            try:
                self._early.close()
            except SourceStuck as stuck:
                self._stuck = stuck
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
            self._source = (endpoint, offer, self._opened(endpoint, offer))
        return self._source[2]

    def _close_source(self) -> None:
        if self._source is not None:
            self._source[2].close()
        self._source = None

    def _owns(self, manifest: WeightManifest) -> bool:
        return self.buffers is not None and segment_of(manifest) in self.buffers.names

    def _buffers(self, manifest: WeightManifest) -> WeightBuffers:
        return self._allocated(max((entry.offset_bytes + entry.size_bytes for entry in manifest.tensors), default=0), manifest.version)

    def _allocated(self, needed: int, version: WeightVersion) -> WeightBuffers:
        """Returns the buffers, made for ``needed`` bytes of ``version`` if there are none."""
        if self.buffers is None:
            check_free(2 * needed)
            self.buffers = self._create(needed)
        if needed > self.buffers.size_bytes:
            raise RunError(
                f"weights {describe(version)} need {needed} bytes and this pod's shared memory has {self.buffers.size_bytes}; their shapes "
                "have changed, so the pod must be started again"
            )
        return self.buffers
