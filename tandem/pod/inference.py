"""The inference phase on a rank of the trainer: the passes of reference, critic and reward model over the samples of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tandem.layout.residents import Phase
from tandem.model.huggingface.model_config import read_json
from tandem.model.model_source import found_model
from tandem.pod.calls import InferencePart
from tandem.pod.rank_models import RankModels
from tandem.rl.algorithms.batch import train_sequence, without_replay
from tandem.trainer.logprobs import sequence_logprobs, sequence_values
from tandem.trainer.sequence_scores import scored_sequence, sequence_scores
from tandem.trainer.step import Progress
from tandem.types import Sample


@dataclass(frozen=True, slots=True)
class Inferred:
    """The samples of ``step``, which are drawn once, the reference's log-probabilities of them and the critic's values, by sample id (``None``: there is no
    such model)."""

    step: int
    samples: Sequence[Sample]
    reference_logprobs: dict[str, tuple[float, ...]] | None = None
    values: dict[str, tuple[float, ...]] | None = None

    def logprobs_of_completions(self) -> list[list[float]] | None:
        """Returns the reference's log-probabilities of each sample's completion, in the order of the samples; ``None`` without them."""
        known = self.reference_logprobs
        return None if known is None else [list(known[sample.id][len(sample.prompt_token_ids) :]) for sample in self.samples]


def infer(models: RankModels, step: int, samples: Sequence[Sample], on_progress: Progress, part: InferencePart = "update") -> Inferred:
    """Returns what ``part`` needs of the reference and the critic. When the last pass for an update nears its end, what the update needs is read ahead."""
    actor, trainer, algorithm = models.actor, models.recipe.trainer, models.recipe.algorithm
    reads_base = algorithm.needs_reference and not models.recipe.holds_reference
    if actor.reference is None and actor.critic is None and not reads_base:
        return Inferred(step, samples)
    sequences = without_replay([train_sequence(each) for sample in samples for each in sample.sequences])
    last = "reference" if actor.critic is None else "values"
    if part == "rewards" or (part == "all" and actor.reward_model is not None):
        last = ""  # The next phase is a rollout, or passes of the reward model follow.

    def report(done: int, total: int, of: str) -> None:
        on_progress(done, total)
        if of == last and done >= total - 1 and Phase.INFERENCE in models.prefetch_after:
            models.prefetch(Phase.TRAIN)

    most, share, logprobs, values = trainer.micro_batch_tokens, trainer.share_prompts, None, None
    if reads_base:
        models.enter(Phase.TRAIN)
        with actor.tracer.span("reference"), actor.native.model.without_adapter():
            logprobs = sequence_logprobs(actor.replica, sequences, most, on_progress=partial(report, of="reference"), share_prompts=share)
    if actor.reference is not None or actor.critic is not None:
        models.enter(Phase.INFERENCE)
    if actor.reference is not None:
        with actor.tracer.span("reference"):
            logprobs = sequence_logprobs(actor.reference.replica, sequences, most, on_progress=partial(report, of="reference"), share_prompts=share)
    if actor.critic is not None and part != "rewards":
        with actor.tracer.span("values"):
            values = sequence_values(actor.critic.replica, sequences, most, partial(report, of="values"), share)
    return Inferred(step, samples, logprobs, values)


def reward_scores(models: RankModels, samples: Sequence[Sample], on_progress: Progress) -> list[float] | None:
    """Returns the reward model's score of each of ``samples``; ``None`` without such a model."""
    actor, recipe = models.actor, models.recipe
    if actor.reward_model is None:
        return None
    models.enter(Phase.INFERENCE)
    pad = read_json(found_model(recipe.reward_model.path) / "config.json").get("pad_token_id")
    sequences = [scored_sequence(sample.id, sample.prompt_token_ids + sample.token_ids, pad) for sample in samples]
    with actor.tracer.span("reward model"):
        return sequence_scores(actor.reward_model.replica, sequences, recipe.trainer.micro_batch_tokens, on_progress=on_progress)
