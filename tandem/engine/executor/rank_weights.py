"""Reads a rank's slices of published weights from shared memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tandem.engine.spec_decode.eagle3_draft import Eagle3Draft
from tandem.layout.eagle3 import PUBLISHED
from tandem.layout.parameters import published_parameters
from tandem.layout.sharding import local_parameters
from tandem.model.adopted import SharedTensors, adopt, adoptable_layout
from tandem.model.changed_weights import changes_elements
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_parts
from tandem.runtime.coordination.open import open_store
from tandem.runtime.rpc.calls import CallError, error_meta
from tandem.types import RunError, Updated, UserError, WeightSource, WeightVersion

if TYPE_CHECKING:
    from tandem.weight_transfer.shared_weights import SharedWeights
    from tandem.weight_transfer.update import Weights


class StagedWeights(NamedTuple):
    """Weights that every rank has read and verified, and that are not applied yet."""

    updated: Updated


def split_draft(tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Returns published ``tensors`` as those of the model and those of the draft head that is trained beside it, by their names in its folder (``None``: there
    is none)."""
    model, head = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors:
        if name.startswith(PUBLISHED):
            head[name.removeprefix(PUBLISHED)] = tensor
        else:
            model[name] = tensor
    return model, head or None


class RankWeights:
    """Reads the weights of one rank, and those of the draft head that ``head`` returns, if they are published. They are staged in private memory until
    ``apply`` loads them into ``decoder``, or are where they were published (``share``). ``shared``: those that ``apply`` has let the decoder compute with where
    they are (``None``: it holds a copy)."""

    def __init__(self, decoder: Decoder, source: WeightSource, head: Callable[[], Eagle3Draft | None] = lambda: None) -> None:
        # The digests need xxhash, which an engine that loads folders does without.
        from tandem.weight_transfer.update import WeightReader
        from tandem.weight_transfer.wanted import wanted_by

        self.decoder, self.source, self._head = decoder, source, head
        self._store = open_store(source.store)
        threads = max(1, source.threads // decoder.shard_spec.size)
        finds_elements = changes_elements(decoder)
        wanted = wanted_by(decoder.shapes, decoder.shard_spec, None if self.head is None else self.head.head.shapes)
        self._reader = WeightReader(self._store, threads, wanted, finds_elements=finds_elements)
        self._staged: Weights | None = None
        self._taken: SharedWeights | None = None
        self.shared: SharedWeights | None = None
        self._applied: tuple[object, ...] | None = None

    @property
    def head(self) -> Eagle3Draft | None:
        """The draft head that the engine has now."""
        return self._head()

    def share(self, version: WeightVersion) -> "SharedWeights | None":
        """Returns ``version`` where it was published, verified if the source says so; ``None`` if the engine must copy it. Raises the errors of
        ``SharedReader.take``."""
        layout = adoptable_layout(self.decoder) if self.source.shares else None
        rank = self.decoder.shard_spec.rank, self.decoder.shard_spec.size
        return None if layout is None else self._reader.share(version, layout, verifies=self.source.verifies, rank=rank)

    def read(self, version: WeightVersion) -> "Weights":
        """Reads, verifies and stages ``version``, or stages it unverified if the source says so. Raises the errors of ``WeightReader.read`` or ``view``."""
        self._staged = None
        weights = self._reader.read(version) if self.source.verifies else self._reader.view(version)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors}
        published = {name for name, _ in published_parameters(self.decoder.shapes)}
        held = [parameter for parameter in local_parameters(self.decoder.shapes, self.decoder.shard_spec) if parameter.name in published]
        missing = [name for name, shape in held if shapes.get(name) != shape]
        if missing:
            raise RunError(f"the published weights do not have '{missing[0]}' in the shape of the engine's model")
        self._staged = weights
        return weights

    def answer(self, version: WeightVersion) -> dict[str, Any]:
        """Stages ``version`` as ``share`` or ``read``, with a reply of plain values. Returns an error instead of raising it, so that the rank keeps running."""
        self._staged = self._taken = None
        try:
            self._taken = self.share(version)
            weights = self._taken or self.read(version)
        except (UserError, CallError) as error:
            return {"error": error_meta(error), "size_bytes": 0, "rereads": [], "revision": 0}
        return {"error": None, "size_bytes": weights.size_bytes, "rereads": list(weights.rereads), "revision": weights.revision}

    def apply(self) -> None:
        """Loads the staged weights into the decoder, and packs it, or lets it compute with them where they are."""
        self.shared = None
        if self._taken is not None:
            adopt(self.decoder, SharedTensors(self._taken.tensors, self._taken.in_panels))
        else:
            assert self._staged is not None
            load_parts(self.decoder, dict(self._staged.tensors), pack=True)
        self._staged, self._taken, self.shared = None, None, self._taken

    def changes(self) -> "Mapping[str, Tensor | None] | None":
        """Returns what differs between the staged weights and those that the decoder holds, as ``Weights.changes``; ``None`` if it does not hold those that
        were applied last, packed as they were."""
        assert self._staged is not None
        is_held = self._applied is not None and all(one is other for one, other in zip(self._applied, self.decoder.packed, strict=True))
        return self._staged.changes if is_held and self.source.verifies else None

    def was_applied(self) -> None:
        """Called when the decoder holds the staged weights."""
        self._reader.was_applied()
        self._staged, self._applied = None, self.decoder.packed if self.source.verifies and self.decoder.is_packed else None

    def close(self) -> None:
        self._reader.close()
        self._store.close()
