"""Samples as pages and trackers show them: texts of tokens, shortened, and which steps stand for all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.records.journal import Journal
from tandem.text.tokenizer import Tokenizer
from tandem.types import Sample, Score, UserError
from tandem.types.round import joined

LONGEST_TEXT = 240_000
"""Characters of a completion."""


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


def chosen_steps(recorded: Sequence[int], count: int) -> list[int]:
    """Returns at most ``count`` of the steps ``recorded``, evenly over them with the first and the last."""
    last = len(recorded) - 1
    places = sorted({round(number * last / (count - 1)) for number in range(count)}) if last >= count > 1 else range(min(last + 1, count))
    return [recorded[place] for place in places]


def samples_of_step(journal: Journal, directory: Path, step: int, count: int) -> list[tuple[str, ShownSample]]:
    """Returns the first ``count`` samples of ``step``, each after its prompt."""
    samples, scores = joined(journal.rounds(step))
    by_id, decode = {score.sample_id: score for score in scores}, decoder(journal, directory)
    return [(decode(sample.prompt_token_ids), _shown(sample, by_id[sample.id], decode, LONGEST_TEXT)) for sample in samples[:count]]


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
