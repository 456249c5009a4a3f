"""The samples of a run's journal: of one step by prompt, found over all steps, and one with its tokens."""

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.load import build
from tandem.dashboard.open_run import OpenRun
from tandem.report.advantages import sample_advantages
from tandem.report.run_facts import RunFacts
from tandem.report.samples import shortened
from tandem.report.series import finite
from tandem.runtime.records.entropies import read_entropies
from tandem.runtime.records.journal import Journal
from tandem.types import RunError, Sample, Score, UserError
from tandem.types.round import Round, joined
from tandem.types.token_entropies import unpack_halves

LONGEST_TEXT = 6000
MOST_TOKENS = 4000
SEARCH_S = 1.0
"""Seconds of one search, which the next goes on from."""
_AT_ONCE = 200
Decode = Callable[[Sequence[int]], str]
ONLY: Mapping[str, Callable[[Sample, Score | None], bool]] = {
    "": lambda sample, score: True,
    "correct": lambda sample, score: score is not None and score.correct is True,
    "wrong": lambda sample, score: score is not None and score.correct is False,
    "unscored": lambda sample, score: score is None or score.value is None,
    "truncated": lambda sample, score: sample.is_truncated,
}
"""The filters by name."""


@dataclass(frozen=True, slots=True)
class Filter:
    """``text``: in the prompt or the completion, whatever the case. ``only``: a name of ``ONLY``."""

    text: str = ""
    only: str = ""

    def __post_init__(self) -> None:
        if self.only not in ONLY:
            raise UserError(f"'only' is '{self.only[:50]}'; it is one of {', '.join(filter(None, ONLY))}")

    def fits(self, sample: Sample, score: Score | None, prompt: str, completion: str) -> bool:
        wanted = self.text.casefold()
        return ONLY[self.only](sample, score) and (not wanted or wanted in completion.casefold() or wanted in prompt.casefold())


@dataclass(frozen=True, slots=True)
class _Step:
    """The samples of a step with their scores, where it was judged, and their advantages."""

    number: int
    samples: Sequence[Sample]
    scores: Mapping[str, Score]
    advantages: Mapping[str, float]


def _read(journal: Journal, step: int, config: AlgorithmConfig | None) -> _Step:
    drawn = journal.drawn(step)
    whole = joined([Round(samples, journal.scores(step, number) or []) for number, samples in enumerate(drawn)])
    scores = {score.sample_id: score for score in whole.scores}
    return _Step(step, whole.samples, scores, sample_advantages(config, whole.samples, scores))


def algorithm_of(facts: RunFacts | None) -> AlgorithmConfig | None:
    """Returns the section ``algorithm`` of the run's recipe, ``None`` where it is not one of reinforcement learning."""
    if facts is None or facts.recipe is None or facts.is_data:
        return None
    wanted = ("name", "advantage_epsilon", "kl_in_reward")
    try:
        return build(AlgorithmConfig, {key: facts.recipe[f"algorithm.{key}"] for key in wanted})
    except (KeyError, UserError):
        return None


def step_samples(run: OpenRun, step: int | None, wanted: Filter, offset: int, limit: int) -> dict[str, Any]:
    """Returns the samples of ``step`` (``None``: the newest), or of the one before it that has some, by prompt. ``offset``, ``limit``: of its prompts."""
    config = algorithm_of(run.facts()[0])
    with run.journal() as journal:
        last = journal.last_journalled_step()
        if last is None:
            return {"step": None, "last": None, "prompts": [], "matched": 0, "count": 0, "mean": None}
        chosen = (journal.steps_before(last if step is None else min(step, last), 1) or [last])[0]
        found, decode = _read(journal, chosen, config), run.decode(journal)
    groups: dict[str, list[Sample]] = {}
    for sample in found.samples:
        groups.setdefault(sample.prompt_id, []).append(sample)
    prompts, matched = [], 0
    for prompt_id, group in groups.items():
        prompt = decode(group[0].prompt_token_ids)
        fitting = [sample for sample in group if wanted.fits(sample, found.scores.get(sample.id), prompt, completion_of(sample, decode))]
        if fitting:
            matched += len(fitting)
            prompts.append({"id": prompt_id, "prompt": shortened(prompt, LONGEST_TEXT), "samples": [_shown(found, sample, decode) for sample in fitting]})
    rewards = [score.value for score in found.scores.values() if score.value is not None]
    return {
        "step": chosen, "last": last, "count": len(found.samples), "mean": finite(math.fsum(rewards) / len(rewards)) if rewards else None, "matched": matched,
        "total": len(prompts), "prompts": prompts[offset : offset + limit],
    }  # fmt: skip


def search(run: OpenRun, wanted: Filter, before: int | None, same_as: tuple[int, str] | None, limit: int) -> dict[str, Any]:
    """Returns samples that fit, of the steps up to ``before`` (``None``: the newest), the newest first, until there are ``limit`` or the time is over.
    ``same_as``: step and id of a sample with whose prompt they were drawn. ``next`` is where to go on, ``None`` at the end."""
    config = algorithm_of(run.facts()[0])
    ends, found, looked_at = time.monotonic() + SEARCH_S, [], 0
    with run.journal() as journal:
        decode, last = run.decode(journal), journal.last_journalled_step()
        of_prompt = None if same_as is None else _find(journal, *same_as).prompt_token_ids
        at = last if before is None else before
        while at is not None and at >= 0:
            steps = journal.steps_before(at, _AT_ONCE)
            for step in steps:
                looked_at += 1
                if of_prompt is None or any(array("i", of_prompt).tobytes() in blob for blob in journal.sample_blobs(step)):
                    read = _read(journal, step, config)
                    for sample in read.samples:
                        if of_prompt is not None and sample.prompt_token_ids != of_prompt:
                            continue
                        prompt = decode(sample.prompt_token_ids) if wanted.text or of_prompt is None else ""
                        if wanted.fits(sample, read.scores.get(sample.id), prompt, completion_of(sample, decode)):
                            found.append({"step": step, "prompt": shortened(prompt, 300), **_shown(read, sample, decode)})
                at = step - 1
                if len(found) >= limit or time.monotonic() >= ends:
                    return {"found": found, "next": at if at >= 0 and journal.steps_before(at, 1) else None, "looked_at": looked_at}
            if not steps:
                break
    return {"found": found, "next": None, "looked_at": looked_at}


def _find(journal: Journal, step: int, sample_id: str) -> Sample:
    for samples in journal.drawn(step):
        for sample in samples:
            if sample.id == sample_id:
                return sample
    raise UserError(f"step {step} has no sample '{sample_id[:100]}'")


def completion_of(sample: Sample, decode: Decode) -> str:
    """Returns the text of a completion: of an episode of several turns with the results of its tools."""
    return decode(sample.token_ids) if sample.response_mask else sample.text


def _shown(step: _Step, sample: Sample, decode: Decode) -> dict[str, Any]:
    score = step.scores.get(sample.id)
    return {
        "id": sample.id, "prompt_id": sample.prompt_id, "text": shortened(completion_of(sample, decode), LONGEST_TEXT), "tokens": sample.sampled_tokens,
        "finish": sample.finish_reason.value, "reward": None if score is None else finite(score.value), "correct": None if score is None else score.correct,
        "parts": {} if score is None else {name[:200]: finite(value) for name, value in score.components.items()},
        "reason": (sample.fault or (score.reason if score is not None else "not judged yet"))[:500],
        "advantage": step.advantages.get(sample.id), "versions": sorted({f"{v.incarnation}.{v.step}" for v in sample.sampled_weight_versions}),
    }  # fmt: skip


def one_sample(run: OpenRun, step: int, sample_id: str) -> dict[str, Any]:
    """Returns one sample with its tokens. Raises ``UserError`` where there is none."""
    config = algorithm_of(run.facts()[0])
    with run.journal() as journal:
        decode, read = run.decode(journal), _read(journal, step, config)
    sample = next((each for each in read.samples if each.id == sample_id), None)
    if sample is None:
        raise UserError(f"step {step} has no sample '{sample_id[:100]}'")
    ids = sample.token_ids[:MOST_TOKENS]
    score = read.scores.get(sample.id)
    texts, (entropies, missing) = token_texts(ids, decode, sample.prompt_token_ids[-1:]), _entropies(run, step, sample)
    tokens = [
        [
            texts[place], ids[place], finite(sample.logprobs[place]), finite(sample.sampling_logprobs[place]), int(sample.is_sampled[place]),
            finite(entropies[place]) if entropies else None,
        ]
        for place in range(len(ids))
    ]  # fmt: skip
    return {
        "step": step, "prompt": shortened(decode(sample.prompt_token_ids), 4 * LONGEST_TEXT), **_shown(read, sample, decode), "token_list": tokens,
        "entropy_missing": missing, "left_out": len(sample.token_ids) - len(ids), "branches": len(sample.branches),
        "extra": dict(score.extra) if score is not None else {},
        "replay": f"tandem replay {run.directory} --step {step}",
    }  # fmt: skip


def _entropies(run: OpenRun, step: int, sample: Sample) -> tuple[list[float], str]:
    """Returns the entropy of the policy at each token of ``sample``, NaN where it was not trained on; or none, and why."""
    try:
        halves = read_entropies(run.directory, step).get(sample.id, b"")
        values = unpack_halves(halves)
    except (RunError, ValueError) as error:
        return [], str(error)
    return (values, "") if values and len(values) == len(sample.token_ids) else ([], "not recorded")


def token_texts(ids: Sequence[int], decode: Decode, before: Sequence[int] = ()) -> list[str]:
    """Returns the text that each token adds. The bytes of one letter may be several tokens: the last of them has the letter, the others nothing.
    ``before``: the token before the first."""
    texts: list[str] = []
    context, open_ids = list(before), list[int]()
    for token in ids:
        open_ids.append(token)
        text = decode([*context, *open_ids])
        if text.startswith("token ids "):
            texts.append(str(token))
            open_ids.clear()
            continue
        known = decode(context) if context else ""
        added = text[len(known) :] if text.startswith(known) else decode(open_ids)
        if added.endswith("\ufffd") and len(open_ids) < 8:
            texts.append("")
            continue
        texts.append(added)
        context, open_ids = [token], []
    return texts
