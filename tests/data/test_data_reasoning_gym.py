import psutil
import pytest

from tandem.config.task import TaskConfig
from tandem.data.tasks import make_task
from tandem.data.tasks.reasoning_gym import ReasoningGymTask
from tandem.data.tasks.reasoning_gym_host import Dataset, Host
from tandem.types import RunError, UserError

pytest.importorskip("reasoning_gym")


def test_chain_sum_by_name_asks_sums_that_python_confirms_and_ends_its_process() -> None:
    task = make_task(TaskConfig("reasoning_gym:chain_sum", settings={"min_terms": 2, "max_terms": 3}), seed=1)
    assert isinstance(task, ReasoningGymTask)
    pid = task._host.pid
    train = [task.train_prompt(i) for i in range(40)]
    for item in train:
        assert str(eval(item.columns["metadata"]["expression"])) == item.ground_truth
        assert item.columns["metadata"]["expression"] in item.text
    held_out, final = task.eval_prompts("held_out", 20, 1), task.eval_prompts("final", 20, 1)
    sides = [{item.text for item in items} for items in (train, held_out, final)]
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]
    assert task.demonstration(0, 0, 0.0).completion.strip() == task.demonstration(0, 0, 0.0).item.ground_truth
    task.close()
    assert not psutil.pid_exists(pid)


def test_instances_are_the_same_after_a_restart_also_where_the_package_goes_through_sets() -> None:
    first, second = (make_task(TaskConfig("reasoning_gym:ransom_note"), seed=1) for _ in range(2))
    try:
        assert first.fingerprint == second.fingerprint
        assert [first.train_prompt(i) for i in range(6)] == [second.train_prompt(i) for i in reversed(range(6))][::-1]
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("chain_sm", {}, "did you mean 'reasoning_gym:chain_sum'"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "do not fit reasoning_gym:chain_sum: max_terms must be >= min_terms"),
        ("chain_sum", {"terms": 5}, "unexpected keyword argument 'terms'"),
    ],
)
def test_a_wrong_name_or_setting_is_one_clear_line(name: str, settings: dict[str, int], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        Host().open(Dataset(name, settings))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_name_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="did you mean 'reasoning_gym:chain_sum'"):
        make_task(TaskConfig("reasoning_gym:chain_sm"), seed=0)


def test_a_host_that_dies_is_one_clear_line() -> None:
    task = make_task(TaskConfig("reasoning_gym:chain_sum"), seed=1)
    assert isinstance(task, ReasoningGymTask)
    psutil.Process(task._host.pid).kill()
    with pytest.raises(RunError, match="the process that makes prompts"):
        task.train_prompt(0)
    task.close()
