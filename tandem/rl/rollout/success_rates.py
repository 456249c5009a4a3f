"""How often each training prompt was solved: a function of the journal, the same after a resume and in a replay."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.runtime.records.journal import Journal
from tandem.types import RunError
from tandem.types.round import joined


@dataclass(slots=True)
class SuccessRates:
    """Counts completions of the steps in ``journal``, each step once; those of groups that dynamic sampling dropped too."""

    journal: Journal
    _steps: int = 0
    _judged: Counter[str] = field(default_factory=Counter)
    _right: Counter[str] = field(default_factory=Counter)

    def before(self, step: int) -> Mapping[str, float]:
        """Returns the share of correct completions by prompt id, of the prompts that were judged before ``step``. An earlier step than that of the last call
        counts all again. Raises ``RunError`` where no reward function says what is correct."""
        if step < self._steps:
            self._steps = 0
            self._judged.clear()
            self._right.clear()
        for earlier in range(self._steps, step):
            self._count(earlier)
        self._steps = step
        return {prompt: self._right[prompt] / judged for prompt, judged in self._judged.items()}

    def _count(self, step: int) -> None:
        samples, scores = joined(self.journal.rounds(step))
        verdicts = {score.sample_id: score.correct for score in scores if score.value is not None}
        if verdicts and all(correct is None for correct in verdicts.values()):
            raise RunError(
                "'rollout.prompt_order.by' is 'success_rate', and no reward function says which completions are correct; start a new run with a reward "
                "function that does, or with another order"
            )
        for sample in samples:
            correct = verdicts.get(sample.id)
            if correct is not None:
                self._judged[sample.prompt_id] += 1
                self._right[sample.prompt_id] += correct
