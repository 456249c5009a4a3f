"""The entropy of the policy at each token that an update learns from, for people who look at samples.

The losses have it already: nothing is computed for it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.model.head_outputs import HeadOutputs
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.micro_batch import MicroBatch, counted_indices
from tandem.trainer.step import Loss, LossShare
from tandem.types import TrainSequence
from tandem.types.token_entropies import TokenEntropies, pack_halves

MOST_TOKENS = 2**20
"""Tokens of a step that are kept: 2 MiB."""


class EntropyRecord:
    """The entropies of the passes of one step. A token that the step passes several times has that of the first."""

    def __init__(self) -> None:
        self._passes: list[tuple[tuple[str, ...], Tensor]] = []

    def of(self, loss: Loss) -> Loss:
        """Returns ``loss``, which also keeps the entropies of what it is given."""

        def recorded(outputs: HeadOutputs, rows: MicroBatch) -> LossShare:
            self._passes.append((rows.ids, outputs.logprobs.entropy.detach()))
            return loss(outputs, rows)

        return recorded

    def take(self, sequences: Sequence[TrainSequence], world: Communicator, device: torch.device) -> TokenEntropies:
        """Returns what all ranks of ``world`` have kept of ``sequences``, the first of them up to ``MOST_TOKENS``, and forgets it. Every rank calls it, and
        the first one is told."""
        places = {sequence.id: counted_indices(sequence) for sequence in sequences}
        ends = itertools.accumulate(len(places[sequence.id]) for sequence in sequences)
        kept = [sequence for sequence, end in zip(sequences, ends, strict=True) if end <= MOST_TOKENS]
        counts, rows = [len(places[sequence.id]) for sequence in kept], self._by_sequence(places)
        if not sum(counts):
            return {}
        # The second row counts who has it: ranks of one tensor-parallel group have the same tokens, and some stages of a pipeline none.
        own = [rows.get(sequence.id) for sequence in kept]
        values = torch.stack((
            torch.cat([torch.zeros(count, device=device) if each is None else each.float() for each, count in zip(own, counts, strict=True)]),
            torch.tensor([float(each is not None) for each in own], device=device).repeat_interleave(torch.tensor(counts, device=device)),
        ))  # fmt: skip
        values = world.all_reduce(values, "entropies")
        if world.rank:
            return {}
        means, ends = (values[0] / values[1]).tolist(), itertools.accumulate(counts)
        of_sequences = ((sequence, means[end - count : end]) for sequence, count, end in zip(kept, counts, ends, strict=True))
        return {
            sequence.id: pack_halves(_of_completion(sequence, places[sequence.id], each))
            for sequence, each in of_sequences if each and not any(map(math.isnan, each))
        }  # fmt: skip

    def _by_sequence(self, places: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Returns the entropies of each sequence that this rank has passed. ``places``: the counted tokens of all."""
        of_rank: dict[str, Tensor] = {}
        for ids, entropy in self._passes:
            # A rank without data makes passes of nothing.
            if len(entropy):
                for name, own in zip(ids, entropy.split([len(places[each]) for each in ids]), strict=True):
                    of_rank.setdefault(name, own)
        self._passes.clear()
        return of_rank


def _of_completion(sequence: TrainSequence, places: Sequence[int], values: Sequence[float]) -> list[float]:
    """Returns an entry for each token after the prompt, NaN for one that does not count."""
    completion = [float("nan")] * (len(sequence.token_ids) - sequence.prompt_length)
    for place, value in zip(places, values, strict=True):
        if place >= sequence.prompt_length:
            completion[place - sequence.prompt_length] = value
    return completion
