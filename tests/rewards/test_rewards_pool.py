"""Real reward workers that are really killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.config.rewards import AnswerMatcherConfig, RewardFunctionConfig, RewardsConfig
from tandem.config.task import TaskConfig
from tandem.data.tasks import make_task
from tandem.rl.rewards.pool import RewardPool
from tandem.runtime.import_path import load_function
from tandem.types import FinishReason, Prompt, RunError, Sample, Score, ScoreState, UserError, WeightVersion

FUNCTIONS = """
import os, signal, subprocess, sys, time

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def noisy(completions, **columns):
    print("to standard output")
    os.write(1, b"\\0\\0\\0\\5bytes to descriptor 1")
    subprocess.run(["echo", "from a child"])
    assert sys.stdin.read() == ""
    return [1.0 for _ in completions]

def trl(completions, **columns):
    return [act(text) for text in completions]

def wrong_length(completions, **columns):
    return [1.0] * (len(completions) - 1)

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return act(solution_str)

def act(text):
    if text == "raise":
        raise ValueError("the judge is broken")
    if text == "exit":
        sys.exit(5)
    if text == "hang":
        time.sleep(1000)
    if text == "child" and not os.path.exists(os.path.dirname(__file__) + "/go on"):
        child = subprocess.Popen(["sleep", "1000"])
        with open(__file__ + ".pid", "w") as file:
            file.write(str(child.pid))
        os.rename(__file__ + ".pid", os.path.dirname(__file__) + "/child.pid")
        time.sleep(1000)
    if text == "spin":
        while True:
            pass
    if text == "die":
        os._exit(7)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "once":
        mark = os.path.dirname(__file__) + "/once"
        if not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(7)
    if text == "nan":
        return float("nan")
    if text == "none":
        return None
    return 1.0

def numbered(completions, **columns):
    return [float(os.getpid()) for _ in completions]
"""

FAULT = ScoreState.INFRASTRUCTURE_FAULT


def sample(i: int, text: str) -> Sample:
    return Sample(f"0/p{i}/0", f"p{i}", 0, (1,), (2,), (0.0,), (0.0,), (WeightVersion(0, 0),), FinishReason.STOP, text)


def prompt(i: int, truth: Any = "1") -> Prompt:
    return Prompt(f"p{i}", "?", (1,), truth, "dataset")


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    @contextmanager
    def started(*names: str, **settings: Any) -> Iterator[RewardPool]:
        functions = tuple(RewardFunctionConfig(f"{tmp_path}/functions.py:{name}") for name in names)
        settings = {"deadline_s": 4.0, "sample_deadline_s": 0.5, **settings}
        pids: list[int] = []
        with RewardPool(RewardsConfig(functions=functions, **settings), log_dir=tmp_path / "logs") as pool:
            yield pool
            pids = worker_pids(pool)
        assert not any(psutil.pid_exists(pid) for pid in pids), "closing the pool left a worker behind"

    return started


def worker_pids(pool: RewardPool) -> list[int]:
    return [slot.worker.process.pid for slot in pool._slots]


def judge(pool: RewardPool, *texts: str) -> list[Score]:
    scores = pool.score([sample(i, t) for i, t in enumerate(texts)], [prompt(i) for i in range(len(texts))])
    assert [score.sample_id for score in scores] == [f"0/p{i}/0" for i in range(len(texts))]
    assert all((score.value is None) == (score.state is FAULT) for score in scores)
    assert all("\n" not in score.reason for score in scores)
    return scores


def gone(pid: int, within_s: float = 5.0) -> bool:
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_scores_come_in_the_order_of_the_samples_from_any_number_of_workers(start: Callable[..., Any]) -> None:
    texts = ["x" * (i % 7) for i in range(64)]
    for workers in (1, 3):
        with start("length", workers=workers, accuracy_threshold=3.0) as pool:
            assert [score.value for score in judge(pool, *texts)] == [float(len(text)) for text in texts]
            assert pool.score([], []) == []


def test_judging_goes_on_beside_other_work(start: Callable[..., Any]) -> None:
    with start("length", workers=2) as pool:
        futures = [pool.submit([sample(0, "x" * n)], [prompt(0)]) for n in range(8)]
        assert [future.result(10)[0].value for future in futures] == [float(n) for n in range(8)]


@pytest.mark.parametrize("name", ["trl", "verl"])
@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("raise", "it raised ValueError: the judge is broken"),
        ("exit", "it raised SystemExit: 5"),
        ("hang", "no answer within 0.5 s"),
        ("die", "it ended its process twice (exit status 7)"),
        ("kill", "it ended its process twice (killed by SIGKILL)"),
        ("nan", "it returned nan"),
    ],
)
def test_a_bad_sample_is_masked_and_named_and_its_neighbours_keep_their_rewards(
    start: Callable[..., Any], name: str, bad: str, problem: str
) -> None:
    # A worker that is started four times beside other work must not use up the deadline of the call.
    with start(name, deadline_s=60.0) as pool:
        scores = judge(pool, "good", bad, "fine")
        assert [score.value for score in scores] == [1.0, None, 1.0]
        assert problem in scores[1].reason
        assert f"reward function '{name}' on sample '0/p1/0'" in scores[1].reason
        assert [score.value for score in judge(pool, "next", "batch")] == [1.0, 1.0]


def test_a_function_that_is_changed_while_the_run_uses_it_is_not_loaded_again(start: Callable[..., Any], tmp_path: Path) -> None:
    with start("trl", deadline_s=20.0, sample_deadline_s=5.0) as pool:
        assert judge(pool, "a")[0].value == 1.0
        (tmp_path / "functions.py").write_text(FUNCTIONS.replace("return 1.0", "return 2.0"))
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        assert gone(worker_pids(pool)[0])
        assert "functions.py' was changed while the run used it: restore it, or resume the run with it" in judge(pool, "a")[0].reason


def test_none_is_a_fault_in_verls_signature_and_in_trls_that_the_function_does_not_apply(start: Callable[..., Any]) -> None:
    with start("verl") as pool:
        assert "it returned None instead of a number" in judge(pool, "none")[0].reason
    with start("trl", "length") as pool:
        first, second = pool.score([sample(0, "none"), sample(1, "b")], [prompt(0), prompt(1)])
        assert (first.value, first.components, first.correct) == (4.0, {"length": 4.0}, None)
        assert (second.value, second.components, second.correct) == (2.0, {"trl": 1.0, "length": 1.0}, True)
    with start("trl") as pool:
        (only,) = pool.score([sample(0, "none")], [prompt(0)])
        assert (only.state, only.value, only.correct) == (ScoreState.NOT_APPLICABLE, None, None)


def test_a_function_that_spins_without_end_is_ended(start: Callable[..., Any]) -> None:
    with start("verl") as pool:
        assert [score.value for score in judge(pool, "spin", "fine")] == [None, 1.0]


def test_the_wrong_length_is_a_fault_of_the_samples_that_still_have_it_alone(start: Callable[..., Any]) -> None:
    with start("wrong_length") as pool:
        scores = judge(pool, "a", "b")
        assert [score.value for score in scores] == [None, None]
        assert "it returned 0 values for 1 samples" in scores[0].reason


def test_what_the_batchs_deadline_leaves_unjudged_is_masked_with_the_one_who_took_the_time(start: Callable[..., Any]) -> None:
    with start("verl", deadline_s=1.5, sample_deadline_s=1.0) as pool:
        scores = judge(pool, "hang", "hang", "fine")
        assert [score.value for score in scores] == [None, None, None]
        assert "not judged within rewards.deadline_s (1.5 s); 'verl' hung before, on sample '0/p1/0'" in scores[2].reason
        assert [score.value for score in judge(pool, "fine")] == [1.0]


def test_a_worker_that_dies_once_costs_no_reward(start: Callable[..., Any]) -> None:
    for name in ("trl", "verl"):
        with start(name) as pool:
            before = worker_pids(pool)
            assert [score.value for score in judge(pool, "a", "once", "b")] == [1.0, 1.0, 1.0]
            assert worker_pids(pool) != before
        (Path(pool.config.functions[0].function).parent / "once").unlink()


def test_a_worker_killed_while_idle_is_replaced_before_the_next_batch(start: Callable[..., Any]) -> None:
    with start("numbered", workers=2, accuracy_threshold=0.0) as pool:
        first = judge(pool, *"abcd")
        for pid in worker_pids(pool):
            os.kill(pid, signal.SIGKILL)
            assert gone(pid)
        second = judge(pool, *"abcd")
        assert not {score.value for score in first} & {score.value for score in second}
        assert all(score.state is ScoreState.NUMBER for score in second)


def test_a_worker_killed_in_the_middle_of_a_batch_is_replaced_and_the_batch_judged(start: Callable[..., Any], tmp_path: Path) -> None:
    with start("trl", deadline_s=20.0, sample_deadline_s=5.0) as pool:
        future = pool.submit([sample(0, "child")], [prompt(0)])
        ends = time.monotonic() + 5
        while not (tmp_path / "child.pid").exists() and time.monotonic() < ends:
            time.sleep(0.01)
        (tmp_path / "go on").touch()
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        assert future.result(10)[0].value == 1.0
        assert gone(int((tmp_path / "child.pid").read_text()))


def test_what_a_hung_function_started_ends_with_it(start: Callable[..., Any], tmp_path: Path) -> None:
    with start("verl") as pool:
        assert judge(pool, "child")[0].state is FAULT
        assert gone(int((tmp_path / "child.pid").read_text()))


def test_whatever_functions_print_or_read_leaves_the_protocol_alone(start: Callable[..., Any], tmp_path: Path) -> None:
    with start("noisy") as pool:
        assert [score.value for score in judge(pool, "a", "b")] == [1.0, 1.0]
    log = (tmp_path / "logs" / "reward-worker-0.log").read_text()
    assert "to standard output" in log
    assert "from a child" in log


def test_no_function_is_asked_about_a_sample_that_is_masked_already(start: Callable[..., Any]) -> None:
    with start("verl", "length") as pool:
        scores = judge(pool, "raise", "fine")
        assert scores[0].components == {}
        assert scores[1].components == {"verl": 1.0, "length": 4.0}
        assert scores[1].value == 5.0


def test_closing_a_pool_that_is_judging_ends_it_at_once_and_says_so(start: Callable[..., Any]) -> None:
    with start("verl", deadline_s=100.0, sample_deadline_s=100.0) as pool:
        waiting = [pool.submit([sample(0, "hang")], [prompt(0)]) for _ in range(2)]
        pids = worker_pids(pool)
        pool.close()
        for future in waiting:
            with pytest.raises(RunError, match="closed"):
                future.result(5)
        assert all(gone(pid) for pid in pids)
        with pytest.raises(RunError, match="closed"):
            pool.score([sample(0, "a")], [prompt(0)])


def test_a_worker_dies_with_a_pool_that_is_killed_even_while_it_judges(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    script = f"""
    import sys, time
    from tandem.config.rewards import RewardFunctionConfig, RewardsConfig
    from tandem.rl.rewards.pool import RewardPool
    from tandem.types import *
    functions = (RewardFunctionConfig({str(tmp_path / "functions.py:verl")!r}),)
    idle = RewardPool(RewardsConfig(functions=functions))
    busy = RewardPool(RewardsConfig(functions=functions, sample_deadline_s=100))
    at = WeightVersion(0, 0)
    busy.submit([Sample("s", "p", 0, (1,), (2,), (0.0,), (0.0,), (at,), FinishReason.STOP, "spin")], [Prompt("p", "?", (1,))])
    print(*(slot.worker.process.pid for pool in (idle, busy) for slot in pool._slots), flush=True)
    time.sleep(1000)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_an_idle_worker_uses_no_cpu_and_loads_no_torch(start: Callable[..., Any]) -> None:
    with start("length") as pool:
        judge(pool, "a")
        worker = psutil.Process(worker_pids(pool)[0])
        before = worker.cpu_times()
        time.sleep(0.3)
        assert worker.cpu_times()[:2] == before[:2]
        assert not any("torch" in mapped.path for mapped in worker.memory_maps())


def test_a_function_that_cannot_be_loaded_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text("import os\ndef f(completions):\n    return []\n")
    for name, problem in (("g", "has no 'g'; it has f"), ("f", None)):
        config = RewardsConfig(functions=(RewardFunctionConfig(f"{tmp_path}/functions.py:{name}"),))
        if problem is None:
            RewardPool(config).close()
            continue
        with pytest.raises(UserError, match=problem):
            RewardPool(config)


def test_a_module_with_a_name_of_pythons_beside_a_loaded_function_keeps_no_worker_from_starting(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('this is not the json of Python')\n")
    (tmp_path / "functions.py").write_text("def f(completions):\n    return [1.0] * len(completions)\n")
    load_function(f"{tmp_path}/functions.py:f", "reward function")
    RewardPool(RewardsConfig(functions=(RewardFunctionConfig(f"{tmp_path}/functions.py:f"),))).close()


@pytest.mark.parametrize(
    ("text", "deadline_s", "problem"),
    [
        ("import time; time.sleep(100)", 0.5, "not loaded within 0.5 s"),
        ("import os; os._exit(3)", 60.0, "ended 4 times while it loaded '.*functions.py:f' \\(exit status 3\\); see '.*reward-worker-0.log'$"),
    ],
)
def test_a_function_whose_import_hangs_or_dies_is_refused_before_the_run(tmp_path: Path, text: str, deadline_s: float, problem: str) -> None:
    (tmp_path / "functions.py").write_text(text)
    config = RewardsConfig(functions=(RewardFunctionConfig(f"{tmp_path}/functions.py:f"),), start_deadline_s=deadline_s)
    with pytest.raises(UserError, match=problem):
        RewardPool(config, log_dir=tmp_path / "logs")


def test_a_worker_that_is_killed_while_it_loads_is_started_again(tmp_path: Path) -> None:
    """Two deaths at the start, and two of its successor in the middle of a batch."""
    text = "import os, signal\nfor mark in ('first', 'second'):\n    path = os.path.dirname(__file__) + '/' + mark\n    if not os.path.exists(path):\n"
    text += "        open(path, 'w').close()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "functions.py").write_text(text + "def f(completions, **columns):\n    return [1.0 for _ in completions]\n")
    with RewardPool(RewardsConfig(functions=(RewardFunctionConfig(f"{tmp_path}/functions.py:f"),)), log_dir=tmp_path / "logs") as pool:
        assert [score.value for score in judge(pool, "a")] == [1.0]
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        assert gone(worker_pids(pool)[0])
        for mark in ("first", "second"):
            (tmp_path / mark).unlink()
        assert [score.value for score in judge(pool, "a", "b")] == [1.0, 1.0]


def test_functions_that_can_no_longer_be_loaded_mask_what_is_left(start: Callable[..., Any], tmp_path: Path) -> None:
    with start("verl") as pool:
        (tmp_path / "functions.py").unlink()
        scores = judge(pool, "die", "fine")
        assert [score.value for score in scores] == [None, None]
        assert "does not exist" in scores[1].reason


def test_the_tasks_own_judge_is_the_default() -> None:
    with RewardPool(RewardsConfig(model_fault_value=-0.5)) as pool:
        scores = judge(pool, " 1", "2", "")
    assert [score.value for score in scores] == [1.0, 0.0, -0.5]
    assert [score.correct for score in scores] == [True, False, False]
    assert [score.state for score in scores] == [ScoreState.NUMBER, ScoreState.NUMBER, ScoreState.MODEL_FAULT]


def test_a_regular_expression_that_explodes_costs_its_sample_alone() -> None:
    from tandem.config.rewards import FormatCheckerConfig

    config = RewardsConfig(
        functions=(RewardFunctionConfig("format_checker", format=FormatCheckerConfig(pattern="(a+)+b")),),
        deadline_s=12.0, sample_deadline_s=1.0,
    )  # fmt: skip
    with RewardPool(config) as pool:
        assert [score.value for score in judge(pool, "aab", "a" * 60, "b")] == [1.0, None, 0.0]


def test_a_reasoning_gym_task_is_judged_by_its_own_score_answer() -> None:
    task = make_task(TaskConfig("reasoning_gym:ransom_note"), 3)
    drawn = [task.train_prompt(i) for i in range(3)]
    task.close()
    prompts = [Prompt(f"p{i}", d.text, (1,), d.ground_truth, task.name, d.columns) for i, d in enumerate(drawn)]
    texts = [f"So: {drawn[0].ground_truth}", "So: perhaps", ""]
    function = RewardFunctionConfig("task", answer=AnswerMatcherConfig(after="So:"))
    with RewardPool(RewardsConfig(functions=(function,), sample_deadline_s=60)) as pool:
        scores = pool.score([sample(i, text) for i, text in enumerate(texts)], prompts)
    assert [score.correct for score in scores] == [True, False, False]
    assert scores[2].state is ScoreState.MODEL_FAULT
