"""How long the samples of a prompt are expected to be: as those that were drawn of it before."""

import math
from collections.abc import Iterable, Sequence

from tandem.types import Prompt, Sample


class PastLengths:
    """The lengths of earlier samples, by prompt. They decide when a group is drawn and by which worker, never which tokens it has."""

    def __init__(self) -> None:
        self._last_step: dict[str, dict[str, int]] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        """Adds the samples of a step, which replace those of an earlier step of the same prompts."""
        fresh: dict[str, dict[str, int]] = {}
        for sample in samples:
            fresh.setdefault(sample.prompt_id, {})[sample.id] = len(sample.token_ids)
        self._last_step |= fresh

    def expected(self, prompts: Sequence[Prompt]) -> list[float]:
        """Returns the expected length in tokens of the longest sample of each prompt: of one without a past, the mean over the others; 0 if none
        has one."""
        known = [float(max(self._last_step[prompt.id].values())) if prompt.id in self._last_step else None for prompt in prompts]
        values = [value for value in known if value is not None]
        mean = math.fsum(values) / len(values) if values else 0.0
        return [mean if value is None else value for value in known]
