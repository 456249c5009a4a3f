"""The update of a draft head that is trained beside the policy, on the samples of a step."""

from collections.abc import Sequence

from tandem.config.trainer import TrainerConfig
from tandem.rl.algorithms.minibatches import minibatches_of
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.draft import make_draft_loss, with_acceptance
from tandem.trainer.lr_schedule import learning_rate
from tandem.trainer.micro_batch import forward_tokens
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.step import OnPhase, Progress, train_step
from tandem.types import TrainSequence


def update_draft(
    replica: Replica, step: int, sequences: Sequence[TrainSequence], trainer: TrainerConfig, *, total_steps: int = 0, guard: GradScaler | None = None,
    on_progress: Progress | None = None, on_phase: OnPhase = lambda phase: None, tracer: Tracer = NO_TRACE,
) -> dict[str, float]:
    """Takes one optimizer update of the head of ``replica`` on the counted tokens of ``sequences``, towards the policy as it is now: the one that draws the
    samples which the head drafts next. ``trainer``: with the head's learning rate; ``total_steps``: as in ``update_policy``.

    Returns ``draft/loss`` (nats per counted token, over the positions of a draft), ``draft/acceptance/K`` (``with_acceptance``) and ``draft/grad_norm``; the
    loss and the shares are those before the update. Where they are not finite ``guard`` skips the update; without one ``RunError`` is raised."""
    counted = [sequence for sequence in sequences if forward_tokens(sequence) > 0]
    if not counted:
        return {}
    (batch,) = minibatches_of(replica, counted, 1, trainer)
    result = train_step(
        replica.model, replica.optimizer, batch.micro_batches(replica), make_draft_loss(counts_of(counted), "draft/loss"),
        learning_rate(trainer, step, total_steps), guard=guard, sums=replica.sums, forward_backward=replica.forward_backward, on_progress=on_progress,
        on_phase=on_phase, tracer=tracer,
    )  # fmt: skip
    metrics = with_acceptance(result.metrics)
    # A step of the trainer names its gradient after the actor.
    own = {name: value for name, value in metrics.items() if name.startswith("draft/")}
    return own | {"draft/grad_norm": metrics["actor/grad_norm"]}
