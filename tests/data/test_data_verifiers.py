"""Environments of the ``verifiers`` package as prompts: their own tasks, scored by their own functions, against the real package."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.config.recipe import load_config
from tandem.config.rewards import RewardFunctionConfig, RewardsConfig
from tandem.config.task import TaskConfig
from tandem.data.tasks import make_task
from tandem.data.tasks.verifiers_host import Environment, read_tasks
from tandem.data.tasks.verifiers_package import environment_config, tasks_of, why_episodes
from tandem.jobs.checks.check_answers import check_answers, check_episodes
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rewards.verifiers_score import scored
from tandem.types import FinishReason, Prompt, Sample, ScoreState, UserError, WeightVersion

pytest.importorskip("verifiers")


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "environments"))


def test_the_tasks_of_an_environment_are_read_and_a_completion_is_scored_by_its_own_functions():
    read = read_tasks(Environment("number_sums", {"taskset": {"largest": 2}, "select": {"skip": 1, "limit": 7}}))
    assert [task["prompt"] for task in read.tasks] == ["0+1=", "0+2=", "1+0=", "1+1=", "1+2=", "2+0=", "2+1="] and read.episodes == ""
    assert [Path(file).name for file in read.files] == ["number_sums.py"]
    config = environment_config("number_sums", {})
    # Right and short; short alone; neither.
    for completion, exact, short in [("3", 1.0, 1.0), (" 4", 0.0, 1.0), ("I think it is 3", 0.0, 0.0)]:
        trace = asyncio.run(scored(config, read.tasks[4], completion))
        assert trace.reward == exact + 0.5 * short and trace.metrics == {"asked": 1.0}
        assert {name: reward.score for name, reward in trace.rewards.items()} == {"exact": exact, "short": short}
    game = environment_config("guessing_game", {})
    with pytest.raises(UserError, match=r"has tasks without end; set task\.settings\.select\.limit"):
        list(tasks_of(game, {}))
    (task,) = tasks_of(game, {"select": {"limit": 1}})
    assert why_episodes(game, task) == "plays its tasks in turns of its own"
    tools = environment_config("with_adder", {})
    assert why_episodes(tools, next(tasks_of(tools, {}))) == "has tools"


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("no_such_environment", {}, "taskset 'no_such_environment' not found"),
        ("number_sums", {"taskset": {"largst": 2}}, r"taskset\.largst Extra inputs are not permitted"),
        ("number_sums", {"taskset": 3}, r"'task\.settings\.taskset' is 3; it must be a mapping"),
        ("number_sums", {"sampling": {}}, "sampling Extra inputs are not permitted"),
    ],
)
def test_a_wrong_name_or_setting_is_one_clear_line(name, settings, problem):
    with pytest.raises(UserError, match=problem) as caught:
        read_tasks(Environment(name, settings))
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_a_task_by_name_has_disjoint_splits_and_its_rewards_are_those_of_the_environment():
    settings = {"taskset": {"largest": 6}}
    task, again = (make_task(TaskConfig("verifiers:number_sums", settings=settings, held_out_share=0.2), seed=1) for _ in range(2))
    assert task.fingerprint == again.fingerprint and task.size == 29 and not task.has_messages
    sides = [{task.train_prompt(i).text for i in range(29)}, *({item.text for item in task.eval_prompts(split, 99, 1)} for split in ("held_out", "final"))]
    assert set.union(*sides) == {f"{a}+{b}=" for a in range(7) for b in range(7)} and sum(map(len, sides)) == 49
    item = task.train_prompt(0)
    assert str(eval(item.text.removesuffix("="))) == item.ground_truth
    source = SimpleNamespace(task=task)
    check_episodes(source, has_agent=False)
    prompts = [Prompt("p", item.text, (1,), item.ground_truth, task.name, item.columns)]
    at = (WeightVersion(0, 0),)
    said = [item.ground_truth, "nothing at all", "0123456"]
    samples = [Sample(f"0/p/{i}", "p", i, (1,), (2,), (-1.0,), (-1.0,), at, FinishReason.STOP, text) for i, text in enumerate(said)]
    own = RewardsConfig((RewardFunctionConfig("verifiers", name="correct"),), sample_deadline_s=100.0, start_deadline_s=600.0)
    check_answers(source, own)
    with RewardPool(own) as pool:
        scores = pool.score(samples, prompts)
    assert [score.value for score in scores] == [1.5, 0.0, 0.5] and all(score.state is ScoreState.NUMBER for score in scores)
    assert scores[0].components == {"correct": 1.5, "correct/exact": 1.0, "correct/short": 1.0, "correct/asked": 1.0}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("task.name=verifiers:x rewards.functions=[]", r"'verifiers:x' is scored by its environment, not by 'task'; .* \[\{function: verifiers\}\]"),
        ("task.name=verifiers:x rewards.functions=[] rollout.agent.function=a:b", r"set rewards\.functions to \[\{function: agent\}\]"),
        ("rewards.functions=[{function:verifiers}]", r"reward function 'verifiers' is that of a task verifiers:NAME, and 'task\.name' is 'sort'"),
        ("task.name=verifiers:x rewards.functions=[{function:verifiers}] rollout.agent.function=a:b", r"name 'agent', which reads what they are worth"),
        ("task.name=verifiers:", r"name the environment behind it"),
    ],
)
def test_an_environment_is_scored_by_its_own_functions(overrides, problem):
    given = [override.replace("function:", "function: ") for override in overrides.split()]
    with pytest.raises(UserError, match=problem):
        load_config(Path(__file__).parents[1] / "pod" / "tiny.yaml", ["task.min_digits=null", "task.max_digits=null", *given])


@pytest.mark.full
def test_an_environment_that_plays_in_turns_needs_an_agent():
    task = make_task(TaskConfig("verifiers:guessing_game", settings={"select": {"limit": 20}}), seed=1)
    item = task.train_prompt(0)
    assert task.has_messages and [message["role"] for message in item.messages] == ["system", "user"]
    assert item.messages[1]["content"] == f"guess {item.columns['data']['idx']}"
    check_episodes(SimpleNamespace(task=task), has_agent=True)
    with pytest.raises(UserError, match=r"plays its tasks in turns of its own, .* set rollout\.agent\.function to tandem\.rl\.agents\.verifiers_agent:episode"):
        check_episodes(SimpleNamespace(task=task), has_agent=False)
