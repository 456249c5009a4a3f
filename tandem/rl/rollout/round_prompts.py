"""The prompts of each round of a step: a function of the seed, the step and the journal, the same after a resume and in a replay."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.config.recipe import Recipe
from tandem.data.prompts import TRAIN, PromptSource
from tandem.rl.rewards.judgement import TrainerState
from tandem.rl.rollout.filter_groups import is_complete, trained_on
from tandem.rl.rollout.staleness import weights_of
from tandem.rl.rollout.success_rates import SuccessRates
from tandem.runtime.records.journal import Journal
from tandem.types import Prompt, Round, RunError, Sample


@dataclass(slots=True)
class RoundPrompts:
    """Chooses prompts of ``source`` for a run of ``recipe``; ``journal`` has the rounds of its earlier steps."""

    source: PromptSource
    recipe: Recipe
    journal: Journal
    _success_rates: SuccessRates = field(init=False)

    def __post_init__(self) -> None:
        self._success_rates = SuccessRates(self.journal)

    def of(self, step: int, number: int) -> list[Prompt]:
        """Returns the prompts of round ``number`` of ``step``, none of which is in an earlier round of the step."""
        order, first, taken, chosen = self.source.order, self._first_draw(step), list[int](), list[int]()
        rates = self._rates(step)
        for draw in range(first, first + number + 1):
            chosen = order.indices(draw, taken, rates)
            taken += chosen
        return self.source.at(chosen)

    def metrics(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns the metrics of the curriculum after ``step``, whose ``samples`` are judged; none for an order that is none. With ``success_rate``: the mean
        success rate of the prompts that were judged so far, the share of all training prompts that were, and the share that was solved each time. With
        ``difficulty``: the mean of the step's prompts."""
        order = self.source.order
        if order.config.by == "difficulty":
            drawn = {sample.prompt_id for sample in samples}
            return {"curriculum/difficulty": math.fsum(order.difficulty(int(name.removeprefix(TRAIN))) for name in drawn) / max(len(drawn), 1)}
        size = self.source.task.size
        if order.config.by != "success_rate" or not size:
            return {}
        rates = list(self._success_rates.before(step + 1).values())
        return {
            "curriculum/success_rate": math.fsum(rates) / max(len(rates), 1),
            "curriculum/seen_share": len(rates) / size,
            "curriculum/solved_share": sum(rate == 1 for rate in rates) / size,
        }

    def after(self, step: int, passed: int, count: int, taken: Collection[str]) -> tuple[list[Prompt], int]:
        """Returns the ``count`` prompts that a round of partial rollouts begins in ``step``, and how many places are passed then; as ``PromptSource.after``."""
        return self.source.after(passed, count, taken, self._rates(step))

    def _rates(self, step: int) -> Mapping[int, float] | None:
        """Returns the success rates before ``step`` by index, where prompts are drawn by them; one step off, those before the step before, whose samples may
        not be judged yet."""
        if self.source.order.config.by != "success_rate":
            return None
        judged = weights_of(step, self.recipe.rollout.max_staleness)
        return {int(prompt.removeprefix(TRAIN)): rate for prompt, rate in self._success_rates.before(judged).items()}

    def of_samples(self, samples: Sequence[Sample]) -> list[Prompt]:
        """Returns the prompts of ``samples``, in the order of their groups."""
        return self.source.named(list(dict.fromkeys(sample.prompt_id for sample in samples)))

    def trainer_state(self, step: int) -> TrainerState:
        """Returns where the run is at ``step``, for reward functions."""
        return TrainerState(step, self.recipe.run.max_steps, self.source.order.epoch(self._first_draw(step)))

    def _first_draw(self, step: int) -> int:
        """Returns the number of the first draw of ``step``: each earlier step made one, or with dynamic sampling one a round; with partial rollouts, as many
        as the prompts that were passed."""
        if self.recipe.rollout.budget_tokens:
            return self.journal.replay_buffer(step).started // self.recipe.rollout.prompts_per_step
        return step if self.recipe.algorithm.filter_groups is None else self.journal.rounds_before(step)


def recorded_batch(recipe: Recipe, journal: Journal, step: int) -> Round:
    """Returns what ``step`` of a run of ``recipe`` was trained on. Raises ``RunError`` where the journal does not have all of its rounds."""
    rounds, filtered, wanted = journal.rounds(step), recipe.algorithm.filter_groups, recipe.rollout.prompts_per_step
    if not is_complete(rounds, filtered, wanted):
        raise RunError(f"the earlier step {step} is not in the run's journal; its checkpoints and journal do not belong together")
    return trained_on(rounds, filtered, wanted)
