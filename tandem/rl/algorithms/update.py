"""The policy update: from a batch of scored samples to new weights, on any mesh."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.critic import CriticConfig
from tandem.config.trainer import TrainerConfig
from tandem.rl.algorithms.loss import make_loss
from tandem.rl.algorithms.minibatches import mean_metrics, minibatches_of, packing_metrics, worst
from tandem.rl.algorithms.token_entropies import EntropyRecord
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.backend import TrainedReplica
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.logprobs import infer_sequences, per_token
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.mismatch import recorded_mismatch
from tandem.trainer.losses.value import make_value_loss, with_value_loss
from tandem.trainer.lr_schedule import learning_rate
from tandem.trainer.micro_batch import forward_tokens
from tandem.trainer.step import DoubleCheck, OnPhase, Progress, StepResult, train_step
from tandem.trainer.tensor_record import TensorRecord
from tandem.types import Batch, TrainSequence


def update_policy(
    replica: TrainedReplica,
    batch: Batch,
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    *,
    total_steps: int = 0,
    temperature: float = 1.0,
    guard: GradScaler | None = None,
    on_progress: Progress | None = None,
    on_phase: OnPhase = lambda phase: None,
    tracer: Tracer = NO_TRACE,
    is_frozen: bool = False,
    shared_critic: CriticConfig | None = None,
    record: TensorRecord | None = None,
    check: DoubleCheck | None = None,
    entropies: EntropyRecord | None = None,
) -> StepResult:
    """Takes ``epochs`` passes over ``batch`` in ``minibatches`` optimizer updates each, at the learning rate of ``batch.step``.
    ``total_steps``: where a decaying schedule ends; a constant one ignores it.

    Every rank of the mesh is given the whole batch and takes its share of each minibatch (``pack_shares``). Each update is normalised by
    the counts of its own minibatch over all ranks. Metrics are means over the updates, those of ``guard`` as after the last update;
    ``tokens`` counts the tokens of all ranks that went through the network in updates. ``verdict`` is the worst of any update.

    ``mismatch_kl`` (the mean of k3, nats) and ``mismatch_max_abs`` compare the weights before the first update with ``rollout_logprobs`` on
    every token that these weights sampled, masked samples included. Tokens that are not part of the first update cost an extra forward pass.
    ``is_frozen``: this comparison is all that is done. ``shared_critic``: the policy's value head is trained with it. ``record``: of the
    gradients. ``check``: of micro-batches that are computed twice. ``entropies``: of the policy at the tokens of the updates.

    ``on_progress`` is called with (micro-batches done, total micro-batches) of this rank's updates. Raises ``RunError`` if a loss or a
    gradient is not finite and there is no ``guard``."""
    with tracer.span("shard the batch"):
        counted = [s for s in batch.sequences if forward_tokens(s) > 0]
        minibatches = [] if is_frozen else minibatches_of(replica, counted, algorithm.minibatches, trainer, algorithm.learns_from_pairs)
    updates = minibatches * algorithm.epochs

    def infer(sequences: Sequence[TrainSequence], at: float) -> list[Tensor]:
        if not sequences:
            return []
        with tracer.span("log-probabilities"):
            report = lambda done, passes: on_phase("forward")
            return infer_sequences(replica, sequences, trainer.micro_batch_tokens, at, report, trainer.share_prompts)

    is_recomputed = algorithm.old_logprobs == "recompute" and not is_frozen
    inferred = infer(counted, temperature) if is_recomputed else []
    old = {s.id: per_token(s, values[1]) for s, values in zip(counted, inferred, strict=True)} if is_recomputed else None
    # The first update measures the mismatch of its own tokens, unless all tokens were inferred before it.
    unseen = _not_counted_in(counted if is_recomputed else minibatches[0].sequences if minibatches else (), batch.sequences)
    inferred += infer(unseen, 1.0)
    mismatch = recorded_mismatch([*(counted if is_recomputed else ()), *unseen], [values[0] for values in inferred], replica.model.dtype)

    sampled_tokens = sum(sum(_is_recorded(s)) for s in batch.sequences)
    rate = learning_rate(trainer, batch.step, total_steps)
    results: list[StepResult] = []
    done, total = 0, sum(minibatch.passes for minibatch in updates)
    for number, minibatch in enumerate(updates):
        micro_batches = minibatch.micro_batches(replica, old)
        mismatch_tokens = sampled_tokens if number == 0 and not is_recomputed else 0
        counts = counts_of(minibatch.sequences, batch.length_constant)
        loss = make_loss(algorithm, counts, temperature, mismatch_tokens)
        if shared_critic is not None:
            loss = with_value_loss(loss, make_value_loss(shared_critic.value_clip, algorithm.loss_agg_mode, counts), shared_critic.loss_coef)
        if entropies is not None:
            loss = entropies.of(loss)
        report = None if on_progress is None else lambda here, _, before=done: on_progress(before + here, total)
        results.append(
            train_step(
                replica.model, replica.optimizer, micro_batches, loss, rate, temperature, report, guard=guard, sums=replica.sums,
                forward_backward=replica.forward_backward, on_phase=on_phase, tracer=tracer,
                on_gradients=None if record is None else partial(record.gradients, replica), check=check,
            )
        )  # fmt: skip
        done += minibatch.passes
    metrics = mean_metrics(results) if results else {"actor/grad_norm": 0.0, "actor/lr": rate}
    if sampled_tokens:
        metrics["mismatch_kl"] = metrics.get("mismatch_kl", 0.0) + mismatch.k3_sum / sampled_tokens
        metrics["mismatch_max_abs"] = max(metrics.get("mismatch_max_abs", 0.0), mismatch.max_abs)
    metrics |= {} if guard is None else guard.metrics()
    tokens, packing = sum(minibatch.tokens for minibatch in updates), packing_metrics(minibatches, replica.ranks.data.size, trainer.micro_batch_tokens)
    return StepResult(metrics, tokens, any(r.updated for r in results), worst([r.verdict for r in results]), packing)


def _is_recorded(sequence: TrainSequence) -> list[bool]:
    """Returns for each token whether the rollout recorded the log-probability that it has under the weights of this update: whether these weights
    sampled it. Token 0 is never predicted."""
    if not sequence.rollout_logprobs:
        return [False] * len(sequence.token_ids)
    recorded = list(sequence.response_mask) or [index >= sequence.prompt_length for index in range(len(sequence.token_ids))]
    if sequence.off_policy:
        recorded = [is_sampled and not is_old for is_sampled, is_old in zip(recorded, sequence.off_policy, strict=True)]
    return [False, *recorded[1:]]


def _not_counted_in(seen: Sequence[TrainSequence], sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Returns ``sequences`` with a mask of every sampled token that is not counted in ``seen``; sequences without one are left out."""
    ids = {s.id for s in seen}
    remaining = []
    for sequence in sequences:
        if sequence.id in ids and 0 not in sequence.loss_mask[sequence.prompt_length :]:
            continue  # Nothing before its completion is recorded.
        is_counted = [value != 0 and sequence.id in ids for value in sequence.loss_mask]
        mask = tuple(float(recorded and not counted) for recorded, counted in zip(_is_recorded(sequence), is_counted, strict=True))
        if any(mask):
            remaining.append(replace(sequence, loss_mask=mask))
    return remaining
