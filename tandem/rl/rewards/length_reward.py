"""Rewards for the length of completions."""

from collections.abc import Sequence
from itertools import groupby

from tandem.config.length_reward import LengthRewardConfig
from tandem.config.rewards import RewardFunctionConfig
from tandem.rl.rewards.judgement import Item, Judge, JudgeCall, Judgement, not_applicable, number


def length_judge(function: RewardFunctionConfig) -> Judge:
    """Returns the judge of ``function.length``. The rule of Kimi k1.5 is judged after all others, because it reads whether a sample is correct."""
    rule = function.length
    assert rule is not None

    def judge(items: Sequence[Item], call: JudgeCall) -> list[Judgement]:
        if call.state.global_step < rule.start_step:
            return [number(0.0) for _ in items]
        if rule.rule == "kimi":
            return [judgement for _, group in groupby(items, lambda item: item.group) for judgement in kimi_judgements(list(group))]
        return [number(overlong_penalty(item.length, rule) if rule.rule == "soft_overlong" else target_penalty(item.length, rule)) for item in items]

    return Judge(function.label, True, judge, scope="batch" if rule.rule == "kimi" else "sample")


def kimi_judgements(group: Sequence[Item]) -> list[Judgement]:
    """Returns the length reward of Kimi k1.5 (2025, section 2.3.3) for the samples of one prompt. Samples that a function failed on are not among them; one
    of which no function says whether it is correct has none."""
    lengths = [item.length for item in group]
    shortest, longest = min(lengths), max(lengths)
    judgements = []
    for item in group:
        share = 0.0 if longest == shortest else 0.5 - (item.length - shortest) / (longest - shortest)
        judgements.append(not_applicable() if item.correct is None else number(share if item.correct else min(0.0, share)))
    return judgements


def overlong_penalty(length: int, rule: LengthRewardConfig) -> float:
    """Returns DAPO's soft overlong punishment (Yu et al., 2025, equation 13)."""
    free = rule.max_tokens - rule.buffer_tokens
    return 0.0 if length <= free else max((free - length) / rule.buffer_tokens, -1.0)


def target_penalty(length: int, rule: LengthRewardConfig) -> float:
    """Returns minus the distance from the target as a share of it, at least -1."""
    return -min(abs(length - rule.target_tokens) / rule.target_tokens, 1.0)
