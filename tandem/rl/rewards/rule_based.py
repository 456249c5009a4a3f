"""The built-in judges, and the composition of their judgements into one score."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.config.rewards import AnswerMatcherConfig, RewardFunctionConfig, RewardsConfig
from tandem.config.task import REASONING_GYM
from tandem.data.tasks.verifiers_package import import_verifiers
from tandem.rl.rewards.answer_matcher import check_installed, extract_answer, match_answer
from tandem.rl.rewards.code.executor import code_judge
from tandem.rl.rewards.endpoint import endpoint_judge
from tandem.rl.rewards.format_checker import format_checker
from tandem.rl.rewards.functions import user_judge
from tandem.rl.rewards.judge_model import judge_of_model
from tandem.rl.rewards.judgement import Item, Judge, JudgeCall, Judgement, checked_number, infrastructure_fault, model_fault, number
from tandem.rl.rewards.length_reward import length_judge
from tandem.rl.rewards.scorers import SCORERS, scorer_of
from tandem.rl.rewards.verifiers_score import judge_by_environment
from tandem.types import Score, ScoreState
from tandem.types.sample import REWARD

Judged = Callable[[Item], Judgement]


def make_judge(function: RewardFunctionConfig, config: RewardsConfig) -> Judge:
    """Returns the judge for ``function``. Raises ``UserError`` if it cannot be made."""
    fault_value = config.model_fault_value
    if function.function in SCORERS:
        score = SCORERS[function.function]
        return _each(function, lambda item: score(item.completion, item.ground_truth, fault_value))
    if function.function == "answer_matcher":
        check_installed(function.answer)
        return _each(function, lambda item: match_answer(item.completion, item.ground_truth, function.answer, fault_value))
    if function.function == "format_checker":
        assert function.format is not None
        return _each(function, format_checker(function.format))
    if function.function == "judge":
        return judge_of_model(function)
    if function.function == "length":
        return length_judge(function)
    if function.function == "code_executor":
        return code_judge(function, fault_value)
    if function.function == "verifiers":
        import_verifiers()  # Before the first sample, whose time is limited.
        return _each(function, judge_by_environment)
    if function.function == "agent":
        return _each(function, judge_by_agent)
    if function.function == "task":
        check_installed(function.answer)
        return _each(function, lambda item: judge_by_task(item, function.answer, fault_value))
    return endpoint_judge(function) if function.is_endpoint else user_judge(function)


def _each(function: RewardFunctionConfig, judged: Judged) -> Judge:
    def judge(items: Sequence[Item], call: JudgeCall) -> list[Judgement]:
        return [judged(item) for item in items]

    return Judge(function.label, True, judge)


def judge_by_agent(item: Item) -> Judgement:
    """Returns the reward that the agent returned, with its other numbers as details."""
    if REWARD not in item.outcome:
        return infrastructure_fault("the agent returned no number, and reward function 'agent' reads one; name another function in rewards.functions")
    return number(item.outcome[REWARD], details={name: value for name, value in item.outcome.items() if name != REWARD})


def judge_by_task(item: Item, config: AnswerMatcherConfig, fault_value: float) -> Judgement:
    """Returns the judgement of the task's own judge: ``score_answer`` of a ``reasoning_gym`` dataset, the benchmark's scorer for rows and
    solutions of GSM8K and MATH, or else the answer matcher."""
    if not item.task.startswith(REASONING_GYM):
        scorer = scorer_of(item.columns.get("data_source"), item.ground_truth) if config == AnswerMatcherConfig() else None
        if scorer is not None:
            return scorer(item.completion, item.ground_truth, fault_value)
        return match_answer(item.completion, item.ground_truth, config, fault_value)
    # The entry is generated again instead of sent: JSON would turn its tuples, which some judges compare with, into lists.
    from tandem.data.tasks.reasoning_gym_host import instance_of

    dataset, entry = instance_of(item.columns)
    if entry["answer"] != item.ground_truth:
        return infrastructure_fault(f"{item.task} now generates another instance; check that the installed version of reasoning_gym is the same")
    answer = extract_answer(item.completion, config)
    if answer is None:
        return model_fault(fault_value, "no answer found")
    return number(checked_number(dataset.score_answer(answer, entry)))


def compose(sample_id: str, judgements: Mapping[str, Judgement], config: RewardsConfig) -> Score:
    """Returns the weighted sum of the judgements of one sample that apply, as TRL sums them. An infrastructure fault of any judge is the sample's, since a
    partial sum would be a different reward; a model fault of any judge sets the state."""
    components: dict[str, float] = {}
    extra: dict[str, Any] = {}
    broken: Judgement | None = None
    fault: Judgement | None = None
    for label, judgement in judgements.items():
        if judgement.value is not None:
            components[label] = judgement.value
        for name, value in judgement.details.items():
            components[f"{label}/{name}"] = value
        extra.update(judgement.extra)
        if judgement.state is ScoreState.INFRASTRUCTURE_FAULT:
            broken = broken or judgement
        elif judgement.state is ScoreState.MODEL_FAULT:
            fault = fault or judgement
    if broken is not None:
        return Score(sample_id, ScoreState.INFRASTRUCTURE_FAULT, None, components, None, broken.reason, extra)
    applied = [function.weight * components[label] for function in config.composition if judgements[label := function.label].value is not None]
    if not applied:
        return Score(sample_id, ScoreState.NOT_APPLICABLE, None, components, None, "every reward function returned None", extra)
    state = ScoreState.NUMBER if fault is None else ScoreState.MODEL_FAULT
    correct = is_correct(judgements[config.accuracy_function], config)
    return Score(sample_id, state, sum(applied), components, correct, "" if fault is None else fault.reason, extra)


def is_correct(deciding: Judgement, config: RewardsConfig) -> bool | None:
    """Returns whether a sample is correct by the judgement of the accuracy function; ``None`` if that has no value."""
    if deciding.correct is None and deciding.value is not None:
        return deciding.value >= config.accuracy_threshold
    return deciding.correct
