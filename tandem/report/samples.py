"""The samples that a page shows: some of some steps, with their rewards, so that a reader sees how completions change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.records.journal import Journal
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, Sample, Score, UserError
from tandem.types.round import joined

MOST_STEPS = 20
PROMPTS, SAMPLES_EACH = 3, 3
"""Prompts of a step, and samples of a prompt."""
ALL_CHARACTERS = 240_000
"""Characters of text on a page, so that it stays below a megabyte."""


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A completion. ``tokens``: how many the model sampled. ``reward``: ``None`` where it could not be scored; ``reason`` then says why.
    ``parts``: the value of each reward function."""

    text: str
    tokens: int
    finish_reason: str
    reward: float | None
    correct: bool | None
    parts: Mapping[str, float]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Some prompts of a step with some of their samples. ``count``: samples of the whole step; ``mean``: their mean reward."""

    step: int
    count: int
    mean: float | None
    prompts: Sequence[tuple[str, Sequence[ShownSample]]]


def chosen_samples(journal: Journal, directory: Path, steps: int) -> list[StepSamples]:
    """Returns samples of at most ``MOST_STEPS`` of the ``steps`` that the run has taken, evenly over them with the first and the last."""
    recorded = [step for step in journal.journalled_steps() if step < steps]
    if not recorded:
        return []
    last = len(recorded) - 1
    places = sorted({round(number * last / (MOST_STEPS - 1)) for number in range(MOST_STEPS)}) if last >= MOST_STEPS else range(last + 1)
    decode, longest = decoder(journal, directory), ALL_CHARACTERS // (len(places) * PROMPTS * (SAMPLES_EACH + 1))
    chosen = []
    for place in places:
        try:
            rounds = journal.rounds(recorded[place])
        except RunError:  # The table of faults names the damaged step.
            continue
        samples, scores = joined(rounds)
        if samples:
            chosen.append(_step(recorded[place], samples, {score.sample_id: score for score in scores}, decode, longest))
    return chosen


def samples_of_step(journal: Journal, directory: Path, step: int, count: int) -> list[tuple[str, ShownSample]]:
    """Returns the first ``count`` samples of ``step``, each after its prompt."""
    samples, scores = joined(journal.rounds(step))
    by_id, decode = {score.sample_id: score for score in scores}, decoder(journal, directory)
    return [(decode(sample.prompt_token_ids), _shown(sample, by_id[sample.id], decode, ALL_CHARACTERS)) for sample in samples[:count]]


def _step(
    step: int, samples: Sequence[Sample], scores: Mapping[str, Score], decode: Callable[[Sequence[int]], str], longest: int
) -> StepSamples:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_id, []).append(sample)
    rewards = [score.value for score in scores.values() if score.value is not None]
    prompts = [
        (shortened(decode(group[0].prompt_token_ids), longest), [_shown(sample, scores[sample.id], decode, longest) for sample in group[:SAMPLES_EACH]])
        for group in list(groups.values())[:PROMPTS]
    ]
    return StepSamples(step, len(samples), sum(rewards) / len(rewards) if rewards else None, prompts)


def _shown(sample: Sample, score: Score, decode: Callable[[Sequence[int]], str], longest: int) -> ShownSample:
    """Returns ``sample`` as a page shows it: an episode of several turns with the results of its tools."""
    text = shortened(decode(sample.token_ids) if sample.response_mask else sample.text, longest)
    return ShownSample(text, sample.sampled_tokens, sample.finish_reason.value, score.value, score.correct, score.components, score.reason[:200])


def shortened(text: str, longest: int) -> str:
    """Returns ``text`` with its middle left out where it has more than ``longest`` characters."""
    if len(text) <= longest:
        return text
    return f"{text[: 2 * longest // 3]} … {len(text) - longest:,} characters … {text[-(longest // 3) :]}"


def decoder(journal: Journal, directory: Path) -> Callable[[Sequence[int]], str]:
    """Returns a function that decodes a prompt with the tokenizer of the model that the run starts from, or lists its token ids if the model was removed."""
    start = journal.get("start_model")
    try:
        tokenizer = Tokenizer.from_folder(directory / start["folder"]) if start else None
    except UserError:
        tokenizer = None

    def decode(ids: Sequence[int]) -> str:
        if tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids):
            return tokenizer.decode(ids, skip_special_tokens=False)
        return "token ids " + " ".join(map(str, ids))

    return decode
