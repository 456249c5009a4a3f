"""Computes the row of ``metrics.jsonl`` from a step's samples and scores, under the field's names."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tandem.config.recipe import Recipe
from tandem.data.tools.load import ERROR
from tandem.rl.rollout.filter_groups import filter_metrics
from tandem.types import FinishReason, ReplayBuffer, Round, Sample, Score, ScoreState, WeightVersion
from tandem.types.round import joined


def rollout_metrics(rounds: Sequence[Round], recipe: Recipe) -> dict[str, float]:
    """Returns the metrics of all samples of a step's ``rounds``, and those of dynamic sampling where ``recipe`` has it."""
    filtered = recipe.algorithm.filter_groups
    row = {}
    if recipe.rollout.repetition_detection is not None:
        row["response_length/repetition_ratio"] = _mean([float(s.finish_reason is FinishReason.REPETITION) for s in joined(rounds).samples])
    return row | sample_metrics(*joined(rounds)) | (filter_metrics(rounds, filtered, recipe.rollout.prompts_per_step) if filtered is not None else {})


def sample_metrics(samples: Sequence[Sample], scores: Sequence[Score]) -> dict[str, float]:
    """Returns the metrics: rewards over the samples that have one (no metric without any), lengths, in sampled tokens, over all.
    All sums are exact (``math.fsum``), so a row does not depend on the order in which scores arrived."""
    values = [score.value for score in scores if score.value is not None]
    row = {"reward/mean": _mean(values), "reward/std": _deviation(values)} if values else {}
    row["reward/frac_zero_std"] = _share_without_spread(samples, scores)
    row["reward/fault_share"] = sum(score.state is ScoreState.INFRASTRUCTURE_FAULT for score in scores) / max(len(scores), 1)
    if not_applicable := sum(score.state is ScoreState.NOT_APPLICABLE for score in scores):
        row["reward/not_applicable_share"] = not_applicable / len(scores)
    components: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        if score.value is not None:
            for name, value in score.components.items():
                components[name].append(value)
    row.update({f"reward/{name}": _mean(values) for name, values in sorted(components.items())})
    judged = [float(score.correct) for score in scores if score.correct is not None and score.value is not None]
    if judged:
        row["accuracy"] = _mean(judged)
    lengths = [float(sum(each.sampled_tokens for each in sample.sequences)) for sample in samples]
    row["response_length/mean"] = _mean(lengths)
    if any(sample.messages for sample in samples):
        row.update(_episode_metrics(samples))
    routed = [each.routed_experts for sample in samples for each in sample.sequences if each.routed_experts is not None]
    if routed:
        row["router_replay/bytes_per_token"] = sum(len(each.data) for each in routed) / sum(each.tokens for each in routed)
    row["response_length/max"] = max(lengths, default=0.0)
    row["response_length/clip_ratio"] = _mean([float(s.finish_reason is FinishReason.LENGTH) for s in samples])
    return row


def _episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns verl's ``num_turns``, of the model's turns, and TRL's ``tools``: calls for each sample, and the share of them with an error as a result."""
    turns = [float(sum(message["role"] == "assistant" for message in sample.messages)) for sample in samples]
    results = [str(message["content"]) for sample in samples for message in sample.messages if message["role"] == "tool"]
    failed = [float(result.startswith(ERROR)) for result in results]
    branches = {"num_branches/mean": _mean([float(len(sample.sequences)) for sample in samples])} if any(sample.branches for sample in samples) else {}
    calls = {"tools/call_frequency": len(results) / len(samples), "tools/failure_frequency": _mean(failed)}
    return {"num_turns/mean": _mean(turns), "num_turns/max": max(turns), **branches, **calls}


def tokens_by_version(samples: Iterable[Sample]) -> Counter[WeightVersion]:
    """Returns how many tokens each version of the weights has drawn."""
    drawn = Counter[WeightVersion | None]()
    for sample in samples:
        for each in sample.sequences:
            drawn.update(each.weight_versions)
    return Counter({version: tokens for version, tokens in drawn.items() if version is not None})


def staleness(samples: Sequence[Sample], step: int) -> float:
    """Returns the mean age, in optimizer steps, of the weights that drew the tokens."""
    drawn = tokens_by_version(samples)
    return sum(tokens * (step - version.step) for version, tokens in drawn.items()) / max(drawn.total(), 1)


def staleness_max(samples: Sequence[Sample], step: int) -> float:
    """Returns the largest age, in optimizer steps, of the weights that drew a token."""
    return float(max((step - version.step for version in tokens_by_version(samples)), default=0))


def partial_metrics(samples: Sequence[Sample], buffer: ReplayBuffer, step: int) -> dict[str, float]:
    """Returns the metrics of a partial rollout: the share of the step's tokens that older weights drew, the largest age of a token in optimizer steps, and
    what is in the replay ``buffer`` after the step."""
    ages = [step - version.step for sample in samples for version in sample.sampled_weight_versions]
    return {
        "rollout/off_policy_share": _mean([float(age > 0) for age in ages]),
        "rollout/staleness_max": staleness_max(samples, step),
        "rollout/buffer_groups": float(len(buffer.groups)),
        "rollout/buffer_complete_groups": float(len(buffer.complete_groups)),
        "rollout/buffer_tokens": float(sum(sample.sampled_tokens for sample in buffer.samples)),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _share_without_spread(samples: Sequence[Sample], scores: Sequence[Score]) -> float:
    groups: dict[str, set[float]] = defaultdict(set)
    for sample, score in zip(samples, scores, strict=True):
        if score.value is not None:
            groups[sample.prompt_id].add(score.value)
    return _mean([float(len(rewards) == 1) for rewards in groups.values()])
