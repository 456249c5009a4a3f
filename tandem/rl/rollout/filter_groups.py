"""Dynamic sampling (DAPO; Yu et al., 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", section 3.2): which groups a step trains on.

A group is taken or dropped by its rewards and its place in the order of dispatch alone, never by its lengths or by when it was finished, so neither
a refill nor a resume favours short completions.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from tandem.config.filter_groups import FilterGroupsConfig
from tandem.types import FinishReason, Round, RunError, Sample, Score
from tandem.types.round import joined


class GroupState(StrEnum):
    """``USEFUL``: the metric differs within the group. Otherwise all completions are right, all are wrong, or equal in the metric for another reason
    (no reward function says what is correct, or right and wrong have the same reward). ``FAULTY``: fewer than two have a reward."""

    USEFUL = "useful"
    ALL_RIGHT = "all_right"
    ALL_WRONG = "all_wrong"
    EQUAL = "equal"
    FAULTY = "faulty"


Group = Sequence[tuple[Sample, Score]]


def groups_of(rounds: Sequence[Round]) -> list[Group]:
    """Returns the groups of ``rounds`` in the order of dispatch, each sample with its score."""
    groups: list[Group] = []
    for samples, scores in rounds:
        score_of = {score.sample_id: score for score in scores}
        members: dict[str, list[tuple[Sample, Score]]] = {}
        for sample in samples:
            members.setdefault(sample.prompt_id, []).append((sample, score_of[sample.id]))
        groups += members.values()
    return groups


def group_state(group: Group, config: FilterGroupsConfig) -> GroupState:
    """Returns whether ``group`` has a learning signal, and why not. Raises ``RunError`` for metric ``accuracy`` where no function says what is correct."""
    valid = [score for sample, score in group if score.value is not None and sample.finish_reason is not FinishReason.ABORT]
    if len(valid) < 2:
        return GroupState.FAULTY
    correct = {score.correct for score in valid}
    if config.metric == "accuracy" and None in correct:
        raise RunError(
            f"'algorithm.filter_groups.metric' is 'accuracy', and no reward function says whether sample {valid[0].sample_id} is correct; start a new run with "
            "metric reward, or with a reward function that says so"
        )
    if len(correct if config.metric == "accuracy" else {score.value for score in valid}) > 1:
        return GroupState.USEFUL
    return GroupState.ALL_RIGHT if correct == {True} else GroupState.ALL_WRONG if correct == {False} else GroupState.EQUAL


def is_complete(rounds: Sequence[Round], config: FilterGroupsConfig | None, prompts_per_step: int) -> bool:
    """Returns whether a step needs no further round: without dynamic sampling, one suffices."""
    if config is None or len(rounds) >= config.max_num_gen_batches:
        return len(rounds) > 0
    return not groups_lacking(rounds, config, prompts_per_step)


def groups_lacking(rounds: Sequence[Round], config: FilterGroupsConfig | None, prompts_per_step: int) -> int:
    """Returns how many groups a step with ``rounds`` still lacks: with dynamic sampling, of useful ones."""
    groups = groups_of(rounds) if config is None else _useful(rounds, config)
    return max(prompts_per_step - len(groups), 0)


def trained_on(rounds: Sequence[Round], config: FilterGroupsConfig | None, prompts_per_step: int) -> Round:
    """Returns what a step with ``rounds`` trains on: all, or with dynamic sampling the first ``prompts_per_step`` useful groups."""
    if config is None:
        return joined(rounds)
    members = [member for group in _useful(rounds, config)[:prompts_per_step] for member in group]
    return Round([sample for sample, _ in members], [score for _, score in members])


def filter_metrics(rounds: Sequence[Round], config: FilterGroupsConfig, prompts_per_step: int) -> dict[str, float]:
    """Returns the number of rounds, and shares of all groups that were drawn: dropped for each reason, and useful but more than the step takes."""
    states = Counter(group_state(group, config) for group in groups_of(rounds))
    drawn = max(states.total(), 1)
    row = {"rollout/rounds": float(len(rounds)), "rollout/dropped_share": (states.total() - states[GroupState.USEFUL]) / drawn}
    for state in GroupState:
        if state is not GroupState.USEFUL:
            row[f"rollout/dropped_{state}_share"] = states[state] / drawn
    row["rollout/surplus_share"] = max(states[GroupState.USEFUL] - prompts_per_step, 0) / drawn
    return row


def _useful(rounds: Sequence[Round], config: FilterGroupsConfig) -> list[Group]:
    return [group for group in groups_of(rounds) if group_state(group, config) is GroupState.USEFUL]
