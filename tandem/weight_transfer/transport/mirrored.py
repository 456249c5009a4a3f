"""What a pod has brought of another pod's weights. No torch."""

from dataclasses import dataclass, replace

from tandem.types.errors import RunError
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.delta import Delta
from tandem.weight_transfer.publication import describe
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.transport.fetch import Fetched

NOTHING_FETCHED = Fetched((), 0)


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A version that this pod's engines can read now. ``protocol``: what carried it, empty if it was here before. ``peers``: the pods beside the trainer's that
    it was asked of. ``delta_bytes``: of the element-wise delta that came instead of whole parts, and ``whole``: why it, or parts of it, were not used.
    ``early_bytes``: of those that came, how many came before it was published."""

    manifest: WeightManifest
    protocol: str
    fetched: Fetched
    peers: tuple[str, ...] = ()
    delta_bytes: int = 0
    whole: tuple[str, ...] = ()
    early_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A version that is verified in this pod's memory, and not published to its engines yet. ``origin``: who sent it, for the log. The rest as of
    ``Mirrored``."""

    manifest: WeightManifest
    protocol: str
    fetched: Fetched
    origin: str
    delta: Delta | None
    peers: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    early_bytes: int = 0


def in_segment(manifest: WeightManifest, segment: Segment) -> WeightManifest:
    """Returns ``manifest`` as it is in ``segment``."""
    return replace(manifest, tensors=tuple(replace(entry, segment=segment.name) for entry in manifest.tensors))


def segment_of(manifest: WeightManifest) -> str:
    """Returns the segment of all tensors. Raises ``RunError`` if there are none, or several segments."""
    names = {entry.segment for entry in manifest.tensors}
    if len(names) != 1:
        raise RunError(f"weights {describe(manifest.version)} are in {len(names)} segments of shared memory; other pods can receive those in one")
    return names.pop()
