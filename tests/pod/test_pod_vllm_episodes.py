"""Runs of episodes with tools and of agents whose tokens vLLM draws: each sample is in the journal once, whatever is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import test_pod_agents
import test_pod_multi_turn
from pod_runs import HERE, PodRun, finish
from test_pod_multi_turn import in_rollout

sys.path.append(str(HERE.parent / "backends"))

from real_vllm import needs_vllm
from test_pod_vllm import begun, killed_pids

from tandem.runtime.records.journal import Journal
from tandem.types import Sample

pytestmark = [pytest.mark.full, needs_vllm]
GROUPS, EACH = 4, 4


def is_server(line: str) -> bool:
    return "vllm.entrypoints.cli.main" in line


def kill_in_rollout(run: PodRun, process: "subprocess.Popen[str]", step: int, kill: Callable[[], object]) -> None:
    """Calls ``kill`` in the middle of the rollout of a step from ``step`` on."""
    ends = time.monotonic() + 900
    while not any(in_rollout(run, each) for each in range(step, step + 100)):
        assert time.monotonic() < ends and process.poll() is None, process.communicate() if process.poll() is not None else "no such rollout"
        time.sleep(0.005)
    kill()


def killed_and_resumed(run: PodRun, steps: int, *arguments: str) -> None:
    """Trains ``run`` with its server of vLLM killed in a rollout, then with all of its processes killed in another, and resumes it."""
    with begun(run, f"--run.max_steps={steps}", *arguments) as process:
        kill_in_rollout(run, process, 1, lambda: killed_pids(process, is_server))
        ends = time.monotonic() + 900
        while not run.events("recovery"):
            assert process.poll() is None and time.monotonic() < ends, "the death was not seen"
            time.sleep(0.05)
        (event,) = run.events("recovery")
        assert event.detail["role"] == "rollout"
        kill_in_rollout(run, process, int(event.detail["step"]) + 1, lambda: os.killpg(process.pid, signal.SIGKILL))
        process.communicate()
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.left_behind() == []
    for command in (("verify", str(run.directory)), ("replay", str(run.directory), "--step", str(steps - 1))):
        checked = finish(run.begin(*command))
        assert checked.returncode == 0, checked.stdout + checked.stderr


def assert_once(run: PodRun, steps: int) -> list[Sample]:
    """Returns the samples of all steps, each of which has every sample once, drawn by its weights, with log-probabilities that the trainer shares up to
    rounding: which it would not if any token were another than the one that was drawn."""
    rows, found = run.rows(), list[Sample]()
    assert [row["step"] for row in rows] == list(range(steps))
    assert all(row["mismatch_kl"] < 1e-9 and row["mismatch_max_abs"] < 1e-3 for row in rows)
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        for step in range(steps):
            samples = journal.samples(step)
            assert samples is not None and len({sample.id for sample in samples}) == len(samples) == GROUPS * EACH
            assert {version.step for sample in samples for each in sample.sequences for version in each.sampled_weight_versions} == {step}
            assert not any(sample.fault for sample in samples)
            found += samples
    return found


def test_episodes_with_tools_are_vllms_own_tokens_and_outlive_kills(tmp_path: Path) -> None:
    run, steps = test_pod_multi_turn.run_in(tmp_path, tool="slow.py:calculator"), 8
    killed_and_resumed(run, steps)
    samples = assert_once(run, steps)
    called = [sample for sample in samples if sample.response_mask]
    assert len(called) > len(samples) // 10
    for sample in called:
        assert [message["role"] for message in sample.messages[:2]] == ["assistant", "tool"]
        assert len(sample.response_mask) == len(sample.token_ids) > sample.sampled_tokens
        assert [version is None for version in sample.weight_versions] == [not was_sampled for was_sampled in sample.response_mask]
    assert all(0 < row["tools/call_frequency"] <= 2 and 1 < row["num_turns/max"] <= 3 for row in run.rows())


def test_an_agents_requests_are_answered_by_vllm_and_every_branch_is_trained_with_its_tokens(tmp_path: Path) -> None:
    run, steps = test_pod_agents.run_in(tmp_path), 8
    killed_and_resumed(run, steps)
    samples = assert_once(run, steps)
    assert sum(bool(sample.branches) for sample in samples) > len(samples) // 10 and any(not sample.branches for sample in samples)
    rows = run.rows()
    assert rows[0]["num_branches/mean"] == sum(1 + len(sample.branches) for sample in samples[: GROUPS * EACH]) / (GROUPS * EACH)
