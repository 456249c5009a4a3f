"""The minibatches of an update, on every rank: which sequences each takes, and what the updates of a step give together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.trainer.grad_scaler import Verdict
from tandem.trainer.micro_batch import Bin, MicroBatch, make_micro_batches
from tandem.trainer.packing import pack_pair_shares, pack_shares, split
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.step import StepResult
from tandem.types import TrainSequence


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The sequences of one update, over all ranks. ``bins``: this rank's micro-batches; ``passes``: the number of passes it makes, blank
    ones included."""

    sequences: Sequence[TrainSequence]
    bins: Sequence[Bin]
    passes: int

    def micro_batches(self, replica: Replica, old_logprobs: Mapping[str, Sequence[float]] | None = None) -> list[MicroBatch]:
        return make_micro_batches(self.sequences, self.bins, self.passes, replica.model.dtype, replica.model.device, old_logprobs)


def minibatches_of(
    replica: Replica, sequences: Sequence[TrainSequence], count: int, micro_batch_tokens: int, pairs: bool = False
) -> list[Minibatch]:
    """Returns ``sequences``, each with a counted token, as ``count`` minibatches; fewer if there are fewer sequences. ``pairs``: sequences
    2i and 2i + 1 are a preference pair, which stays in one micro-batch."""
    if pairs:
        parts = [sequences[2 * part[0] : 2 * part[-1] + 2] for part in split(range(len(sequences) // 2), count) if part]
    else:
        parts = [part for part in split(sequences, count) if part]
    return [_share(replica, part, micro_batch_tokens, pairs) for part in parts]


def _share(replica: Replica, sequences: Sequence[TrainSequence], micro_batch_tokens: int, pairs: bool) -> Minibatch:
    data = replica.ranks.data
    shares = (pack_pair_shares if pairs else pack_shares)(sequences, data.size, micro_batch_tokens)
    own = shares[data.rank]
    return Minibatch(sequences, own, replica.passes(len(own), max(map(len, shares))))


def mean_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    """Returns the mean of each metric over the updates that have it."""
    metrics = {}
    for name in results[0].metrics:
        values = [r.metrics[name] for r in results if name in r.metrics]
        metrics[name] = sum(values) / len(values)
    return metrics


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    return "skipped" if "skipped" in verdicts else "backed_off" if "backed_off" in verdicts else "taken"
