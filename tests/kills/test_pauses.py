"""Runs whose processes are stopped for longer than their deadlines (SIGSTOP) and continued in any order."""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kill_targets import pod_job, ranks_job
from pod_runs import PodRun, difference, finish
from random_kills import Job

SHORT_RANKS = ("--parallel.collective_timeout_s=3", "--parallel.heartbeat_timeout_s=2", "--run.max_steps=200", "--checkpoint.every_steps=50")
SHORT_POD = ("--machine.call_deadline_s=20", "--rewards.sample_deadline_s=1", "--rewards.deadline_s=3", "--parallel.data=2", *SHORT_RANKS[:2])


def begin(job: Job, folder: Path) -> tuple[PodRun, "subprocess.Popen[str]"]:
    """Starts the run of ``job`` in ``folder`` and waits until it has written three rows."""
    run = PodRun(folder, recipe=job.quiet.recipe)
    command = run.begin("train", str(run.recipe), f"--run.directory={folder}", f"--run.name={run.name}", *job.settings)
    rows, ends = run.directory / "metrics.jsonl", time.monotonic() + 120
    while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
        assert command.poll() is None and time.monotonic() < ends
        time.sleep(0.002)
    return run, command


def pause(pids: list[int], seconds: float, rng: random.Random) -> None:
    """Stops ``pids`` for ``seconds`` and continues them in a random order, one every tenth of a second."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        rng.shuffle(pids)
        for pid in pids:
            os.kill(pid, number)
            time.sleep(0.1 if number == signal.SIGCONT else 0.0)
        time.sleep(seconds if number == signal.SIGSTOP else 0.0)


def check_paused(job: Job, folder: Path, seconds: float, seed: int) -> None:
    run, command = begin(job, folder)
    pause(list(run.processes()), seconds, random.Random(seed))
    done = finish(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.events("recovery") == run.events("reward_fault") == [], done.stdout
    assert difference(run, job.quiet) == [] and run.left_behind() == []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return ranks_job(tmp_path_factory.mktemp("ranks"), *SHORT_RANKS)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_were_all_paused_are_not_called_hung(seed: int, ranks: Job, tmp_path: Path) -> None:
    check_paused(ranks, tmp_path, 6.0, seed)


@pytest.mark.full
def test_rank_that_is_paused_alone_is_called_hung_after_its_deadline(ranks: Job, tmp_path: Path) -> None:
    run, command = begin(ranks, tmp_path)
    rank = max(pid for pid, line in run.processes().items() if "rank_process" in line)
    os.kill(rank, signal.SIGSTOP)
    done = finish(command)
    assert done.returncode == 0, done.stdout + done.stderr
    # It was stopped inside or outside of a collective.
    (lost,) = run.events("recovery")
    assert re.search(r"rank \d (waits in the collective|has done nothing in) .* for [\d.]+ s", lost.detail["reason"])
    assert difference(run, ranks.quiet) == []


@pytest.mark.full
def test_pod_that_was_paused_as_a_whole_loses_no_sidecar_and_masks_no_reward(tmp_path: Path) -> None:
    """Longer than the 30 s after which the controller misses the heartbeats of a sidecar."""
    (tmp_path / "quiet").mkdir()
    check_paused(pod_job(tmp_path / "quiet", *SHORT_POD, "--run.max_steps=30"), tmp_path / "paused", 33.0, 7)
