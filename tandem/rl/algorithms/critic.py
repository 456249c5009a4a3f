"""The update of PPO's critic on any mesh, and what a step's row says of values, returns and advantages."""

from collections.abc import Sequence

import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.critic import CriticConfig
from tandem.config.trainer import TrainerConfig
from tandem.rl.algorithms.minibatches import mean_metrics, minibatches_of, worst
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.backend import TrainedReplica
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.value import make_value_loss
from tandem.trainer.lr_schedule import learning_rate
from tandem.trainer.micro_batch import counted_indices, forward_tokens
from tandem.trainer.step import OnPhase, Progress, StepResult, train_step
from tandem.types import Batch, TrainSequence


def update_critic(
    replica: TrainedReplica, batch: Batch, algorithm: AlgorithmConfig, critic: CriticConfig, trainer: TrainerConfig, *, total_steps: int = 0,
    guard: GradScaler | None = None, on_progress: Progress | None = None, on_phase: OnPhase = lambda phase: None, tracer: Tracer = NO_TRACE,
) -> StepResult:
    """Takes the updates of ``update_policy`` with the value loss, towards the returns of ``batch``. ``trainer``: with the critic's learning rate.

    The metrics are those of ``critic_metrics``, the means of ``critic/vf_loss``, ``critic/vf_clipfrac`` and ``critic/grad_norm`` over the updates, and
    ``critic/lr``. Arguments and result as in ``update_policy``."""
    counted = [s for s in batch.sequences if forward_tokens(s) > 0]
    with tracer.span("shard the critic's batch"):
        updates = minibatches_of(replica, counted, algorithm.minibatches, trainer) * algorithm.epochs
    rate = learning_rate(trainer, batch.step, total_steps)
    results: list[StepResult] = []
    done, total = 0, sum(minibatch.passes for minibatch in updates)
    for minibatch in updates:
        loss = make_value_loss(critic.value_clip, algorithm.loss_agg_mode, counts_of(minibatch.sequences, batch.length_constant))
        report = None if on_progress is None else lambda here, _, before=done: on_progress(before + here, total)
        results.append(
            train_step(
                replica.model, replica.optimizer, minibatch.micro_batches(replica), loss, rate, on_progress=report, guard=guard, sums=replica.sums,
                forward_backward=replica.forward_backward, on_phase=on_phase, tracer=tracer,
            )
        )  # fmt: skip
        done += minibatch.passes
    own = mean_metrics(results) if results else {"critic/vf_loss": 0.0, "actor/grad_norm": 0.0, "actor/lr": rate}
    # A step of the trainer names its gradient and learning rate after the actor.
    own = {f"critic/{name.partition('/')[2]}": value for name, value in own.items() if name.startswith(("critic/", "actor/"))}
    tokens = algorithm.epochs * sum(map(forward_tokens, counted))
    return StepResult(critic_metrics(counted) | own, tokens, any(r.updated for r in results), worst([r.verdict for r in results]))


def critic_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Returns ``critic/{values,returns,advantages}/{mean,max,min}`` over the counted tokens of ``sequences`` and ``critic/vf_explained_var``, the share
    of the variance of the returns that the values before the update explain: 1 - Var(R - V) / Var(R), or 0 for returns without variance."""
    columns = {
        name: torch.tensor([getattr(s, name)[i] for s in sequences for i in counted_indices(s)], dtype=torch.float64)
        for name in ("values", "returns", "advantages")
    }
    if not len(columns["values"]):
        return {}
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        metrics |= {f"critic/{name}/mean": values.mean().item(), f"critic/{name}/max": values.max().item(), f"critic/{name}/min": values.min().item()}
    returns = columns["returns"]
    spread = returns.var(correction=0).item()
    unexplained = (returns - columns["values"]).var(correction=0).item()
    return metrics | {"critic/vf_explained_var": 1.0 - unexplained / spread if spread > 0 else 0.0}
