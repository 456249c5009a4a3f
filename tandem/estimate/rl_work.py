"""The work of a step of reinforcement learning, with every model that has a part in it. Imports no torch."""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import Recipe
from tandem.config.trainer import TrainerConfig
from tandem.estimate.draft_work import draft_work
from tandem.estimate.time import ALL_PREDICT, Predicting, Work, generation_work, training_work
from tandem.estimate.training.layout import DraftTraining
from tandem.layout.shapes import ModelShapes

FORWARD_AND_BACKWARD = 3.0
"""A backward pass has two products for each of the forward pass."""


@dataclass(frozen=True, slots=True)
class RLModels:
    """The shapes of the models of a run: of the ``actor``; of a reference that is not the actor's start, a ``teacher``; of a ``critic`` of its own; of a
    ``reward_model``; and a ``draft`` head that is trained beside the actor (``None``: there is no such model)."""

    actor: ModelShapes
    teacher: ModelShapes | None = None
    critic: ModelShapes | None = None
    reward_model: ModelShapes | None = None
    draft: DraftTraining | None = None

    @property
    def saved_beside(self) -> tuple[ModelShapes, ...]:
        """The shapes of the models that are trained, saved and exported beside the actor."""
        head = None if self.draft is None else self.draft.head.trained
        return tuple(each for each in (self.critic, head) if each is not None)


class RLWork(NamedTuple):
    """The work of one step's ``generation``, of ``inference`` (the passes of other models than those that are trained, and of the critic for its values) and
    of ``training``, of an ``evaluation``, of the ``final_evaluation``, and of one step of section ``sft``."""

    generation: tuple[Work, ...]
    inference: tuple[Work, ...]
    training: tuple[Work, ...]
    evaluation: tuple[Work, ...]
    final_evaluation: tuple[Work, ...]
    sft: tuple[Work, ...]


class Packed(NamedTuple):
    """``tokens`` that go through a network, and the ``context`` of half of which they attend to on average, as the tokens of whole sequences of that
    length do."""

    tokens: float
    context: float


def packed_group(prompt_tokens: float, completion_tokens: float, samples: int, share_prompts: bool) -> Packed:
    """Returns what a group of ``samples`` completions of a prompt is in training: ``share_prompts``: the prompt is computed once, and every completion
    attends to it."""
    length = prompt_tokens + completion_tokens
    if not share_prompts:
        return Packed(samples * length, length)
    tokens = prompt_tokens + samples * completion_tokens
    # Twice the sum over tokens of those before them.
    attended = prompt_tokens**2 + samples * completion_tokens * (2 * prompt_tokens + completion_tokens)
    return Packed(tokens, attended / tokens)


def has_whole_layers(parallel: ParallelConfig) -> bool:
    """Returns whether a rank computes its layers alone, as it must to leave out tokens of the last one."""
    return parallel.tensor == parallel.context == parallel.expert == parallel.pipeline == 1


def forward_and_backward(trainer: TrainerConfig) -> float:
    """Returns the forward passes that the forward and the backward pass of an update are worth."""
    return FORWARD_AND_BACKWARD + (trainer.recompute == "full")


def rl_work(recipe: Recipe, models: RLModels, prompt_tokens: float, completion_tokens: float, *, waits: bool = True) -> RLWork:
    """Returns the work for prompts and completions of so many tokens. A step takes all rounds of rollout that dynamic sampling allows. ``waits``: with that of
    ranks that wait for the one that has a draft head."""
    rollout, algorithm, evaluation, trainer = recipe.rollout, recipe.algorithm, recipe.evaluation, recipe.trainer
    length, group = prompt_tokens + completion_tokens, algorithm.group_size
    ends_early = has_whole_layers(recipe.parallel) and trainer.precision != "fp8"
    drawn = algorithm.rounds * algorithm.prompts_per_round(rollout.prompts_per_step)

    def generation(prompts: int, samples: int) -> Work:
        engine = rollout.engine
        return generation_work(
            models.actor, trainer.dtype, prompts, prompt_tokens, samples, completion_tokens, engine.max_num_seqs, engine.max_num_batched_tokens
        )

    def passes(
        shapes: ModelShapes, prompts: int, count: float, updates: int = 0, shared: bool = trainer.share_prompts, backward: float = 0,
        predicted: float = 0.0,
    ) -> Work:
        """``count`` passes over the groups of ``prompts``, a forward and a backward pass being three, of which ``backward`` are such pairs. ``predicted``:
        tokens of a sample that passes without gradient are for (0: all)."""
        each = packed_group(prompt_tokens, completion_tokens, group, shared)
        predicting = Predicting(group * predicted / each.tokens, ends_early) if predicted else ALL_PREDICT
        return training_work(shapes, trainer.dtype, prompts * each.tokens, each.context, trainer.micro_batch_tokens, count, updates, backward, predicting)

    trained, updates = algorithm.epochs * forward_and_backward(trainer), algorithm.epochs * algorithm.minibatches
    inferred = (algorithm.old_logprobs == "recompute") + recipe.has_shared_critic
    inference = list[Work]()
    training = [passes(models.actor, rollout.prompts_per_step, trained, updates, backward=algorithm.epochs)]
    if inferred:
        training.append(passes(models.actor, rollout.prompts_per_step, inferred, predicted=completion_tokens))
    if algorithm.needs_reference:
        inference.append(passes(models.teacher or models.actor, rollout.prompts_per_step, 1, predicted=completion_tokens))
        if recipe.has_rounds and "reference" in recipe.rewards.needs:
            inference.append(passes(models.teacher or models.actor, drawn, 1, predicted=completion_tokens))
    if models.critic is not None:
        inference.append(passes(models.critic, rollout.prompts_per_step, 1, predicted=completion_tokens))
        training.append(passes(models.critic, rollout.prompts_per_step, trained, updates, backward=algorithm.epochs))
    if models.draft is not None:
        # Every sample with its prompt, once.
        tokens = float(rollout.prompts_per_step * group * length)
        waiting = recipe.parallel.world // recipe.parallel.data if waits else 1
        training.append(draft_work(models.actor, models.draft, trainer.dtype, tokens, length, trainer.micro_batch_tokens, waiting))
    if models.reward_model is not None:
        # Its score is that of the last token.
        inference.append(passes(models.reward_model, drawn, 1, shared=False, predicted=1))
    sft = recipe.sft
    return RLWork(
        (generation(algorithm.prompts_per_round(rollout.prompts_per_step), group),) * algorithm.rounds,
        tuple(inference),
        tuple(training),
        (generation(evaluation.prompts, 1),),
        (generation(evaluation.final_prompts, 1),),
        () if sft is None else (
            training_work(
                models.actor, trainer.dtype, sft.batch_size * length, length, trainer.micro_batch_tokens, forward_and_backward(trainer), 1, 1
            ),
        ),
    )  # fmt: skip
