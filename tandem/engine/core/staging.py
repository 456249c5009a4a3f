"""A version of the weights that is read, verified and packed beside the steps of an engine, in memory of its own.

The engine's decoder is not touched before the version is complete, so staging changes nothing that is sampled; what was damaged was read again, or the
version is refused, before any engine pauses for it. The pause is then an exchange of references.
"""

import errno
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.engine.executor.rank_weights import RankWeights, split_draft
from tandem.engine.spec_decode.eagle3_draft import Eagle3Draft
from tandem.layout.eagle3 import published_head
from tandem.layout.parameters import published_parameters
from tandem.model.adopted import SharedTensors, adopt
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_parts
from tandem.model.weight_digests import weight_digests
from tandem.runtime.machine.available_memory import available_bytes
from tandem.types import Updated, WeightSource, WeightVersion

if TYPE_CHECKING:
    from tandem.weight_transfer.shared_weights import SharedWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that an engine can compute with at once: ``twin`` holds it, packed. ``digests``: of its plain weights, if they are digested. ``shared``: the
    shared memory that ``twin`` computes with; ``None``: it has memory of its own. ``draft``: the draft head that was published with them."""

    twin: Decoder
    updated: Updated
    digests: dict[str, str]
    shared: "SharedWeights | None" = None
    draft: Eagle3Draft | None = None


class Staging:
    """``version`` of ``source`` on its way: ``make`` stages it in a thread, which calls ``on_end`` at its end. ``staged``: what came of it; ``None`` until
    then, and if it cannot be staged; ``error``: what ended it."""

    def __init__(self, source: WeightSource, version: WeightVersion, make: Callable[[], Staged | None], on_end: Callable[[], None]) -> None:
        self.source, self.version = source, version
        self.staged: Staged | None = None
        self.error: Exception | None = None
        self._make, self._on_end = make, on_end
        self._thread = threading.Thread(target=self._run, name=f"stages the weights of step {version.step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.staged = self._make()
        except Exception as error:
            self.error = error
        self._on_end()

    def wait(self) -> None:
        """Waits until it has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def result(self) -> bool:
        """Waits until it has ended; returns whether the version is staged. Raises what ended it, as ``WeightReader.read``."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.staged is not None

    def drop(self) -> None:
        """Frees what was staged and not taken."""
        self.staged = None


def can_stage(decoder: Decoder, source: WeightSource) -> bool:
    """Returns whether weights of ``source`` are staged for ``decoder``: not where a rank holds a shard, on a GPU, whose memory has no room for a second set,
    for an adapter alone, which is small, where others verify them after the engine has taken them, and for a module of transformers in 16 bits, whose twin is
    made under another default dtype of the whole process, which steps meanwhile would see."""
    if decoder.shapes.transformers is not None and decoder.dtype != torch.get_default_dtype():
        return False
    return decoder.group is None and decoder.device.type == "cpu" and decoder.shapes.lora is None and source.verifies


def stage(weights: RankWeights, version: WeightVersion, *, with_digests: bool) -> Staged | None:
    """Returns ``version``, verified and packed; ``None`` if the memory is too short for a second set of weights. Raises as ``RankWeights.share`` and
    ``read``."""
    try:
        shared = None if with_digests else weights.share(version)
        if shared is None and not _has_room(weights, version):
            return None
        twin = weights.decoder.twin()
        if shared is not None:
            model, head = split_draft(shared.tensors.items())
            adopt(twin, SharedTensors(model, shared.in_panels))
            return Staged(twin, Updated(version, shared.size_bytes, shared.rereads, shared.revision), {}, shared, _draft(weights, head))
        read = weights.read(version)
        model, head = split_draft(read.tensors)
        load_parts(twin, model, pack=not with_digests)
        digests = weight_digests(twin) if with_digests else {}
        if with_digests:
            twin.pack()
        return Staged(twin, Updated(version, read.size_bytes, read.rereads, read.revision), digests, draft=_draft(weights, head))
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        _tell_short(version, str(error))
        return None


def _draft(weights: RankWeights, tensors: Mapping[str, Tensor] | None) -> Eagle3Draft | None:
    """Returns the head with the published ``tensors`` of it, if there are any."""
    assert tensors is None or weights.head is not None
    return None if tensors is None or weights.head is None else weights.head.with_weights(tensors)


def _has_room(weights: RankWeights, version: WeightVersion) -> bool:
    decoder = weights.decoder
    published = [*published_parameters(decoder.shapes), *(() if weights.head is None else published_head(weights.head.head.shapes))]
    size_bytes: int = sum(parameter.numel for parameter in published) * decoder.dtype.itemsize
    # The set that is packed, and, the first time, the private memory that it is read to; plain matrices too where they are digested before they are packed.
    needed, free = 2 * size_bytes, available_bytes(0)
    if needed > free:
        _tell_short(version, f"they need {needed / 2**20:,.1f} MiB beside those in use, and {free / 2**20:,.1f} MiB may be used")
    return needed <= free


def _tell_short(version: WeightVersion, why: str) -> None:
    logger.warning("memory is too short to stage the weights of step %d beside those in use: %s; the engine pauses while it reads them", version.step, why)


def _is_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM) or "allocate memory" in str(error)
