"""The inference pass: log-probabilities of what sequences hold, without gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Progress, predict


@torch.no_grad()
def infer(
    model: Decoder, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None
) -> dict[str, dict[int, float]]:
    """For every sequence id: the log-probability (nats, at ``temperature``) of each counted token, by its index in the
    sequence. The same packed forward as in training, hence the same bits."""
    found: dict[str, dict[int, float]] = {}
    for done, micro_batch in enumerate(micro_batches, start=1):
        collect(found, predict(model, micro_batch, temperature).scaled, micro_batch)
        if on_progress is not None:
            on_progress(done, len(micro_batches))
    return found


def collect(found: dict[str, dict[int, float]], logprobs: Tensor, micro_batch: MicroBatch) -> None:
    """Put ``logprobs[R]`` of a micro-batch's rows into ``found``."""
    indices = (micro_batch.positions[micro_batch.rows] + 1).tolist()
    for sequence, index, value in zip(micro_batch.sequence_of_row.tolist(), indices, logprobs.tolist(), strict=True):
        found.setdefault(micro_batch.ids[sequence], {})[index] = value


def per_token(found: dict[int, float], length: int) -> tuple[float, ...]:
    """One sequence's values as ``length`` entries, 0.0 where nothing was counted."""
    return tuple(found.get(index, 0.0) for index in range(length))
