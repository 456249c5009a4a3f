"""Runs of episodes with tools: rollout and trainer agree on every sampled token, and killing any of it changes no sample."""

import os
import signal
import time
from pathlib import Path

import pytest
from pod_runs import HERE, PodRun, difference, finish

from tandem.runtime.records.journal import Journal
from tandem.types import FinishReason, RunError, ScoreState

RECIPE = HERE / "calculator.yaml"
TOOL = '''
import time
from pathlib import Path

from tandem.data.tools.calculator import calculator as exact


def calculator(expression: str) -> str:
    """Computes slowly.

    Args:
        expression: What.
    """
    time.sleep(0.1)
    broken = Path("broken")
    if broken.exists():
        broken.write_text(broken.read_text() + "x")
        if len(broken.read_text()) % 3 == 0:
            raise ConnectionError("the machine of the tool is down")
    return exact(expression)
'''


def run_in(folder: Path, *, tool: str = "calculator") -> PodRun:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slow.py").write_text(TOOL)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.read_text().replace("[calculator]", f"[calculator]\n  # {tool}" if tool == "calculator" else f"['{tool}']"))
    return PodRun(folder, recipe=recipe)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = run_in(tmp_path_factory.mktemp("episodes"))
    done = run.train()
    assert done.returncode == 0, done.stderr + done.stdout
    return run


@pytest.mark.full
def test_rollout_and_trainer_agree_on_episodes_and_observations_are_masked(undisturbed: PodRun) -> None:
    rows = undisturbed.rows()
    assert len(rows) == 3
    for row in rows:
        assert row["mismatch_kl"] == row["mismatch_max_abs"] == 0.0
        assert 0 < row["tools/call_frequency"] <= 2 and row["tools/failure_frequency"] < 1 and 1 < row["num_turns/max"] <= 3
    with Journal(undisturbed.directory / "journal.sqlite", read_only=True) as journal:
        samples = [sample for step in range(3) for sample in journal.samples(step) or ()]
    called = [sample for sample in samples if sample.response_mask]
    assert called and all(sample.messages for sample in samples)
    for sample in called:
        assert len(sample.response_mask) == len(sample.token_ids) and sample.sampled_tokens < len(sample.token_ids)
        assert [message["role"] for message in sample.messages[:2]] == ["assistant", "tool"]
    lengths = [sample.sampled_tokens for sample in samples[:16]]
    assert rows[0]["response_length/mean"] == pytest.approx(sum(lengths) / 16)


@pytest.mark.full
@pytest.mark.parametrize("options", [("--rollout.engine.max_num_seqs=4",), ("--rollout.workers=2", "--rollout.multi_turn.tool_workers=2"), ("--inline",)])
def test_episodes_do_not_depend_on_what_runs_beside_them(undisturbed: PodRun, tmp_path: Path, options: tuple[str, ...]) -> None:
    run = run_in(tmp_path)
    done = run.train(*options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert difference(run, undisturbed) == []
    assert run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize("mesh", [("data=2", "context=2"), ("tensor=2", "pipeline=2")])
def test_rollout_and_trainer_agree_on_episodes_on_meshes(undisturbed: PodRun, tmp_path: Path, mesh: tuple[str, ...]) -> None:
    run = run_in(tmp_path)
    done = run.train(*(f"--parallel.{axis}" for axis in mesh))
    assert done.returncode == 0, done.stderr + done.stdout
    assert [row["mismatch_max_abs"] for row in run.rows()] == [0.0] * 3
    assert run.rows()[0]["tools/call_frequency"] == undisturbed.rows()[0]["tools/call_frequency"]


@pytest.mark.full
@pytest.mark.parametrize("what", ["everything", "the tool worker", "the rollout worker"])
def test_a_kill_in_the_middle_of_a_rollout_changes_no_sample(undisturbed: PodRun, tmp_path: Path, what: str) -> None:
    run = run_in(tmp_path, tool="slow.py:calculator")
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}")
    ends = time.monotonic() + 120
    while not in_rollout(run, step=1):
        assert time.monotonic() < ends and process.poll() is None, "no rollout of step 1"
        time.sleep(0.01)
    time.sleep(0.2)
    if what == "everything":
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert run.left_behind() == []
        done = run.resume()
    else:
        module = {"the tool worker": "tool_worker", "the rollout worker": "pod.rollout_worker"}[what]
        victims = [pid for pid, command in run.processes().items() if module in command]
        assert victims
        os.kill(victims[0], signal.SIGKILL)
        done = finish(process)
    assert done.returncode == 0, done.stderr + done.stdout
    assert difference(run, undisturbed) == []
    assert run.left_behind() == []


def in_rollout(run: PodRun, step: int) -> bool:
    if not (run.directory / "journal.sqlite").exists():
        return False
    try:
        transitions = run.transitions()
    except RunError:  # The journal's tables are not written yet.
        return False
    return any(each.state == "rollout" and each.step == step and each.ended_s is None for each in transitions)


@pytest.mark.full
def test_episodes_are_replayed_and_verified(undisturbed: PodRun) -> None:
    replayed = finish(undisturbed.begin("replay", str(undisturbed.directory), "--step", "1"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "rollout: 16 of 16 equal" in replayed.stdout and "rewards: 16 of 16 equal" in replayed.stdout
    verified = finish(undisturbed.begin("verify", str(undisturbed.directory)))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    report = (undisturbed.directory / "report.html").read_text()
    assert "[calculator(expression=" in report and "\\u003ctool>" in report


@pytest.mark.full
def test_samples_whose_tool_is_down_are_masked_and_the_run_says_so(tmp_path: Path) -> None:
    run = run_in(tmp_path, tool="slow.py:calculator")
    (tmp_path / "broken").touch()
    done = run.train("--rewards.max_fault_share=1", "--run.max_steps=1")
    assert done.returncode == 0, done.stderr + done.stdout
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        samples, scores = journal.samples(0), journal.scores(0)
    assert samples is not None and scores is not None
    broken = [sample for sample in samples if sample.fault]
    assert broken and all(sample.finish_reason is FinishReason.ABORT for sample in broken)
    states = {score.sample_id: score for score in scores}
    assert all(states[sample.id].state is ScoreState.INFRASTRUCTURE_FAULT for sample in broken)
    assert all((states[sample.id].state is ScoreState.INFRASTRUCTURE_FAULT) == bool(sample.fault) for sample in samples)
    assert run.rows()[0]["reward/fault_share"] == len(broken) / len(samples)
    assert "ConnectionError: the machine of the tool is down" in done.stdout + done.stderr
