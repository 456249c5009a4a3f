"""The work of a step of reinforcement learning, with every model that has a part in it. Imports no torch."""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.config.recipe import Recipe
from tandem.config.trainer import TrainerConfig
from tandem.estimate.draft_work import draft_work
from tandem.estimate.packed_samples import Packing, Samples, packed, sharing_of
from tandem.estimate.prompt_beginnings import Prompts
from tandem.estimate.time import Work, generation_work, training_work
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


def forward_and_backward(trainer: TrainerConfig) -> float:
    """Returns the forward passes that the forward and the backward pass of an update are worth."""
    return FORWARD_AND_BACKWARD + (trainer.recompute == "full")


def samples_of(recipe: Recipe, prompts: Prompts, count: float, completion_tokens: float, begun: float = 0.0, is_scored: bool = False) -> Samples:
    """Returns the samples of ``count`` prompts whose completions all have ``completion_tokens``."""
    return Samples(prompts, count, recipe.algorithm.group_size, completion_tokens, completion_tokens**2, begun, is_scored)


def rl_work(
    recipe: Recipe, models: RLModels, prompts: Prompts, completion_tokens: float, begun: float = 0.0, *, waits: bool = True
) -> RLWork:
    """Returns the work for completions of so many tokens. A step takes all rounds of rollout that dynamic sampling allows. ``begun``: of ``Samples``.
    ``waits``: with that of ranks that wait for the one that has a draft head."""
    rollout, algorithm, evaluation, trainer = recipe.rollout, recipe.algorithm, recipe.evaluation, recipe.trainer
    length, group, most = prompts.mean + completion_tokens, algorithm.group_size, trainer.micro_batch_tokens
    step_prompts, drawn = rollout.prompts_per_step, algorithm.rounds * algorithm.prompts_per_round(rollout.prompts_per_step)

    def generation(prompts_drawn: int, samples: int) -> Work:
        engine = rollout.engine
        return generation_work(
            models.actor, trainer.dtype, prompts_drawn, prompts.mean, samples, completion_tokens, engine.max_num_seqs, engine.max_num_batched_tokens
        )

    def update(shapes: ModelShapes, replays: bool) -> Work:
        sharing = sharing_of(shapes, trainer, recipe.parallel, replays, recipe.rollout.engine.kv_cache_dtype if recipe.machine.pods_have_cpu_kernels else None)
        samples = samples_of(recipe, prompts, step_prompts / algorithm.minibatches, completion_tokens, begun)
        each = packed(samples, sharing.update)
        tokens, epochs, once = algorithm.minibatches * each.tokens, algorithm.epochs, sharing.forward_of(samples)
        once = None if once is None else once._replace(tokens=algorithm.minibatches * once.tokens)
        return training_work(
            shapes, trainer.dtype, tokens, each.context, most, epochs * forward_and_backward(trainer), epochs * algorithm.minibatches, epochs,
            each.predicting(sharing.update_ends_early), once,
        )

    def inferred(shapes: ModelShapes, count: float, replays: bool = False, is_scored: bool = False) -> Work:
        sharing = sharing_of(shapes, trainer, recipe.parallel, replays)
        # Whole sequences are what a reward model is given for prompts, which seldom are equal.
        packing = sharing.inference._replace(keeps_groups=False, counts_once=False) if is_scored else sharing.inference
        each = packed(samples_of(recipe, prompts, count, completion_tokens, begun, is_scored), packing)
        return training_work(shapes, trainer.dtype, each.tokens, each.context, most, 1, 0, predicting=each.predicting(sharing.inference_ends_early))

    replays = recipe.replays_routing(models.actor.experts is not None)
    inference = list[Work]()
    training = [update(models.actor, replays)]
    if algorithm.old_logprobs == "recompute":
        training.append(inferred(models.actor, step_prompts, replays))
    elif algorithm.minibatches > 1:
        # What the first update does not see is compared with the log-probabilities of the rollout before it.
        training.append(inferred(models.actor, step_prompts * (1 - 1 / algorithm.minibatches), replays))
    if recipe.has_shared_critic:
        training.append(inferred(models.actor, step_prompts, replays))
    if algorithm.needs_reference:
        inference.append(inferred(models.teacher or models.actor, step_prompts))
        if recipe.has_rounds and "reference" in recipe.rewards.needs:
            inference.append(inferred(models.teacher or models.actor, drawn))
    if models.critic is not None:
        inference.append(inferred(models.critic, step_prompts))
        training.append(update(models.critic, False))
    if models.draft is not None:
        # Every sample with its prompt, once.
        tokens = float(step_prompts * group * length)
        waiting = recipe.parallel.world // recipe.parallel.data if waits else 1
        training.append(draft_work(models.actor, models.draft, trainer.dtype, tokens, length, most, waiting))
    if models.reward_model is not None:
        inference.append(inferred(models.reward_model, drawn, is_scored=True))
    sft = recipe.sft
    demonstrations = () if sft is None else (_demonstrated(recipe, models.actor, prompts, completion_tokens),)
    return RLWork(
        (generation(algorithm.prompts_per_round(rollout.prompts_per_step), group),) * algorithm.rounds,
        tuple(inference), tuple(training), (generation(evaluation.prompts, 1),), (generation(evaluation.final_prompts, 1),), demonstrations,
    )


def _demonstrated(recipe: Recipe, actor: ModelShapes, prompts: Prompts, completion_tokens: float) -> Work:
    """Returns the work of a step of section ``sft``, of which the head sees what the completions' tokens are predicted from."""
    assert recipe.sft is not None
    trainer = recipe.trainer
    each = packed(Samples(prompts, recipe.sft.batch_size, 1, completion_tokens, completion_tokens**2), Packing(trainer.micro_batch_tokens))
    return training_work(
        actor, trainer.dtype, each.tokens, each.context, trainer.micro_batch_tokens, forward_and_backward(trainer), 1, 1, each.predicting(ends_early=False)
    )
