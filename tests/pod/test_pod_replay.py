"""``tandem replay``: a recorded step is reproduced, and manipulated records are detected."""

import json
import math
import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pod_runs import PodRun, finish

from tandem.runtime.records.journal import Journal

CHANGED = """
from rewards import digits as recorded_digits

def digits(completions, **columns):
    return [value + (text == {text!r}) for text, value in zip(completions, recorded_digits(completions))]
"""


def replay(run: PodRun, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return finish(run.begin("replay", str(run.directory), *arguments))


def copy_of(undisturbed: PodRun, folder: Path) -> PodRun:
    run = PodRun(folder)
    shutil.copytree(undisturbed.directory, run.directory)
    return run


def test_replayed_step_is_equal_bit_for_bit_and_the_run_stays_as_it_was(undisturbed: PodRun, tmp_path: Path) -> None:
    run = copy_of(undisturbed, tmp_path)
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file() and path.name != "lock"}
    done = replay(run, "--step", "5")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "replaying step 4" in done.stdout, "the checkpoint of step 4 is the newest before it"
    for line in ("rollout: 16 of 16 equal", "rewards: 16 of 16 equal", "train: "):
        assert line in done.stdout
    after = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file() and path.name != "lock"}
    assert after.keys() - before.keys() <= {run.directory / "replays.jsonl"}
    assert all(after[path] == content for path, content in before.items() if not path.name.startswith("journal.sqlite-"))
    assert run.left_behind() == []


@pytest.mark.full
def test_replay_names_a_reward_function_that_gives_other_scores_now(undisturbed: PodRun, tmp_path: Path) -> None:
    run = copy_of(undisturbed, tmp_path)
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        samples = journal.samples(5)
    assert samples is not None
    changed = samples[3]
    (tmp_path / "changed.py").write_text(CHANGED.format(text=changed.text))
    config = run.directory / "config.yaml"
    config.write_text(config.read_text().replace("rewards.py:digits", "changed.py:digits"))
    done = replay(run, "--step", "5", "--only", "rewards", "--inline")
    assert done.returncode == 1, done.stdout
    assert changed.id in done.stdout and "value recorded" in done.stdout and "equal bit for bit" in done.stdout


@pytest.mark.full
def test_replay_names_metrics_that_do_not_follow_from_what_was_recorded(undisturbed: PodRun, tmp_path: Path) -> None:
    run = copy_of(undisturbed, tmp_path)
    path = run.directory / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[2]["actor/grad_norm"] *= 1 + 2**-52
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = replay(run, "--step", "2", "--only", "train", "--inline")
    assert done.returncode == 1
    assert "actor/grad_norm: recorded" in done.stdout and done.stdout.count("recorded ") == 1 + done.stdout.count("from its recorded")


@pytest.mark.full
def test_replay_sees_half_a_nat_added_to_the_recorded_log_probability_of_one_token(undisturbed: PodRun, tmp_path: Path) -> None:
    run = copy_of(undisturbed, tmp_path)
    path = run.directory / "journal.sqlite"
    with Journal(path, read_only=True) as journal:
        samples, scores = journal.samples(2), journal.scores(2)
    assert samples is not None and scores is not None
    chosen = samples[7]
    wrong = replace(chosen, logprobs=(*chosen.logprobs[:-1], chosen.logprobs[-1] + 0.5))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM step_batches WHERE step = 2")
    with Journal(path) as journal:
        journal.commit_samples(2, [*samples[:7], wrong, *samples[8:]])
        journal.commit_scores(2, scores)
    done = replay(run, "--step", "2", "--only", "train", "--inline")
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "mismatch_max_abs" in line)
    recorded, now = (float(number) for number in re.findall(r"\d+\.\d+", line))
    assert recorded == 0.0 and math.isclose(now, 0.5, rel_tol=1e-6)
    tokens = sum(len(sample.token_ids) for sample in samples)
    (line,) = (line for line in done.stdout.splitlines() if "mismatch_kl" in line)
    assert math.isclose(float(re.findall(r"\d+\.\d+(?:e-\d+)?", line)[-1]), (math.exp(-0.5) - 0.5) / tokens, rel_tol=1e-5)


def test_replay_of_a_step_that_is_not_there_or_of_no_run_is_one_line(undisturbed: PodRun, tmp_path: Path) -> None:
    run = copy_of(undisturbed, tmp_path)
    for arguments, said in ((("--step", "6"), "the steps 0 to 5"), (("--step", "-1"), "first step is 0"), (("--step", "x"), "is not a whole number")):
        done = replay(run, *arguments)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and said in done.stderr
    empty = PodRun(tmp_path, name="nothing")
    done = replay(empty, "--step", "0")
    assert done.returncode == 2 and "is not a run" in done.stderr
