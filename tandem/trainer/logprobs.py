"""The inference pass: log-probabilities of the tokens of sequences, without gradient."""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.mixed import has_independent_rows
from tandem.model.decoder import Decoder
from tandem.trainer.micro_batch import MicroBatch, counted_indices, forward_tokens, make_micro_batches
from tandem.trainer.packing import pack_shares
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.step import Progress, TrainedModel, predict, stacked
from tandem.types import TrainSequence


class Inferring(Protocol):
    """A model on the ranks of a mesh that computes log-probabilities: ``Replica`` while it trains, ``FrozenReplica`` where it never does."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def model(self) -> TrainedModel: ...

    def passes(self, own: int, most: int) -> int:
        """Returns the number of micro-batches of this rank, which has ``own``, if one data-parallel rank has ``most``
        (``Replica.passes``)."""
        ...

    def infer(self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None) -> list[Tensor]:
        """Runs ``infer`` on this rank's micro-batches. Every rank of a data-parallel share returns all results."""
        ...

    def reshard(self) -> None:
        """Frees the weights that forward passes left gathered."""
        ...


@torch.no_grad()
def infer(
    model: Decoder, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None
) -> list[Tensor]:
    """Returns the log-probabilities (nats) of each micro-batch's counted tokens: float64 [2, R], raw and at ``temperature``; of a model with a value
    head the values of the states before them as the last row (``step.stacked``).

    The same packed forward pass as in training, hence the same bits; float64 holds those of any dtype."""
    values = []
    for done, micro_batch in enumerate(micro_batches, start=1):
        values.append(stacked(predict(model, micro_batch, temperature)))
        if on_progress is not None:
            on_progress(done, len(micro_batches))
    return values


def infer_sequences(
    forward: Inferring, sequences: Sequence[TrainSequence], micro_batch_tokens: int, temperature: float = 1.0,
    on_progress: Progress | None = None, share_prompts: bool = False,
) -> list[Tensor]:
    """Returns the log-probabilities (nats) of the counted tokens of each of ``sequences``: float64 [2, n] on the CPU, raw and at
    ``temperature``; of a model with a value head the values too (``infer``).

    Every rank of the mesh is given all of ``sequences`` and returns those of all; each data-parallel rank computes its share. What sequences begin with in
    common is computed once with ``share_prompts``, and wherever that changes no bit."""
    ranks = forward.ranks.data
    indices = [i for i, sequence in enumerate(sequences) if forward_tokens(sequence) > 0]
    counted = [sequences[i] for i in indices]
    can_share = _can_share(forward, counted)
    shares = pack_shares(counted, ranks.size, micro_batch_tokens, share_prompts, keep_groups=can_share)
    share_prompts = share_prompts or can_share
    logprobs = [torch.empty(forward.model.shapes.outputs, 0, dtype=torch.float64)] * len(sequences)
    if not counted:
        return logprobs
    own = shares[ranks.rank]
    passes = forward.passes(len(own), max(map(len, shares)))
    micro_batches = make_micro_batches(counted, own, passes, forward.model.dtype, forward.model.device, share_prompts=share_prompts)
    values = torch.cat(forward.infer(micro_batches, temperature, on_progress), dim=1).cpu()
    forward.reshard()
    orders = [list(itertools.chain.from_iterable(bins)) for bins in shares]
    rows = [[len(counted_indices(counted[i])) for i in order] for order in orders]
    if ranks.size > 1:
        most = max(map(sum, rows))
        gathered = ranks.all_gather(F.pad(values, (0, most - values.shape[1])), "log-probabilities")
        every = [part[:, : sum(counts)] for part, counts in zip(gathered, rows, strict=True)]
    else:
        every = [values]
    for order, counts, part in zip(orders, rows, every, strict=True):
        for place, value in zip(order, part.split(counts, dim=1), strict=True):
            logprobs[indices[place]] = value
    return logprobs


def _can_share(forward: Inferring, sequences: Sequence[TrainSequence]) -> bool:
    """Returns whether equal beginnings of ``sequences`` can be computed once without a change of any result."""
    model = forward.model
    if not isinstance(model, Decoder) or model.shapes.transformers is not None or not has_independent_rows(model.kernels):
        return False
    # In float64 products are torch's own, which give a row other bits when the number of rows changes; context-parallel ranks divide a batch by its rows.
    if model.dtype is torch.float64 or forward.ranks.groups["context"].size > 1:
        return False
    return model.router_balance is None and all(sequence.routed_experts is None for sequence in sequences)


def sequence_logprobs(
    forward: Inferring, sequences: Sequence[TrainSequence], micro_batch_tokens: int, temperature: float = 1.0,
    on_progress: Progress | None = None, share_prompts: bool = False,
) -> dict[str, tuple[float, ...]]:
    """Returns by sequence id the log-probability (nats, at ``temperature``) of each counted token: an entry per token, 0.0 elsewhere.

    Every rank of the mesh is given all of ``sequences`` and returns those of all (``infer_sequences``)."""
    logprobs = infer_sequences(forward, sequences, micro_batch_tokens, temperature, on_progress, share_prompts)
    return {sequence.id: per_token(sequence, values[1]) for sequence, values in zip(sequences, logprobs, strict=True)}


def sequence_values(
    forward: Inferring, sequences: Sequence[TrainSequence], micro_batch_tokens: int, on_progress: Progress | None = None, share_prompts: bool = False
) -> dict[str, tuple[float, ...]]:
    """Returns by sequence id the value of the state before each counted token, as ``sequence_logprobs`` does its log-probability."""
    values = infer_sequences(forward, sequences, micro_batch_tokens, on_progress=on_progress, share_prompts=share_prompts)
    return {sequence.id: per_token(sequence, rows[-1]) for sequence, rows in zip(sequences, values, strict=True)}


def per_token(sequence: TrainSequence, counted: Tensor) -> tuple[float, ...]:
    """Returns ``counted[n]``, the values of the counted tokens of ``sequence``, as an entry per token, 0.0 elsewhere."""
    values = [0.0] * len(sequence.token_ids)
    for index, value in zip(counted_indices(sequence), counted.tolist(), strict=True):
        values[index] = value
    return tuple(values)
