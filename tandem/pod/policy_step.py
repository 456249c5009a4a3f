"""The policy update of a step on a rank of the trainer, with the critic's before it and the move of a reference that follows the actor after it."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from tandem.config.trainer import TrainerConfig
from tandem.layout.flops import step_flops
from tandem.layout.residents import Phase
from tandem.pod.actor import TrainedBeside
from tandem.pod.inference import Inferred
from tandem.pod.rank_models import RankModels
from tandem.rl.algorithms.batch import make_batch, train_sequence, without_replay
from tandem.rl.algorithms.critic import critic_metrics, update_critic
from tandem.rl.algorithms.draft import update_draft
from tandem.rl.algorithms.minibatches import worst
from tandem.rl.algorithms.token_entropies import EntropyRecord
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.corruption.check import CorruptionCheck
from tandem.trainer.device_speed import DeviceSpeed
from tandem.trainer.logprobs import sequence_values
from tandem.trainer.micro_batch import forward_tokens
from tandem.trainer.parallel.follow import follow
from tandem.trainer.step import Progress, StepResult
from tandem.trainer.tensor_record import TensorRecord
from tandem.types import Batch, Sample, Score, TrainSequence
from tandem.types.token_entropies import TokenEntropies


def policy_step(
    models: RankModels, inferred: Inferred, scores: Sequence[Score], on_progress: Progress, speed: DeviceSpeed, record: TensorRecord | None,
    check: CorruptionCheck | None = None,
) -> tuple[dict[str, Any], TokenEntropies]:
    """Takes the optimizer step (or steps, with several mini-batches) of ``models.steps`` on the samples of ``inferred``.

    Returns the ``metrics``; ``device``, what ``speed`` says of this rank and how well the batch was packed; ``tokens``, those that went through the actor;
    ``verdict``, the worst of any guard; ``learned``: see ``has_learned``;
    ``compared``, the micro-batches that were computed twice;
    and ``exhausted``, the steps in a row that a guard has skipped if they are more than it may, else 0. Beside them the entropies of the policy at the tokens
    of the samples."""
    actor, recipe, step = models.enter(Phase.TRAIN), models.recipe, models.steps
    critic, shared = actor.critic, recipe.critic if recipe.has_shared_critic else None
    values = inferred.values if shared is None else _values_of_the_actor(models, inferred.samples)
    with actor.tracer.span("load the batch"):
        batch = make_batch(
            step, inferred.samples, scores, recipe.algorithm, recipe.rollout.max_tokens, inferred.reference_logprobs, values,
            mask_off_policy=recipe.rollout.mask_off_policy,
        )  # fmt: skip
    began = perf_counter()
    actor.replica.model.replay_count.take(actor.replica.model.device)  # Of passes outside of the step.
    if record is not None:
        record.batch(batch.sequences)
    if check is not None:
        check.begin_step(step)
    learned = _update_critic(models, critic, batch, on_progress) if critic is not None else None
    entropies = EntropyRecord()
    result = update_policy(
        actor.replica, batch, recipe.algorithm, recipe.trainer, total_steps=recipe.run.max_steps,
        temperature=recipe.rollout.temperature, guard=actor.guard, on_progress=on_progress,
        on_phase=lambda phase: models.rank.enter(phase, step), tracer=actor.tracer,
        is_frozen=critic is not None and step < recipe.critic.warmup_steps, shared_critic=shared, record=record, check=check,
        entropies=entropies,
    )  # fmt: skip
    if record is not None:
        record.weights(actor.replica, "after the step")
    models.steps += 1
    _update_reference(models)
    device = _device_metrics(models, speed, batch.sequences, perf_counter() - began) | dict(result.packing)
    drafted, of_draft = _update_draft(models, step, inferred.samples, on_progress)
    guards = [actor.guard] if critic is None else [actor.guard, critic.guard]
    metrics, verdicts = result.metrics | replay_metrics(models, batch.sequences) | drafted, [result.verdict]
    if learned is not None:
        metrics, verdicts = metrics | learned.metrics, [result.verdict, learned.verdict]
    elif shared is not None:
        metrics = metrics | critic_metrics(batch.sequences)
    of_tokens = entropies.take(batch.sequences, models.rank.ranks.world, actor.replica.model.device)
    return {
        "metrics": metrics, "device": device | of_draft, "tokens": result.tokens,
        "verdict": worst(verdicts), "learned": has_learned(result, recipe.trainer, step),
        "compared": 0 if check is None else check.take_compared(),
        "exhausted": max(guard.skipped_in_a_row if guard.is_exhausted else 0 for guard in guards),
    }, of_tokens  # fmt: skip


def replay_metrics(models: RankModels, sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Returns the share of the choices of experts in the step, of tokens and layers whose routing was replayed, that the trainer's routers would have made
    otherwise. Ranks that compute the same tokens count them alike, so that the share is that of one rank."""
    if all(sequence.routed_experts is None for sequence in sequences):
        return {}
    model = models.actor.replica.model
    differing, every = models.rank.ranks.world.all_reduce(model.replay_count.take(model.device), "choices of experts").tolist()
    return {"router_replay/differing_share": differing / max(every, 1)}


def has_learned(result: StepResult, trainer: TrainerConfig, step: int) -> bool:
    """Returns whether the optimizer must have changed the actor's weights in ``step``: along a gradient that is not 0, at a rate above 0. An AdamW step moves a
    weight by about the rate, and one in bfloat16 changes if that is half of its last bit: at 3e-6 those below about 1e-3, 3 % of a normal distribution of
    width 0.02. At the rates of a warm-up it may be none of a small model, so its steps in 16 bits are not counted."""
    warms_up = trainer.dtype in ("bfloat16", "float16") and step < trainer.warmup_steps
    return result.updated and result.metrics["actor/grad_norm"] > 0 and result.metrics["actor/lr"] > 0 and not warms_up


def mismatch_metrics(models: RankModels, samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the metrics that compare the recorded log-probabilities of ``samples``, which the actor's weights drew, with the actor's own."""
    actor, recipe = models.enter(Phase.TRAIN), models.recipe
    sequences = tuple(train_sequence(each) for sample in samples for each in sample.sequences)
    batch = Batch(models.steps, sequences, recipe.rollout.max_tokens)
    result = update_policy(actor.replica, batch, recipe.algorithm, recipe.trainer, temperature=recipe.rollout.temperature, is_frozen=True)
    return {name: value for name, value in result.metrics.items() if name.startswith("mismatch")}


def _values_of_the_actor(models: RankModels, samples: Sequence[Sample]) -> dict[str, tuple[float, ...]]:
    """Returns the values of the actor's second head, by sample id."""
    actor, trainer = models.actor, models.recipe.trainer
    with actor.tracer.span("values"):
        sequences = [train_sequence(each) for sample in samples for each in sample.sequences]
        return sequence_values(actor.replica, sequences, trainer.micro_batch_tokens, share_prompts=trainer.share_prompts)


def _update_critic(models: RankModels, critic: TrainedBeside, batch: Batch, on_progress: Progress) -> StepResult:
    recipe = models.recipe
    batch = replace(batch, sequences=tuple(without_replay(batch.sequences)))
    return update_critic(
        critic.replica, batch, recipe.algorithm, recipe.critic, critic.trainer, total_steps=recipe.run.max_steps, guard=critic.guard,
        on_progress=on_progress, on_phase=lambda phase: models.rank.enter(phase, batch.step), tracer=models.actor.tracer,
    )  # fmt: skip


def _update_reference(models: RankModels) -> None:
    """Moves a reference that follows the actor, if it is due after ``models.steps`` steps."""
    actor, config = models.actor, models.recipe.reference
    if actor.follows and actor.reference is not None and models.steps % config.every_steps == 0:
        with actor.tracer.span("update the reference"):
            follow(actor.reference.replica, actor.native, config.mixup_alpha if config.update == "ema" else 1.0)


def _update_draft(models: RankModels, step: int, samples: Sequence[Sample], on_progress: Progress) -> tuple[dict[str, float], dict[str, float]]:
    """Trains a draft head on ``samples``, with the weights that the policy has after ``step``. Returns its metrics, and the seconds that it took; nothing
    without one. A guard that skips its updates does not end the run, whose samples do not depend on it."""
    actor, recipe, draft = models.actor, models.recipe, models.actor.draft
    if draft is None:
        return {}, {}
    began, sequences = perf_counter(), without_replay([train_sequence(each) for sample in samples for each in sample.sequences])
    with actor.tracer.span("draft head"), actor.native.whole():
        metrics = update_draft(
            draft.replica, step, sequences, draft.trainer, total_steps=recipe.run.max_steps, guard=draft.guard,
            on_progress=on_progress, on_phase=lambda phase: models.rank.enter(phase, step), tracer=actor.tracer,
        )  # fmt: skip
    return metrics, {"perf/draft_update_s": perf_counter() - began}


def _device_metrics(models: RankModels, speed: DeviceSpeed, sequences: Sequence[TrainSequence], seconds: float) -> dict[str, float]:
    """Returns this rank's share of the models' operations in an update of ``seconds``, and the peak memory of its GPU."""
    actor = models.actor
    trained = [actor.replica] if actor.critic is None else [actor.replica, actor.critic.replica]
    flops = models.recipe.algorithm.epochs * sum(step_flops(one.model.shapes, map(forward_tokens, sequences), absorbed=True) for one in trained)
    return {**speed.memory(), **speed.rates(flops / models.rank.ranks.world.size, seconds)}
