"""Replaces the whole set of weights between two steps."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Series

from torch import Tensor

from tandem.engine.core.components import EngineComponents
from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler import PauseMode, Scheduler
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.executor.model_runner import ModelRunner
from tandem.engine.executor.rank_weights import StagedWeights
from tandem.engine.spec_decode.eagle3_draft import Eagle3Draft
from tandem.engine.spec_decode.proposers import new_draft, put_draft
from tandem.model.adopted import SharedTensors, adopt
from tandem.model.changed_weights import load_changes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors
from tandem.model.weight_digests import weight_digests
from tandem.types import WeightVersion


def replace_weights(
    components: EngineComponents, tensors: Iterable[tuple[str, Tensor]] | StagedWeights | SharedTensors | Decoder, version: WeightVersion,
    draft_tensors: Iterable[tuple[str, Tensor]] | Eagle3Draft | None, with_digests: bool, changes: Mapping[str, Tensor | None] | None = None,
) -> dict[str, str]:
    """As ``Engine.update_weights``, while no step is in flight. Returns the digests of the plain weights ``with_digests``, else none. ``changes``: where
    ``tensors`` differ from what the decoder holds, as ``load_changes``; ``None``: not known. A ``Decoder``: a twin that holds them packed, and holds the
    others afterwards. An ``Eagle3Draft``: the head itself."""
    scheduler, runner = components.scheduler, components.runner
    draft = draft_tensors if draft_tensors is None or isinstance(draft_tensors, Eagle3Draft) else new_draft(runner.proposer, draft_tensors)
    is_kept = scheduler.pause is PauseMode.KEEP
    decoding = list(scheduler.running.by_row.values()) if is_kept else []
    if is_kept:
        scheduler.running.read_back(decoding)
    else:
        scheduler.preemption.preempt_all(Transition.UPDATE)
    try:
        digests = _load(runner, tensors, with_digests, changes)
    finally:
        if is_kept:
            _keep(scheduler, runner.batch, decoding)
    scheduler.kv_cache.weight_version = WeightVersion(*version)
    if draft is not None:
        put_draft(runner.proposer, draft)
    # Hashes of the old version cannot match. Without them the cached blocks are free, and free blocks are allocated first.
    scheduler.kv_cache.reset_prefix_cache()
    return digests


def _load(
    runner: ModelRunner, tensors: Iterable[tuple[str, Tensor]] | StagedWeights | SharedTensors | Decoder, with_digests: bool,
    changes: Mapping[str, Tensor | None] | None,
) -> dict[str, str]:  # fmt: skip
    if isinstance(tensors, Decoder):
        runner.decoder.exchange_weights(tensors)
        return {}
    if isinstance(tensors, SharedTensors):
        adopt(runner.decoder, tensors)
        return {}
    if runner.ranks is not None:
        runner.ranks.update_weights(tensors)
        return {}
    assert not isinstance(tensors, StagedWeights)
    if changes is not None and not with_digests and load_changes(runner.decoder, dict(tensors), changes):
        return {}
    # Digests are of plain weights, so packing waits until all of them are loaded.
    load_tensors(runner.decoder, tensors, pack=not with_digests)
    if not with_digests:
        return {}
    digests = weight_digests(runner.decoder)
    runner.decoder.pack()
    return digests


def _keep(scheduler: Scheduler, batch: InputBatch, sequences: Series[Sequence]) -> None:
    """Lets the decoding ``sequences``, whose tokens were read back, the current prefill and swapped-out sequences resume with their old keys
    and values, which the prefix cache must not share."""
    kept = list(sequences)
    prefilling = scheduler.running.prefilling
    if prefilling is not None:
        prefilling.block_hashes = []
        kept += prefilling.sequences
    kept += [sequence for prefill in scheduler.waiting if prefill.host_blocks for sequence in prefill.sequences]
    for sequence in kept:
        sequence.is_mixed = True
    if sequences:
        batch.join(sequences, [sequence.num_known_tokens for sequence in sequences])
    # The runner caches its selection of rows by the identity of this tuple.
    scheduler.running.invalidate_rows()
