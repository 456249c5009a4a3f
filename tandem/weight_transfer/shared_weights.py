"""The published weights of an engine that computes with them where they are, in the shared memory of its pod, without a copy of its own.

Nothing is copied or packed in an update: every part is compared with its digest where it is, and then the engine takes the addresses of the other buffer in
the place of those that it had. The trainer writes the next version to the buffer that the engine has left. Each segment's label says which weights it holds,
and is taken away before the first byte changes; whoever computed with a segment whose label is another one afterwards does not know with which weights.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.runtime.coordination.store import Store
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.errors import DamagedWeights, RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import Layout, WeightManifest
from tandem.weight_transfer.copying import Threads, address_of
from tandem.weight_transfer.parts import Wanted, is_row_major, part_copies, wants_all
from tandem.weight_transfer.publication import current, describe
from tandem.weight_transfer.shared_memory import Contents, OpenSegments, Segment, contents_of, decode_label
from tandem.weight_transfer.verify import damaged_parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """One version in shared memory, of which its reader needs ``size_bytes``. ``tensors``: views by name of what the reader needs; the matrices ``in_panels``
    are flat, in panels (``tandem.layout.panels``) and whole, those of a stack one behind the other. ``rereads`` and ``revision``: as in ``Updated``.
    ``label``: of their segment, which held ``contents`` when they were taken."""

    version: WeightVersion
    size_bytes: int
    tensors: Mapping[str, Tensor]
    in_panels: frozenset[str]
    rereads: tuple[str, ...]
    revision: int
    label: memoryview
    contents: Contents

    @property
    def are_there(self) -> bool:
        """Whether the shared memory still holds these weights."""
        return decode_label(bytes(self.label)) == self.contents


class SharedReader:
    """Takes one version after another out of those that are published in ``store``. ``segments``: those of its reader that copies; ``wanted``: the slices that
    it needs of each tensor. ``rank``: of how many that take a version together, and share out its parts to verify them."""

    def __init__(self, store: Store, threads: Threads, segments: OpenSegments, wanted: Wanted = wants_all, rank: tuple[int, int] = (0, 1)) -> None:
        self._store, self._threads, self._segments, self._wanted, self._rank = store, threads, segments, wanted, rank

    def take(self, version: WeightVersion, layout: Layout, *, verifies: bool) -> SharedWeights | None:
        """Returns ``version`` after every part of this rank's share was compared with its digest, or, unless it ``verifies``, for a caller whose caller does
        that; ``None`` if no matrix is in ``layout``, or the weights are in several segments: then they must be copied. A tensor whose parts are not rows one
        behind the other is put together in private memory.

        Raises ``DamagedWeights`` if a part does not have its digest twice, and ``RunError`` if nothing or another version is published, or it is published
        anew each time that it is read; ``PeerDied`` as ``WeightReader.read``."""
        damaged: list[tuple[str, str]] = []
        for _ in range(2):
            published = current(self._store)
            if published is None or published[0].version != version:
                what = "none are published" if published is None else f"{describe(published[0].version)} are published"
                raise RunError(f"weights {describe(version)} were requested, but {what}")
            (manifest, revision), before = published, damaged
            names = {entry.segment for entry in manifest.tensors}
            is_mixed = layout == "rows" and any(entry.layout != "rows" for entry in manifest.tensors)
            if len(names) != 1 or is_mixed or all(entry.layout != layout for entry in manifest.tensors):
                return None
            opened = self._segments.of(manifest)
            segment, contents = opened[names.pop()], contents_of(manifest)
            damaged = damaged_parts(manifest, opened, self._threads, self._rank) if verifies else []
            tensors, wrong, size_bytes = _tensors(manifest, segment, self._wanted)
            damaged += wrong
            if segment.contents != contents:
                damaged = damaged or [("", "")]
            if not damaged:
                in_panels = frozenset(entry.name for entry in manifest.tensors if entry.layout == "panels")
                rereads = tuple(dict.fromkeys(name for name, _ in before if name))
                return SharedWeights(version, size_bytes, tensors, in_panels, rereads, revision, segment.label, contents)
            logger.warning("weights %s are not what their manifest says: %s", describe(version), damaged[0][0] or "their memory was written to")
        name, digest = damaged[0]
        if not name:
            raise RunError(f"weights {describe(version)} were published again or replaced while they were read; update the engine again")
        raise DamagedWeights(
            f"tensor '{name}' of weights {describe(version)} was read twice and does not have its digest {digest}; the weights in shared memory are damaged"
        )


def _tensors(manifest: WeightManifest, segment: Segment, wanted: Wanted) -> tuple[dict[str, Tensor], list[tuple[str, str]], int]:
    """Returns what is ``wanted`` of every tensor, where it is: in panels flat and whole, in rows in its shape; put together in private memory where its parts
    are not rows of it. And the parts that did not have their digests in that, as ``damaged_parts``; and the bytes that are wanted."""
    # One tensor for all of the segment, so that matrices of a stack can be taken as one.
    memory, tensors, damaged = torch.frombuffer(segment.memory, dtype=torch.uint8), dict[str, Tensor](), list[tuple[str, str]]()
    size_bytes = 0
    for entry in manifest.tensors:
        offsets = wanted(entry.name, entry.shape)
        if offsets is None:
            continue
        size_bytes += offsets.numel * DTYPE_BYTES[entry.dtype]
        flat = memory[entry.offset_bytes : entry.offset_bytes + entry.size_bytes].view(getattr(torch, entry.dtype))
        assert flat.numel() == math.prod(entry.shape) and flat.element_size() == DTYPE_BYTES[entry.dtype]
        if entry.layout == "panels":
            tensors[entry.name] = flat
        elif is_row_major(entry):
            tensors[entry.name] = flat.view(entry.shape)[offsets.slices]
        else:
            tensors[entry.name] = torch.empty(offsets.shape, dtype=flat.dtype)
            copies = part_copies(entry, offsets)
            damaged += [(entry.name, copy.part.digest) for copy in copies if not copy.read(address_of(segment.memory), tensors[entry.name])]
    return tensors, damaged, size_bytes
