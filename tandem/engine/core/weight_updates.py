"""A whole set of weights takes the place of another, between two steps."""

from collections.abc import Iterable
from collections.abc import Sequence as Series

from torch import Tensor

from tandem.engine.core import preemption
from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.parts import Parts
from tandem.engine.core.request import Sequence
from tandem.engine.core.state import PauseMode, SchedulerState
from tandem.engine.executor.input_batch import RowTable
from tandem.engine.executor.model_runner import Runner
from tandem.engine.spec_decode.draft_model import DraftModel
from tandem.engine.spec_decode.proposers import new_draft
from tandem.model.huggingface import load_tensors
from tandem.model.weight_digests import weight_digests
from tandem.types import WeightVersion


def replace_weights(
    parts: Parts, tensors: Iterable[tuple[str, Tensor]], version: WeightVersion, draft_tensors: Iterable[tuple[str, Tensor]] | None,
    with_digests: bool,
) -> dict[str, str]:
    """As ``Engine.update_weights``, while no step is under way; returns the digests of the plain weights, where they are asked for."""
    state, runner, overlap = parts
    draft = None if draft_tensors is None else new_draft(runner.proposer, draft_tensors)
    is_kept = state.pause is PauseMode.KEEP
    held = list(state.decoding.values()) if is_kept else []
    if is_kept:
        state.read_back(held)
    else:
        preemption.preempt_all(state, Transition.UPDATE)
    try:
        digests = _load(runner, tensors, with_digests)
    finally:
        if is_kept:
            _keep(state, runner.table, held)
        if overlap is not None:
            overlap.forget()
    state.version = WeightVersion(*version)
    if draft is not None and isinstance(runner.proposer, DraftModel):
        runner.proposer.decoder = draft
    # Keys of the old version cannot match any more. Their blocks are used first: their memory is warm.
    state.allocator.forget_all()
    return digests


def _load(runner: Runner, tensors: Iterable[tuple[str, Tensor]], with_digests: bool) -> dict[str, str]:
    if runner.ranks is not None:
        runner.ranks.update_weights(tensors)
        return {}
    # Digests are those of plain weights, all of which must be there then.
    load_tensors(runner.decoder, tensors, pack=not with_digests)
    if not with_digests:
        return {}
    digests = weight_digests(runner.decoder)
    runner.decoder.pack()
    return digests


def _keep(state: SchedulerState, table: RowTable, sequences: Series[Sequence]) -> None:
    """Let what is under way go on with the keys and values it has, which nobody else may find: the decoding ``sequences``, whose tokens
    were read back, the prefill under way, and what stands in host memory."""
    held = list(sequences)
    if state.prefilling is not None:
        state.prefilling.keys = []
        held += state.prefilling.sequences
    held += [sequence for _, waiting in state.waiting if waiting.host_blocks for sequence in waiting.sequences]
    for sequence in held:
        sequence.is_mixed = True
    if sequences:
        table.join(sequences, [len(sequence.known_tokens) for sequence in sequences])
    # The runner keeps what it selected as long as this tuple is the same.
    state.decode_rows = None
