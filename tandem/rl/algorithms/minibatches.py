"""The minibatches of an update, on every rank: which sequences each takes, and what the updates of a step give together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.config.trainer import TrainerConfig
from tandem.trainer.backend import TrainedReplica
from tandem.trainer.beginnings import computes_beginnings_once
from tandem.trainer.grad_scaler import Verdict
from tandem.trainer.micro_batch import Bin, MicroBatch, forward_tokens, make_micro_batches
from tandem.trainer.packing import pack_pair_shares, pack_shares, packed_tokens, split
from tandem.trainer.step import StepResult
from tandem.types import TrainSequence


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The sequences of one update, over all ranks. ``bins``: this rank's micro-batches; ``passes``: the number of passes it makes, blank
    ones included. ``tokens``: of all ranks that go through the network."""

    sequences: Sequence[TrainSequence]
    bins: Sequence[Bin]
    passes: int
    tokens: int
    share_prompts: bool

    def micro_batches(self, replica: TrainedReplica, old_logprobs: Mapping[str, Sequence[float]] | None = None) -> list[MicroBatch]:
        model = replica.model
        once = computes_beginnings_once(model)
        return make_micro_batches(self.sequences, self.bins, self.passes, model.dtype, model.device, old_logprobs, self.share_prompts, once)


def minibatches_of(
    replica: TrainedReplica, sequences: Sequence[TrainSequence], count: int, trainer: TrainerConfig, pairs: bool = False
) -> list[Minibatch]:
    """Returns ``sequences``, each with a counted token, as ``count`` minibatches; fewer if there are fewer sequences. ``pairs``: sequences
    2i and 2i + 1 are a preference pair, which stays in one micro-batch."""
    if pairs:
        parts = [sequences[2 * part[0] : 2 * part[-1] + 2] for part in split(range(len(sequences) // 2), count) if part]
    else:
        parts = [part for part in split(sequences, count) if part]
    return [_share(replica, part, trainer, pairs) for part in parts]


def _share(replica: TrainedReplica, sequences: Sequence[TrainSequence], trainer: TrainerConfig, pairs: bool) -> Minibatch:
    data, most, share_prompts = replica.ranks.data, trainer.micro_batch_tokens, trainer.share_prompts
    shares = pack_pair_shares(sequences, data.size, most, share_prompts) if pairs else pack_shares(sequences, data.size, most, share_prompts)
    own = shares[data.rank]
    tokens = sum(packed_tokens([sequences[i] for i in chosen], share_prompts) for bins in shares for chosen in bins)
    return Minibatch(sequences, own, replica.passes(len(own), max(map(len, shares))), tokens, share_prompts)


def packing_metrics(minibatches: Sequence[Minibatch], ranks: int, micro_batch_tokens: int) -> dict[str, float]:
    """Returns how full the micro-batches of one pass over a batch are. ``ranks``: data-parallel ones, all of which make equally many passes.

    ``perf/padding_share``: the share of ``micro_batch_tokens`` that holds no token, over all micro-batches; nothing is computed there, because a
    micro-batch is as long as its tokens. ``perf/shared_prompt_share``: of the tokens of all sequences, those that are not computed because another
    sequence of the micro-batch begins with them too."""
    tokens, chunks = sum(m.tokens for m in minibatches), ranks * sum(m.passes for m in minibatches)
    whole = sum(forward_tokens(sequence) for m in minibatches for sequence in m.sequences)
    if not chunks:
        return {}
    # A sequence longer than micro_batch_tokens is a micro-batch by itself.
    padding = max(0.0, 1 - tokens / (chunks * micro_batch_tokens))
    return {"perf/micro_batches": float(chunks), "perf/padding_share": padding, "perf/shared_prompt_share": 1 - tokens / whole}


def mean_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    """Returns the mean of each metric over the updates that have it."""
    metrics = {}
    for name in results[0].metrics:
        values = [r.metrics[name] for r in results if name in r.metrics]
        metrics[name] = sum(values) / len(values)
    return metrics


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    return "skipped" if "skipped" in verdicts else "backed_off" if "backed_off" in verdicts else "taken"
