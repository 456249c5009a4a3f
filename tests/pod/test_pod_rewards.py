"""Reward functions that fail: the sample is masked and reported, the run continues, and stops above a share of them."""

from collections import Counter
from pathlib import Path

import pytest
from pod_runs import PodRun, difference, finish, recipe_with
from reward_models import write_reward_model

from tandem.jobs.replay.replay_step import replay
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows
from tandem.types import Sample

BREAKS = {
    "raises": ("raise ValueError('no such answer')", "it raised ValueError: no such answer"),
    "hangs": ("time.sleep(600)", "no answer within 1 s, and its process was ended"),
    "returns_nan": ("return [float('nan') if text == BAD else float(len(text)) for text in completions]", "it returned nan"),
    "returns_the_wrong_length": ("return [1.0] * (len(completions) + 1)", "2 values"),
}
FUNCTION = """
import time

BAD = {bad!r}

def judge(completions, **_):
    if BAD in completions:
        {body}
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def bad(undisturbed: PodRun) -> Sample:
    """The sample of step 0 on which the functions fail. No reward has affected the weights yet, so every run with the recipe's seed draws
    it."""
    with Journal(undisturbed.directory / "journal.sqlite", read_only=True) as journal:
        samples = journal.samples(0)
    assert samples is not None and len(samples) == 16
    texts = Counter(sample.text for sample in samples)
    return max((sample for sample in samples if texts[sample.text] == 1), key=lambda sample: len(sample.text))


def run_with(folder: Path, body: str, bad: Sample, share: float) -> PodRun:
    (folder / "judge.py").write_text(FUNCTION.format(body=body, bad=bad.text))
    rewards = {"functions": [{"function": "judge.py:judge"}], "sample_deadline_s": 1.0, "deadline_s": 10.0, "max_fault_share": share}
    return PodRun(folder, recipe_with(folder, rewards=rewards))


@pytest.mark.full
@pytest.mark.parametrize("how", ["raises", "hangs", "returns_nan", "returns_the_wrong_length"])
def test_run_goes_on_past_a_reward_function_that(how: str, bad: Sample, tmp_path: Path) -> None:
    body, reason = BREAKS[how]
    run = run_with(tmp_path, body, bad, share=0.1)
    done = run.train("--run.max_steps=1")
    assert done.returncode == 0, done.stderr
    [event] = run.events("reward_fault")
    assert (event.detail["step"], event.detail["count"], event.detail["first"]) == (0, 1, bad.id)
    assert reason in event.detail["reason"] and "'judge'" in event.detail["reason"] and bad.id in event.detail["reason"]
    assert f"step 0: 1 of 16 samples masked; {bad.id}: " in done.stdout
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        samples, scores = journal.samples(0), journal.scores(0)
    assert samples is not None and scores is not None
    expected = {sample.id: None if sample.id == bad.id else float(len(sample.text)) for sample in samples}
    assert {score.sample_id: score.value for score in scores} == expected, "masked, and never a reward of 0"
    [row] = run.rows()
    assert row["reward/fault_share"] == 1 / 16 and row["mismatch_kl"] == 0.0
    assert run.left_behind() == []


@pytest.mark.full
def test_run_stops_with_one_line_past_the_share_of_faults_and_goes_on_when_the_function_is_mended(bad: Sample, tmp_path: Path) -> None:
    run = run_with(tmp_path, BREAKS["raises"][0], bad, share=0.05)
    done = run.train("--run.max_steps=1")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "1 of 16 samples could not be judged" in line and "rewards.max_fault_share (0.05)" in line and "no such answer" in line
    assert run.rows() == [] and run.left_behind() == []
    (tmp_path / "judge.py").write_text(FUNCTION.format(body="pass", bad=bad.text))
    resumed = run.resume()
    assert resumed.returncode == 0, resumed.stderr
    assert [row["reward/fault_share"] for row in run.rows()] == [0.0]
    assert "judge.py' was changed since the run began" in resumed.stdout and [event.kind for event in run.events("reward_function_changed")]


KILLED = """
import os, signal
from pathlib import Path
from rewards import digits as judge_digits

def digits(completions, **columns):
    struck = Path(__file__).with_name("struck")
    times = len(struck.read_text()) if struck.exists() else 0
    if times in (1, 3):  # the second call and, of its replacement, the next but one
        struck.write_text("x" * (times + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    struck.write_text("x" * (times + 1))
    return judge_digits(completions, **columns)
"""


@pytest.mark.full
def test_reward_worker_that_is_killed_is_replaced_and_the_run_is_the_same(undisturbed: PodRun, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    run = PodRun(tmp_path, recipe_with(tmp_path, rewards={"functions": [{"function": "killed.py:digits"}], "workers": 1}))
    done = run.train()
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "struck").read_text()) > 4, "it was killed twice and asked again"
    log = (run.directory / "logs" / "controller.log").read_text()
    assert log.count("a reward worker was lost: killed by SIGKILL") == 2
    assert difference(run, undisturbed) == []
    assert run.left_behind() == []


LIKELY = """
def likely(completions, completion_ids, reference_logprobs, **columns):
    assert [len(ids) for ids in completion_ids] == [len(logprobs) for logprobs in reference_logprobs]
    return [sum(logprobs) for logprobs in reference_logprobs]
"""


@pytest.mark.full
def test_reward_that_needs_the_reference_has_its_log_probabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 0 the reference is the actor, so its log-probabilities are those that the rollout recorded."""
    (tmp_path / "likely.py").write_text(LIKELY)
    functions = [{"function": "rewards.py:digits"}, {"function": "likely.py:likely", "needs": ["reference"], "weight": 0.01}]
    run = PodRun(tmp_path, recipe_with(tmp_path, rewards={"functions": functions}))
    done = run.train("--run.max_steps=1")
    assert done.returncode == 0, done.stderr
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        samples, scores = journal.samples(0), journal.scores(0)
    assert samples is not None and scores is not None
    assert [score.components["likely"] for score in scores] == [sum(sample.logprobs) for sample in samples]
    [row] = read_rows(run.directory / "metrics.jsonl")
    assert row["reward_s/likely/total"] > 0 and row["reward_s/digits/hidden"] + row["reward_s/digits/tail"] == pytest.approx(row["reward_s/digits/total"])
    monkeypatch.chdir(tmp_path)
    replayed = replay(run.directory, 0, ("rewards",), inline=True)
    assert [(comparison.part, comparison.count, comparison.differences) for comparison in replayed] == [("rewards", 16, ())]


BOTH = """
def both(completions, reference_logprobs, reward_model_score, **columns):
    return [sum(logprobs) + score for logprobs, score in zip(reference_logprobs, reward_model_score, strict=True)]
"""


@pytest.mark.full
@pytest.mark.parametrize("plan", ["keep", "terminate"])
def test_replay_repeats_the_inference_phase_for_the_rewards_that_need_it(plan: str, tmp_path: Path) -> None:
    """The step is replayed from the checkpoint one step before it, with each part alone and with all."""
    (tmp_path / "both.py").write_text(BOTH)
    model = write_reward_model(tmp_path / "reward")
    functions = [{"function": "rewards.py:digits"}, {"function": "both.py:both", "needs": ["reference", "reward_model"], "weight": 0.01}]
    run = PodRun(tmp_path, recipe_with(tmp_path, rewards={"functions": functions}))
    done = run.train("--run.max_steps=4", "--sft.steps=6", "--checkpoint.keep=9", f"--reward_model.path={model}", f"--residents.plan={plan}")
    assert done.returncode == 0, done.stdout + done.stderr
    for only in ((), ("--only", "rewards"), ("--only", "rewards", "--only", "train")):
        done = finish(run.begin("replay", str(run.directory), "--step", "3", *only))
        assert done.returncode == 0 and "rewards: 16 of 16 equal" in done.stdout, done.stdout + done.stderr
    (tmp_path / "both.py").write_text(BOTH.replace("+ score", "+ 2 * score"))
    done = finish(run.begin("replay", str(run.directory), "--step", "3", "--only", "rewards", "--inline"))
    assert done.returncode == 1 and "rewards: 0 of 16 equal" in done.stdout and "value recorded" in done.stdout
