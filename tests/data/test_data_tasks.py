import random
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tandem.config.load import build
from tandem.config.task import TaskConfig
from tandem.data.split import split_of
from tandem.data.tasks import Task, addition, make_task, programs, sort
from tandem.types import UserError

CONFIGS = {"sort": TaskConfig("sort", 3, 6), "addition": TaskConfig("addition", 1, 2), "programs": TaskConfig("programs")}


@pytest.fixture(params=sorted(CONFIGS))
def task(request: pytest.FixtureRequest) -> Task:
    return make_task(CONFIGS[request.param], seed=1)


def digits_of(text: str) -> list[int]:
    return [int(digit) for digit in text.removesuffix("=")]


def is_right(truth: Any, completion: str) -> bool:
    """Returns whether Python agrees: a program passes all its tests, another answer is the text."""
    if isinstance(truth, str):
        return completion == truth
    names: dict[str, Any] = {}
    exec(completion, names)
    return all(names["f"](*given) == wanted for given, wanted in zip(truth["inputs"], truth["outputs"], strict=True))


def test_sorting_asks_and_answers_as_python_sorts() -> None:
    task = make_task(CONFIGS["sort"], seed=0)
    lengths: Counter[int] = Counter()
    for i in range(400):
        item = task.train_prompt(i)
        digits = digits_of(item.text)
        assert item.text == "".join(map(str, digits)) + "="
        assert item.ground_truth == "".join(map(str, sorted(digits)))
        lengths[len(digits)] += 1
    assert sorted(lengths) == [3, 4, 5, 6]
    assert min(lengths.values()) > 60


def test_addition_asks_and_answers_as_python_adds() -> None:
    task = make_task(TaskConfig("addition", 1, 3), seed=0)
    lengths: Counter[int] = Counter()
    for i in range(400):
        item = task.train_prompt(i)
        left, right = item.text.removesuffix("=").split("+")
        assert item.ground_truth == str(int(left) + int(right))
        lengths.update((len(left), len(right)))
    assert sorted(lengths) == [1, 2, 3]


def test_programs_do_what_their_questions_say() -> None:
    task = make_task(TaskConfig("programs", max_operations=4), seed=0)
    shown = {shown.item.text: shown for shown in (task.demonstration(i, 0, 0.0) for i in range(2000))}
    assert {len(re.findall("[a-z]+", text)) for text in shown} == {2, 3, 4}
    assert {name for text in shown for name in re.findall("[a-z]+", text)} == set(programs.OPERATIONS)
    lists = {len(numbers) for one in shown.values() for [numbers] in one.item.ground_truth["inputs"]}
    assert lists == {3, 4, 5, 6}
    # Worked by hand.
    names: dict[str, Any] = {}
    exec(programs.program((("tail", 0), ("above", 2), ("add", 7), ("reverse", 0))), names)
    assert programs.question((("tail", 0), ("above", 2), ("add", 7), ("reverse", 0))) == "tail above 2 add 7 reverse:"
    assert names["f"]([9, 2, 3, 5]) == [12, 10]
    exec(programs.program((("double", 0), ("sum", 0))), names)
    assert names["f"]([1, 2, 3]) == 12


def test_pareto_lengths_have_a_long_tail() -> None:
    task = make_task(TaskConfig("sort", 3, 24, digits_distribution="pareto"), seed=0)
    lengths = [len(digits_of(task.train_prompt(i).text)) for i in range(4000)]
    assert min(lengths) == 3 and max(lengths) == 24
    for least in (4, 6, 12, 24):
        # P(length >= k) = (3 / k)^1.2, longer ones being cut at 24. Four standard errors of a share are at most 0.032.
        assert abs(sum(length >= least for length in lengths) / 4000 - (3 / least) ** 1.2) < 0.032


def test_training_held_out_and_final_instances_never_meet(task: Task) -> None:
    train = {task.train_prompt(i).text for i in range(3000)}
    held_out = {item.text for seed in range(3) for item in task.eval_prompts("held_out", 300, seed)}
    final = {item.text for seed in range(3) for item in task.eval_prompts("final", 300, seed)}
    assert len(held_out) > 100
    assert len(final) > 100
    assert not train & held_out
    assert not train & final
    assert not held_out & final
    shown = {task.demonstration(i, 5, 0.5).item.text for i in range(1000)}
    assert not shown & (held_out | final)


def test_held_out_instances_of_another_seed_are_others_of_the_same_kind(task: Task) -> None:
    first, second = (task.eval_prompts("held_out", 100, seed) for seed in (0, 1))
    assert [a.text for a in first] != [b.text for b in second]
    assert {split_of(item.text, 0.1) for item in (*first, *second)} == {"held_out"}


def test_an_instance_follows_from_seed_and_index_alone_in_any_process(task: Task) -> None:
    indices = list(range(50))
    forward = {i: task.train_prompt(i) for i in indices}
    random.Random(0).shuffle(indices)
    again = make_task(CONFIGS[task.name], seed=1)
    assert {i: again.train_prompt(i) for i in indices} == forward
    other = make_task(CONFIGS[task.name], seed=2)
    assert [other.train_prompt(i).text for i in range(50)] != [forward[i].text for i in range(50)]
    script = (
        "from tandem.config.task import TaskConfig; from tandem.data.tasks import make_task; "
        f"print([make_task({CONFIGS[task.name]!r}, 1).train_prompt(i).text for i in range(50)])"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str([forward[i].text for i in range(50)])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_demonstrations_are_wrong_as_often_as_asked_and_only_then(task: Task, share: float) -> None:
    shown = [task.demonstration(i, 9, share) for i in range(600)]
    wrong = sum(not is_right(s.item.ground_truth, s.completion) for s in shown)
    assert all(s.correct == is_right(s.item.ground_truth, s.completion) for s in shown)
    assert wrong == sum(not s.correct for s in shown)
    assert abs(wrong / 600 - share) < 0.06


def test_wrong_answers_have_the_form_of_right_ones() -> None:
    draw = random.Random(3)
    for _ in range(500):
        digits = tuple(draw.randrange(10) for _ in range(draw.randint(2, 6)))
        wrong = sort.wrong_answer(digits, draw)
        assert wrong != sort.answer(digits)
        assert len(wrong) == len(sort.answer(digits))
        operands = (draw.randrange(100), draw.randrange(100))
        slip = addition.wrong_answer(operands, draw)
        assert slip != addition.answer(operands)
        assert str(int(slip)) == slip
    assert sort.wrong_answer((3, 3, 3), draw) != "333"


def test_a_task_with_too_few_instances_to_hold_some_out_is_refused() -> None:
    task = make_task(TaskConfig("addition", 1, 1, held_out_share=0.0001), seed=0)
    with pytest.raises(UserError, match="too few distinct instances for a 'held_out' split"):
        task.eval_prompts("held_out", 1, 0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"name": "sorting"}, "'task.name' is 'sorting'; did you mean 'sort'?"),
        ({"name": "chess"}, "use sort, addition, programs, dataset, reasoning_gym:NAME or verifiers:NAME"),
        ({"name": "reasoning_gym:"}, "name the dataset behind it"),
        ({"name": "sort", "min_digits": 5, "max_digits": 4}, "'task.max_digits' is 4"),
        ({"name": "sort", "min_digits": 1}, "'task.min_digits' is 1"),
        ({"name": "sort", "path": "x.jsonl"}, "'task.path' is given but belongs to task dataset"),
        ({"name": "dataset", "path": "x", "max_digits": 3}, "belongs to task sort and addition"),
        ({"name": "sort", "settings": {"a": 1}}, "belongs to task reasoning_gym"),
        ({"name": "dataset"}, "'task.path' is missing"),
        ({"name": "addition", "digits_distribution": "pareto"}, "'task.digits_distribution' is given but belongs to task sort"),
        ({"name": "sort", "max_operations": 2}, "'task.max_operations' is given but belongs to task programs"),
        ({"name": "programs", "max_operations": 1}, "'task.max_operations' is 1; it must be from 2 to 16"),
        ({"name": "programs", "max_digits": 3}, "belongs to task sort and addition"),
        ({"name": "sort", "held_out_share": 0.5}, "'task.held_out_share' is 0.5"),
        ({"name": "sort", "prompt_template": "Sort!"}, "must contain {prompt}"),
        ({"name": "sort", "system_prompt": "Be brief."}, "'task.chat' is not true"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        build(TaskConfig, data, "task")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_one_bound_alone_moves_the_other_where_it_must() -> None:
    assert TaskConfig("sort", max_digits=2).digits() == (2, 2)
    assert TaskConfig("sort", min_digits=8).digits() == (8, 8)
    assert TaskConfig("sort").digits() == (3, 6)
    assert TaskConfig("addition").digits() == (1, 2)
