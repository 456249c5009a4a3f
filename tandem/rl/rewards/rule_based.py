"""The built-in judges, and the composition of their judgements into one score."""

from collections.abc import Mapping

from tandem.config.rewards import AnswerMatcherConfig, RewardFunctionConfig, RewardsConfig
from tandem.config.task import REASONING_GYM
from tandem.rl.rewards.answer_matcher import answer_matcher, extract_answer, match_answer
from tandem.rl.rewards.format_checker import format_checker
from tandem.rl.rewards.functions import user_judge
from tandem.rl.rewards.judgement import Item, Judge, Judgement, checked_number, infrastructure_fault, model_fault, number
from tandem.types import Score, ScoreState


def make_judge(function: RewardFunctionConfig, config: RewardsConfig) -> Judge:
    """Returns the judge for ``function``. Raises ``UserError`` if it cannot be made."""
    if function.function == "answer_matcher":
        return Judge(function.label, True, answer_matcher(function.answer, config.model_fault_value))
    if function.function == "format_checker":
        assert function.format is not None
        return Judge(function.label, True, format_checker(function.format))
    if function.function == "task":
        answer_matcher(function.answer, config.model_fault_value)
        fault_value = config.model_fault_value
        return Judge(function.label, True, lambda items: [judge_by_task(item, function.answer, fault_value) for item in items])
    return user_judge(function)


def judge_by_task(item: Item, config: AnswerMatcherConfig, fault_value: float) -> Judgement:
    """Returns the judgement of the task's own judge: ``score_answer`` of a ``reasoning_gym`` dataset, the answer matcher for every other
    task."""
    if not item.task.startswith(REASONING_GYM):
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
    """Returns the weighted sum of the judgements of one sample. An infrastructure fault of any judge is the sample's, since a partial sum
    would be a different reward; a model fault of any judge sets the state."""
    components: dict[str, float] = {}
    for label, judgement in judgements.items():
        if judgement.value is not None:
            components[label] = judgement.value
            components.update({f"{label}/{name}": value for name, value in judgement.details.items()})
    broken = [judgement for judgement in judgements.values() if judgement.value is None]
    if broken:
        return Score(sample_id, ScoreState.INFRASTRUCTURE_FAULT, None, components, None, broken[0].reason)
    faults = [judgement for judgement in judgements.values() if judgement.state is ScoreState.MODEL_FAULT]
    state = ScoreState.MODEL_FAULT if faults else ScoreState.NUMBER
    total = sum(function.weight * components[function.label] for function in config.composition)
    deciding = judgements[config.accuracy_function]
    correct = deciding.correct
    if correct is None:
        assert deciding.value is not None
        correct = deciding.value >= config.accuracy_threshold
    return Score(sample_id, state, total, components, correct, faults[0].reason if faults else "")
