"""The advantages of a step's samples, from their rewards: what the trainer computes of the same groups, without torch."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from tandem.config.algorithm import AlgorithmConfig
from tandem.types import FinishReason, Sample, Score

_Estimator = Callable[[Sequence[float], float], Sequence[float]]


def _grpo(rewards: Sequence[float], epsilon: float) -> Sequence[float]:
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean, spread = fmean(rewards), stdev(rewards)
    return [(reward - mean) / (spread + epsilon) for reward in rewards]


def _dr_grpo(rewards: Sequence[float], epsilon: float) -> Sequence[float]:
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def _rloo(rewards: Sequence[float], epsilon: float) -> Sequence[float]:
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


_OF_GROUPS: Mapping[str, _Estimator] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}


def sample_advantages(config: AlgorithmConfig | None, samples: Sequence[Sample], scores: Mapping[str, Score]) -> dict[str, float]:
    """Returns the advantage of each sample that has one, by its id; it is that of each of its tokens. Empty for an algorithm whose advantages depend on more
    than the rewards of a group, and where a KL lowers the rewards."""
    estimate = None if config is None or config.kl_in_reward else _OF_GROUPS.get(config.name)
    if estimate is None or config is None:
        return {}
    groups: dict[str, list[tuple[str, float]]] = {}
    for sample in samples:
        score = scores.get(sample.id)
        if score is not None and score.value is not None and sample.finish_reason is not FinishReason.ABORT:
            groups.setdefault(sample.prompt_id, []).append((sample.id, score.value))
    found: dict[str, float] = {}
    for members in groups.values():
        if len(members) >= 2:
            values = estimate([reward for _, reward in members], config.advantage_epsilon)
            found |= dict(zip((name for name, _ in members), values, strict=True))
    return found
