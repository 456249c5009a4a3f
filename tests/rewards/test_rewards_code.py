"""The code executor: programs against tests in the forms that data sets have. Hostile programs are in ``test_rewards_hostile_programs.py``."""

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from code_runs import SETTINGS, as_nobody, judged, needs_bubblewrap, needs_compiler, output_of

from tandem.config.code_executor import CodeExecutorConfig
from tandem.config.load import build
from tandem.config.recipe import Recipe, load_config
from tandem.config.rewards import RewardFunctionConfig, RewardsConfig
from tandem.data.tasks import make_task
from tandem.rl.rewards.code.executor import extract_program
from tandem.rl.rewards.code.program_tests import ProgramTests, is_output, is_value, read_tests
from tandem.rl.rewards.code.runner import Other, pack, to_json, unpack
from tandem.rl.rewards.code.sandbox import find_sandbox
from tandem.rl.rewards.pool import RewardPool
from tandem.types import FinishReason, Prompt, Sample, ScoreState, UserError, WeightVersion

ADD = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}
HUMAN_EVAL = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate([1, 2, 3]) == [2, 4, 6]
    assert candidate([]) == []
    assert abs(sum(candidate([0.5])) - 1) < 1e-9
"""
DOUBLE = "def helper(x):\n    return 2 * x\n\ndef double(xs):\n    print('ignored')\n    return [helper(x) for x in xs]"


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "truth", "columns", "passed"),
    [
        (ADD, SUMS, {}, 1.0),
        (ADD, json.dumps(SUMS), {}, 1.0),
        (ADD, [{"input": "1 2", "output": "3"}, {"input": "1 2", "output": "4"}], {}, 0.5),
        (ADD, {"input": ["1 2"], "output": ["3 \n\n"]}, {}, 1.0),
        ("print(3)\nraise SystemExit(1)", SUMS, {}, 0.0),
        ("import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()", SUMS, {}, 1.0),
        ("if __name__ == '__main__':\n    import sys\n    print(sum(map(int, sys.stdin.read().split())))", SUMS, {}, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}, {}, 1.0),
        ("def add(a, b):\n    return (a, [b])", [{"input": "1\n[2]", "output": "[1, [[2]]]"}], {"fn_name": "add"}, 1.0),
        ("def add(a, b):\n    return a + b if a else 1 / 0", {"fn_name": "add", "inputs": [[1, 2], [0, 4]], "outputs": [3, 4]}, {}, 0.5),
        (DOUBLE, ["assert double([1]) == [2]", "assert helper(3) == 6", "assert double((4,)) == [9]"], {}, 2 / 3),
        (DOUBLE, HUMAN_EVAL, {"entry_point": "double"}, 1.0),
        ("def f(x):\n    raise ValueError('no')", ["try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert 'no' in str(error)"], {}, 1.0),
        ("def f(x):\n    return {x: (x, {x}), 'big': 10**30, 'b': b'a'}", ["assert f(1) == {1: (1, {1}), 'big': 10**30, 'b': b'a'}"], {}, 1.0),
    ],
)  # fmt: skip
def test_a_program_is_run_against_tests(program: str, truth: Any, columns: dict[str, Any], passed: float) -> None:
    judgement = judged(program, truth, replace(SETTINGS, score="share"), **columns)
    assert judgement.state is ScoreState.NUMBER
    assert (judgement.value, judgement.details, judgement.correct) == (passed, {"passed": passed}, passed == 1)
    assert judged(program, truth, **columns).value == float(passed == 1)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "truth", "reason"),
    [
        ("  ", SUMS, "no program found"),
        ("def f(:", SUMS, "cannot be loaded: SyntaxError"),
        ("raise KeyError('x')\ndef f(x): ...", ["assert f(1)"], "cannot be loaded: KeyError"),
    ],
)
def test_a_completion_without_a_program_that_loads_is_a_model_fault(program: str, truth: Any, reason: str) -> None:
    judgement = judged(program, truth)
    assert (judgement.state, judgement.value, judgement.correct) == (ScoreState.MODEL_FAULT, -1.0, False) and reason in judgement.reason


@needs_bubblewrap
@pytest.mark.parametrize("truth", [None, 3, [], {}, {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, [{"input": 3, "output": "3"}], [""]])
def test_a_ground_truth_without_tests_is_an_infrastructure_fault(truth: Any) -> None:
    assert judged(ADD, truth).state is ScoreState.INFRASTRUCTURE_FAULT


@needs_bubblewrap
def test_a_sandbox_that_does_not_start_is_an_infrastructure_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.rl.rewards.code import executor

    broken = replace(find_sandbox(SETTINGS), command=("/bin/sh", "-c", "echo no namespaces left >&2; exit 1"))
    judgement = executor.judge_program(_item(ADD, SUMS), SETTINGS, broken, 0.0)
    assert judgement.state is ScoreState.INFRASTRUCTURE_FAULT and "it did not start (exit status 1): no namespaces left" in judgement.reason


def _item(program: str, truth: Any) -> Any:
    from tandem.rl.rewards.judgement import Item

    return Item("0/p0/0", "?", program, (), truth, "dataset", {})


def test_the_program_is_the_last_block_of_the_completion() -> None:
    blocks = "First:\n```python\na\n```\nBetter:\n  ```py\nb = '```'\n\nc\n  ```\nDone."
    assert extract_program(blocks, CodeExecutorConfig()) == "b = '```'\n\nc"
    assert extract_program("```\nopen", CodeExecutorConfig()) == "open"
    assert extract_program("no block", CodeExecutorConfig()) == ""
    assert extract_program(" no block ", CodeExecutorConfig(extract="whole")) == "no block"


VALUES = [None, True, -3, 2**80, 0.1, float("inf"), "ü\ud800\n\"", b"\0a", [1, [2.5]], (1, (2,)), {1, 2}, frozenset("ab"), {(1, 2): {"a": None}}, 1j]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_cross_the_border_as_they_are(value: Any) -> None:
    again = unpack(json.loads(to_json(pack(value))))
    assert again == value and type(again) is type(value)


def test_values_that_are_no_literals_are_equal_to_nothing() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    nested: list[Any] = []
    for _ in range(1000):
        nested = [nested]
    for value in (Sly(), object(), range(3), [Sly()]):
        again = unpack(json.loads(to_json(pack(value))))
        assert again != value and not is_value(again, again) and not is_value(again, 0)
    assert isinstance(unpack(pack(Sly())), Other) and "nested" in to_json(pack(nested))


def test_outputs_and_values_are_compared_as_the_data_sets_do() -> None:
    assert is_output("1 2 \n3\n\n", "1 2\n3") and not is_output("1  2", "1 2") and not is_output("", "0")
    assert is_value((1, (2,)), [1, [2]]) and is_value(3, [3]) and not is_value([3], 3) and is_value({1: 2}, {"1": 2})
    assert read_tests("assert f(1)", {}) == ProgramTests(assertions=("assert f(1)",))


@needs_bubblewrap
def test_a_program_has_its_limits() -> None:
    sandbox = find_sandbox(SETTINGS)
    names = ("CPU", "AS", "NPROC", "NOFILE", "FSIZE")
    printed, _ = output_of(f"import resource\nprint([resource.getrlimit(getattr(resource, 'RLIMIT_' + name))[1] for name in {names}])", sandbox)
    assert json.loads(printed) == [1, 256 * 2**20, 8, 64, 8 * 2**20]


@needs_bubblewrap
@needs_compiler
def test_another_language_is_run_by_its_command_line() -> None:
    source = '#include <stdio.h>\nint main(void) { int a, b; if (scanf("%d %d", &a, &b) != 2) return 1; printf("%d\\n", a + b); return 0; }'
    settings = replace(SETTINGS, file="program.c", compile="gcc -o program program.c", run="./program", cpu_s=10, memory_mib=1024, processes=16)
    assert judged(source, SUMS, settings).value == 1.0
    broken = judged("int main(", SUMS, settings)
    assert broken.state is ScoreState.MODEL_FAULT and "it does not compile" in broken.reason


@pytest.mark.full
def test_gvisor_has_the_same_limits_and_no_more_of_the_machine() -> None:
    settings = replace(SETTINGS, sandbox="gvisor", wall_s=20.0)
    try:
        sandbox = find_sandbox(settings)
    except UserError as error:
        pytest.skip(f"gVisor (runsc) does not work here, so it is NOT tested: {error}")
    assert judged(ADD, SUMS, settings).value == 1.0 and judged(DOUBLE, HUMAN_EVAL, settings, entry_point="double").value == 1.0
    assert output_of("while True:\n    pass", sandbox, settings)[1] == "killed by SIGKILL"
    program = """
        import os, socket, time
        print(os.path.exists("/etc/passwd"), os.path.exists("/home"), len([name for name in os.listdir("/proc") if name.isdigit()]) < 5)
        children, written = 0, 0
        try:
            for number in range(64):
                with open(f"/tmp/{number}", "wb", buffering=0) as file:
                    written += file.write(bytes(2**20))
        except OSError:
            print(written // 2**20)
        try:
            socket.create_connection(("10.0.0.1", 80), 1)
        except OSError:
            print("no network")
        try:
            bytearray(2**29)
        except MemoryError:
            print("no memory")
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(100)
                children += 1
        except OSError:
            print(children < 8)
    """
    assert output_of(textwrap.dedent(program), sandbox, settings)[0].split("\n") == ["False False True", "8", "no network", "no memory", "True", ""]


def test_without_a_sandbox_the_run_is_refused_unless_the_recipe_accepts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError) as refused:
        find_sandbox(CodeExecutorConfig())
    line = str(refused.value)
    assert "bubblewrap: bwrap is not installed; gvisor: runsc is not installed" in line and "'code.accept_unsafe_execution: true'" in line and "\n" not in line
    settings = replace(SETTINGS, sandbox="auto", accept_unsafe_execution=True)
    assert find_sandbox(settings).name == "none"
    assert judged(ADD, SUMS, settings).value == 1.0
    assert judged("import time\ntime.sleep(100)", SUMS, replace(settings, wall_s=0.5)).value == 0.0


@needs_bubblewrap
@pytest.mark.full
def test_an_ordinary_user_runs_programs() -> None:
    assert as_nobody(lambda: [judged(ADD, SUMS).value, judged(DOUBLE, HUMAN_EVAL, entry_point="double").value]) == [1.0, 1.0]


@needs_bubblewrap
def test_it_is_a_reward_function_of_a_recipe() -> None:
    section = {"functions": [{"function": "code_executor", "name": "tests", "code": {"score": "share", "wall_s": 8}}], "sample_deadline_s": 10}
    texts = [f"```python\n{ADD}\n```", "```\nprint(3)\n```", "I do not know."]
    samples = [
        Sample(f"0/p{i}/0", f"p{i}", 0, (1,), (2,), (0.0,), (0.0,), (WeightVersion(0, 0),), FinishReason.STOP, text) for i, text in enumerate(texts)
    ]
    with RewardPool(build(RewardsConfig, section)) as pool:
        scores = pool.score(samples, [Prompt(f"p{i}", "?", (1,), SUMS, "dataset") for i in range(3)])
    assert [(score.value, score.correct) for score in scores] == [(1.0, True), (0.5, False), (0.0, False)]
    assert [score.components.get("tests/passed") for score in scores] == [1.0, 0.5, None]
    assert scores[2].state is ScoreState.MODEL_FAULT


@needs_bubblewrap
def test_the_recipe_of_programs_rewards_right_demonstrations_and_no_wrong_one() -> None:
    recipe = load_config(Path(__file__).parents[2] / "recipes" / "programs.yaml")
    task = make_task(recipe.task, seed=0)
    shown = [task.demonstration(i, 0, 0.5) for i in range(40)]
    samples = [
        Sample(f"0/p{i}/0", f"p{i}", 0, (1,), (2,), (0.0,), (0.0,), (WeightVersion(0, 0),), FinishReason.STOP, one.completion) for i, one in enumerate(shown)
    ]
    with RewardPool(recipe.rewards) as pool:
        scores = pool.score(samples, [Prompt(f"p{i}", one.item.text, (1,), one.item.ground_truth, task.name) for i, one in enumerate(shown)])
    assert [score.correct for score in scores] == [one.correct for one in shown]
    assert 10 <= sum(one.correct for one in shown) <= 30


def test_a_reward_that_compares_texts_is_refused_for_programs() -> None:
    with pytest.raises(UserError, match="'correct' compares texts, and task 'programs' has tests in place of an answer; write function: code_executor"):
        build(Recipe, {"model": {"path": "m"}, "task": {"name": "programs"}})


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ({"memory_mib": 0}, "'code.memory_mib' of a reward function is 0; it must be from 1"),
        ({"open_files": 3}, "a program needs at least 16"),
        ({"compile": "gcc x.c"}, "'code.compile' of a reward function is given without 'code.run'"),
        ({"file": "a/b.c", "run": "x"}, "write a file name without a folder"),
        ({"read_only": ["data"]}, "write an absolute path"),
        ({"wall_s": 11}, "'code.wall_s' of reward function 'code_executor' is 11, more than rewards.sample_deadline_s"),
    ],
)
def test_settings_that_cannot_work_are_refused(code: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        build(RewardsConfig, {"functions": [{"function": "code_executor", "code": code}]})
    if problem.startswith("'code.memory"):
        with pytest.raises(UserError, match="has a section 'code', which belongs to code_executor"):
            RewardFunctionConfig("task", code=CodeExecutorConfig(cpu_s=3)).check()
