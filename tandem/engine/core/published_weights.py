"""The published weights of an engine of one rank: read and taken between two steps, or staged beside its steps and then only put in the place of the others."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from tandem.engine.core.components import EngineComponents
from tandem.engine.core.staging import Staged, Staging, can_stage, stage
from tandem.engine.core.weight_updates import replace_weights
from tandem.engine.executor.rank_weights import RankWeights, split_draft
from tandem.engine.kv_cache.kv_cache_manager import DUMMY_VERSION
from tandem.engine.spec_decode.proposers import eagle3_of
from tandem.model.adopted import SharedTensors
from tandem.types import EngineDied, Updated, WeightSource, WeightVersion

if TYPE_CHECKING:
    from tandem.weight_transfer.shared_weights import SharedWeights

FREE_AFTER_S = 0.2
"""After an update, in a thread of its own: freeing the weights that were replaced may take longer than replacing them."""


class PublishedWeights:
    """``with_digests``: whether each set of weights is digested before it is packed. ``shared``: those that the engine computes with where they are."""

    def __init__(self, components: EngineComponents, with_digests: bool) -> None:
        self._components, self._with_digests = components, with_digests
        self.shared: SharedWeights | None = None
        self._weights: RankWeights | None = None
        self._staging: Staging | None = None
        self._replaced: Staged | None = None

    def update(self, source: WeightSource, version: WeightVersion) -> tuple[Updated, dict[str, str]]:
        """As ``Engine.update_weights_from``, while no step is in flight. Returns the digests of the plain weights too, if they are digested."""
        staged = self._take_staged(source, version)
        if staged is not None:
            replace_weights(self._components, staged.twin, version, staged.draft, with_digests=False)
            if staged.shared is None:
                self._opened(source).was_applied()
            self.shared, self._replaced = staged.shared, staged
            freeing = threading.Timer(FREE_AFTER_S, self._free_replaced)
            freeing.daemon = True
            freeing.start()
            return staged.updated, staged.digests
        weights, called = self._opened(source), version if source.verifies else DUMMY_VERSION
        shared = None if self._with_digests else weights.share(version)
        if shared is not None:
            model, draft = split_draft(shared.tensors.items())
            replace_weights(self._components, SharedTensors(model, shared.in_panels), called, _listed(draft), with_digests=False)
            self.shared = shared
            return Updated(version, shared.size_bytes, shared.rereads, shared.revision), {}
        read = weights.read(version)
        model, draft = split_draft(read.tensors)
        changes = weights.changes()
        known = None if changes is None else {name: where for name, where in changes.items() if name in model}
        digests = replace_weights(self._components, model.items(), called, _listed(draft), self._with_digests, known)
        weights.was_applied()
        self.shared = None
        return Updated(version, read.size_bytes, read.rereads, read.revision), digests

    def stage(self, source: WeightSource, version: WeightVersion, on_end: Callable[[], None]) -> Staging:
        """As ``Engine.stage_weights_from``."""
        before, decoder = self._staging, self._components.runner.decoder

        def make() -> Staged | None:
            self._free_replaced()
            if before is not None:
                before.wait()
                before.drop()
            return stage(self._opened(source), version, with_digests=self._with_digests)

        is_possible = can_stage(decoder, source) and self._components.runner.ranks is None
        self._staging = Staging(source, version, make if is_possible else lambda: None, on_end)
        return self._staging

    def check_shared(self) -> None:
        """Raises ``EngineDied`` if the shared memory that the engine computes with was written to."""
        if self.shared is not None and not self.shared.are_there:
            raise EngineDied(f"the shared memory with the weights of step {self.shared.version.step} was written to while the engine computed with them")

    def close(self) -> None:
        """Waits for what is being staged, and closes shared memory."""
        if self._staging is not None:
            self._staging.wait()
        self._staging = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def _take_staged(self, source: WeightSource, version: WeightVersion) -> Staged | None:
        """Returns what was staged of ``version``, once; ``None`` if it must be read. Waits for what is being staged, which uses the same memory."""
        staging, self._staging = self._staging, None
        if staging is None:
            return None
        staging.wait()
        staged = staging.staged if (staging.source, staging.version) == (source, version) else None
        # Memory that is written to again holds another version by now, or is repaired.
        return staged if staged is not None and (staged.shared is None or staged.shared.are_there) else None

    def _free_replaced(self) -> None:
        self._replaced = None

    def _opened(self, source: WeightSource) -> RankWeights:
        if self._weights is None or self._weights.source != source:
            if self._weights is not None:
                self._weights.close()
            runner = self._components.runner
            self._weights = RankWeights(runner.decoder, source, lambda: eagle3_of(runner.proposer))
        return self._weights


def _listed(draft: Mapping[str, Tensor] | None) -> Iterable[tuple[str, Tensor]] | None:
    return None if draft is None else draft.items()
