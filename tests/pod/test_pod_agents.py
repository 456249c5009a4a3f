"""Runs of a black-box agent: rollout and trainer agree on every sampled token of every branch, and killing any of it changes no sample."""

import os
import signal
import time
from pathlib import Path

import pytest
from pod_runs import HERE, PodRun, difference, finish

from tandem.runtime.records.journal import Journal
from tandem.types import RunError

RECIPE = HERE / "agent.yaml"
AGENT = '''
import json
import time

from openai import OpenAI

from tandem.examples.calculator_agent import TOOLS, run

client = OpenAI()


def answer(question):
    """Uses the calculator slowly, and then asks anew with the result in the question: its history is rewritten."""
    create = lambda messages: client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0].message
    messages = [{"role": "user", "content": question}]
    message = create(messages)
    time.sleep(0.05)
    if message.tool_calls:
        result = run(message.tool_calls[0].function)
        create([*messages, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result}])
        message = create([{"role": "user", "content": question + " " + result}])
    return message.content
'''


def run_in(folder: Path) -> PodRun:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(AGENT)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.read_text().replace("tandem.examples.calculator_agent:answer", "agent.py:answer"))
    return PodRun(folder, recipe=recipe)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = run_in(tmp_path_factory.mktemp("agents"))
    done = run.train()
    assert done.returncode == 0, done.stderr + done.stdout
    assert run.left_behind() == []
    return run


@pytest.mark.full
def test_rollout_and_trainer_agree_on_every_branch(undisturbed: PodRun) -> None:
    rows = undisturbed.rows()
    assert len(rows) == 3
    with Journal(undisturbed.directory / "journal.sqlite", read_only=True) as journal:
        samples = journal.samples(0) or []
    assert any(sample.branches for sample in samples) and any(not sample.branches for sample in samples) and not any(sample.fault for sample in samples)
    for row in rows:
        assert row["mismatch_kl"] == row["mismatch_max_abs"] == 0.0 and row["reward/fault_share"] == 0.0
    assert rows[0]["num_branches/mean"] == sum(1 + len(sample.branches) for sample in samples) / 16
    assert rows[0]["response_length/mean"] == pytest.approx(sum(each.sampled_tokens for sample in samples for each in sample.sequences) / 16)


@pytest.mark.full
@pytest.mark.parametrize("options", [("--rollout.engine.max_num_seqs=4", "--rollout.agent.workers=2"), ("--rollout.workers=2",), ("--inline",)])
def test_episodes_do_not_depend_on_what_runs_beside_them(undisturbed: PodRun, tmp_path: Path, options: tuple[str, ...]) -> None:
    run = run_in(tmp_path)
    done = run.train(*options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert difference(run, undisturbed) == []
    assert run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize("what", ["everything", "the agent worker", "the rollout worker"])
def test_a_kill_in_the_middle_of_a_rollout_changes_no_sample(undisturbed: PodRun, tmp_path: Path, what: str) -> None:
    run = run_in(tmp_path)
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}")
    ends = time.monotonic() + 120
    while not in_rollout(run, step=1):
        assert time.monotonic() < ends and process.poll() is None, "no rollout of step 1"
        time.sleep(0.01)
    time.sleep(0.1)
    if what == "everything":
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert run.left_behind() == []
        done = run.resume()
    else:
        module = {"the agent worker": "agent_worker", "the rollout worker": "pod.rollout_worker"}[what]
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
