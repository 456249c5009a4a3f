"""Runs on environments of the real ``verifiers`` package: prompts that it scores, and episodes that it plays."""

import os
from pathlib import Path

import pytest
from pod_runs import HERE, PodRun, finish

from tandem.runtime.records.journal import Journal

pytest.importorskip("verifiers")
ENVIRONMENTS = {"PYTHONPATH": os.pathsep.join([str(HERE.parent / "data" / "environments"), os.environ.get("PYTHONPATH", "")])}
SLOW = (
    "--rewards.start_deadline_s=600", "--rewards.sample_deadline_s=100", "--model.create.characters=ascii", "--sft.steps=4", "--sft.corrupted_share=0",
    "--run.max_steps=2",
)  # fmt: skip


def recorded(run: PodRun, step: int):
    """Returns each sample of ``step`` with its score."""
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        samples, scores = journal.samples(step) or [], journal.scores(step) or []
    assert [sample.id for sample in samples] == [score.sample_id for score in scores]
    return list(zip(samples, scores, strict=True))


@pytest.mark.full
def test_completions_are_scored_by_the_environment_and_the_step_is_replayed(tmp_path: Path) -> None:
    run = PodRun(tmp_path, recipe=HERE / "tiny.yaml", environment=ENVIRONMENTS)
    task = ("--task.name=verifiers:number_sums", "--task.min_digits=null", "--task.max_digits=null", "--task.settings={taskset: {largest: 8}}")
    done = run.train(*task, *SLOW, "--rewards.functions=[{function: verifiers}]")
    assert done.returncode == 0, done.stderr + done.stdout
    for row in run.rows():
        assert row["mismatch_kl"] == 0.0 and row["reward/fault_share"] == 0.0 and row["reward/verifiers/asked"] == 1.0
    for sample, score in recorded(run, 1):
        assert score.components["verifiers/short"] == float(len(sample.text.strip()) < 8)
        assert score.value == score.components["verifiers/exact"] + 0.5 * score.components["verifiers/short"]
    replayed = finish(run.begin("replay", str(run.directory), "--step", "1"))
    assert replayed.returncode == 0 and "rewards: 16 of 16 equal" in replayed.stdout, replayed.stdout + replayed.stderr


@pytest.mark.full
def test_the_episodes_of_an_environment_are_trained_with_its_rewards(tmp_path: Path) -> None:
    run = PodRun(tmp_path, recipe=HERE / "agent.yaml", environment=ENVIRONMENTS)
    agent = ("--rollout.agent.function=tandem.rl.agents.verifiers_agent:episode", "--rollout.agent.start_deadline_s=600", "--rollout.agent.workers=2")
    task = ("--task.name=verifiers:guessing_game", "--task.max_digits=null", "--task.tools=[]", "--task.settings={select: {limit: 40}}")
    done = run.train(*task, *agent, *SLOW, "--rewards.functions=[{function: agent}]")
    assert done.returncode == 0, done.stderr + done.stdout
    for row in run.rows():
        assert row["mismatch_kl"] == 0.0 and row["reward/fault_share"] == 0.0
    for sample, score in recorded(run, 1):
        said = sum(message["role"] == "assistant" for message in sample.messages)
        assert score.value == sample.outcome["reward"] and score.components["agent/turns"] == said
