"""How good a model is at a task: accuracy on prompts that it was not trained on."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.types import Prompt, RunError, Sample, Score, ScoreState

Generate = Callable[[Sequence[Prompt]], list[Sample]]
Judge = Callable[[Sequence[Sample], Sequence[Prompt]], list[Score]]


@dataclass(frozen=True, slots=True)
class Example:
    """One completion, for a person to read."""

    prompt: str
    completion: str
    ground_truth: Any
    correct: bool | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """``accuracy``: mean over prompts of the share of its judged samples that are correct. ``standard_error``: of that
    mean, prompts taken as independent draws. ``count``: prompts with a judged sample; ``samples``: judged samples;
    ``faults``: samples that could not be judged, which count nowhere. ``mean_reward``: over judged samples.
    ``examples``: of the first prompts, the same ones every time, so that before and after can be laid side by side."""

    accuracy: float
    standard_error: float
    count: int
    samples: int
    faults: int
    mean_reward: float
    examples: tuple[Example, ...]

    def to_json(self) -> dict[str, Any]:
        """The result as plain data; ``from_json`` reads it back."""
        return {**asdict(self), "examples": [asdict(example) for example in self.examples]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "EvaluationResult":
        return EvaluationResult(**{**data, "examples": tuple(Example(**example) for example in data["examples"])})


def evaluate(generate: Generate, prompts: Sequence[Prompt], judge: Judge, *, examples: int = 8) -> EvaluationResult:
    """Draw one or more completions for each of ``prompts`` with ``generate``, judge them and count.

    Whether they are greedy or sampled, and how many a prompt gets, is ``generate``'s affair. Raises ``RunError`` where
    no sample could be judged, or where no reward function says what is correct.
    """
    samples = generate(prompts)
    scores = judge(samples, prompts)
    return summarize(prompts, samples, scores, examples=examples)


def summarize(prompts: Sequence[Prompt], samples: Sequence[Sample], scores: Sequence[Score], *, examples: int) -> EvaluationResult:
    """The figures of samples that were judged already; ``scores[i]`` is of ``samples[i]``."""
    correct: dict[str, list[float]] = defaultdict(list)
    rewards: list[float] = []
    unsaid = 0
    for sample, score in zip(samples, scores, strict=True):
        if score.value is None:
            continue
        if score.correct is None:  # The function that says so does not apply to this sample.
            unsaid += 1
            continue
        correct[sample.prompt_id].append(float(score.correct))
        rewards.append(score.value)
    if unsaid and not rewards:
        raise RunError("no reward function says which samples are correct; name one in 'rewards.accuracy'")
    if not rewards:
        reason = scores[0].reason if scores else "there are no prompts"
        raise RunError(f"none of {len(scores)} samples of the evaluation could be judged: {reason}")
    shares = [math.fsum(values) / len(values) for values in correct.values()]
    accuracy = math.fsum(shares) / len(shares)
    return EvaluationResult(
        accuracy=accuracy,
        standard_error=_standard_error(shares, accuracy),
        count=len(shares),
        samples=len(rewards),
        faults=sum(score.state is ScoreState.INFRASTRUCTURE_FAULT for score in scores),
        mean_reward=math.fsum(rewards) / len(rewards),
        examples=_examples(prompts, samples, scores, examples),
    )


def _standard_error(shares: Sequence[float], mean: float) -> float:
    """Of the mean of ``shares``; 0.5, the most it can be, for a single prompt."""
    if len(shares) < 2:
        return 0.5
    variance = math.fsum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
    return math.sqrt(variance / len(shares))


def _examples(prompts: Sequence[Prompt], samples: Sequence[Sample], scores: Sequence[Score], count: int) -> tuple[Example, ...]:
    first: dict[str, tuple[Sample, Score]] = {}
    for sample, score in zip(samples, scores, strict=True):
        first.setdefault(sample.prompt_id, (sample, score))
    chosen = [(prompt, *first[prompt.id]) for prompt in prompts if prompt.id in first][:count]
    return tuple(Example(prompt.text, sample.text, prompt.ground_truth, score.correct, score.value) for prompt, sample, score in chosen)
