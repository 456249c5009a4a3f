"""Supervised fine-tuning: the loop that warms a model up before reinforcement learning."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from tandem.config.trainer import TrainerConfig
from tandem.config.warm_up import WarmUpConfig
from tandem.model.decoder import Decoder
from tandem.rl.algorithms.update import pack
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.lr_schedule import learning_rate
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.make import make_optimizer
from tandem.trainer.step import train_step
from tandem.types import RunError, TrainSequence

Example = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its completion, the end-of-sequence token included."""


def fine_tune(
    model: Decoder,
    examples: Iterator[Example],
    config: WarmUpConfig,
    trainer: TrainerConfig,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """``config.steps`` optimizer steps on ``config.batch_size`` examples each; returns the metrics of every step.

    The loss is the mean over all completion tokens of the batch. ``trainer`` gives what ``config`` does not: betas,
    decay, clipping, micro-batches. ``on_step`` hears (steps done, metrics). Raises ``RunError`` where ``examples`` run
    out."""
    settings = replace(
        trainer,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        schedule=config.schedule,
        total_steps=config.steps,
    )
    optimizer = make_optimizer(model, settings)
    rows = []
    for step in range(config.steps):
        batch = [_sequence(f"{step}/{i}", *example) for i, example in enumerate(islice(examples, config.batch_size))]
        if len(batch) < config.batch_size:
            raise RunError(
                f"the demonstrations ended in step {step} of {config.steps}; lower warm_up.steps or warm_up.batch_size"
            )
        micro_batches = [
            collate([batch[i] for i in chosen], model.head_weight.dtype, model.head_weight.device)
            for chosen in pack(batch, settings.micro_batch_tokens)
        ]
        loss = make_cross_entropy_loss(counts_of(batch))
        rows.append(train_step(model, optimizer, micro_batches, loss, learning_rate(settings, step)).metrics)
        if on_step is not None:
            on_step(step + 1, rows[-1])
    return rows


def _sequence(name: str, prompt: Sequence[int], completion: Sequence[int]) -> TrainSequence:
    mask = (0.0,) * len(prompt) + (1.0,) * len(completion)
    return TrainSequence(name, (*prompt, *completion), len(prompt), mask)
