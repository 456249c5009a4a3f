"""One training phase: from a batch to new weights."""

import itertools
from collections.abc import Sequence

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.rl.algorithms.loss import make_grpo_loss
from tandem.trainer.logprobs import infer, per_token
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.lr_schedule import learning_rate
from tandem.trainer.micro_batch import collate, forward_tokens
from tandem.trainer.optimizers.adamw import Optimizer
from tandem.trainer.packing import Bin, best_fit
from tandem.trainer.step import Progress, StepResult, train_step
from tandem.types import Batch, TrainSequence

OF_THE_FIRST_UPDATE = ("mismatch_kl", "mismatch_max_abs")
"""Metrics that compare with the weights the samples were drawn from, which only the first update still sees."""


def update_policy(
    model: Decoder,
    optimizer: Optimizer,
    batch: Batch,
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    temperature: float = 1.0,
    on_progress: Progress | None = None,
) -> StepResult:
    """``epochs`` passes over ``batch`` in ``minibatches`` optimizer updates each, at the learning rate of
    ``batch.step``.

    Each update is normalised by its own minibatch's global counts. Metrics are means over the updates. ``on_progress``
    hears (micro-batches done, micro-batches in all)."""
    sequences = [s for s in batch.sequences if forward_tokens(s) > 0]
    old = None
    if algorithm.old_logprobs == "recompute":
        old = sequence_logprobs(model, sequences, trainer.micro_batch_tokens, temperature)
    parts = [(part, pack(part, trainer.micro_batch_tokens)) for part in split(sequences, algorithm.minibatches)]
    parts = parts * algorithm.epochs
    done, total = 0, sum(len(bins) for _, bins in parts)
    results = []
    for part, bins in parts:
        micro_batches = [
            collate([part[i] for i in chosen], model.head_weight.dtype, model.head_weight.device, old)
            for chosen in bins
        ]
        loss = make_grpo_loss(algorithm, counts_of(part, batch.length_constant), temperature)
        report = None if on_progress is None else lambda here, _, before=done: on_progress(before + here, total)
        results.append(
            train_step(model, optimizer, micro_batches, loss, learning_rate(trainer, batch.step), temperature, report)
        )
        done += len(bins)
    return _mean(results)


def sequence_logprobs(
    model: Decoder,
    sequences: Sequence[TrainSequence],
    micro_batch_tokens: int,
    temperature: float = 1.0,
    on_progress: Progress | None = None,
) -> dict[str, tuple[float, ...]]:
    """``model``'s log-probabilities of the counted tokens of ``sequences`` by id: an entry per token, 0.0 elsewhere."""
    counted = [s for s in sequences if forward_tokens(s) > 0]
    micro_batches = [
        collate([counted[i] for i in chosen], model.head_weight.dtype, model.head_weight.device)
        for chosen in pack(counted, micro_batch_tokens)
    ]
    found = infer(model, micro_batches, temperature, on_progress)
    return {s.id: per_token(found.get(s.id, {}), len(s.token_ids)) for s in sequences}


def pack(sequences: Sequence[TrainSequence], micro_batch_tokens: int) -> list[Bin]:
    """Micro-batches of ``sequences`` by index, by the tokens that go through the network."""
    return best_fit([forward_tokens(s) for s in sequences], micro_batch_tokens)


def split(sequences: Sequence[TrainSequence], parts: int) -> list[Sequence[TrainSequence]]:
    """``sequences`` in at most ``parts`` runs of nearly equal count, in their order; at least one run, empty or not."""
    parts = max(1, min(parts, len(sequences)))
    bounds = [len(sequences) * part // parts for part in range(parts + 1)]
    return [sequences[start:stop] for start, stop in itertools.pairwise(bounds)]


def _mean(results: Sequence[StepResult]) -> StepResult:
    names = results[0].metrics
    metrics = {
        name: names[name] if name in OF_THE_FIRST_UPDATE else sum(r.metrics[name] for r in results) / len(results)
        for name in names
    }
    return StepResult(metrics, sum(r.tokens for r in results), any(r.updated for r in results))
