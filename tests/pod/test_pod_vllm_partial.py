"""Partial rollouts on vLLM: samples are continued by newer weights, and each is trained once, whatever is killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from pod_runs import HERE, PodRun, finish

sys.path.append(str(HERE.parent / "backends"))

from real_vllm import needs_vllm
from test_pod_vllm import begun, killed_pids, wait_for_step
from test_pod_vllm_episodes import EACH, GROUPS, is_server

from tandem.runtime.records.journal import Journal
from tandem.types import FinishReason

pytestmark = [pytest.mark.full, needs_vllm]


def test_partial_rollouts_go_on_in_vllm_with_newer_weights_and_outlive_kills(tmp_path: Path) -> None:
    run, steps = PodRun(tmp_path), 40
    with begun(run, f"--run.max_steps={steps}", "--rollout.budget_tokens=4") as process:
        wait_for_step(run, 2, process)
        killed_pids(process, is_server)
        ends = time.monotonic() + 900
        while not run.events("recovery"):
            assert process.poll() is None and time.monotonic() < ends, "the death was not seen"
            time.sleep(0.05)
        wait_for_step(run, int(run.events("recovery")[0].detail["step"]) + 1, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.left_behind() == [] and finish(run.begin("verify", str(run.directory))).returncode == 0
    rows, seen = run.rows(), set[str]()
    assert [row["step"] for row in rows] == list(range(steps)) and all(row["mismatch_kl"] < 1e-9 for row in rows)
    assert rows[0]["rollout/off_policy_share"] == 0.0 and any(row["rollout/off_policy_share"] > 0 for row in rows[1:])
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        for step in range(steps):
            samples = [sample for each in journal.rounds(step) for sample in each.samples]
            assert len(samples) == GROUPS * EACH and not any(sample.id in seen for sample in samples)
            seen |= {sample.id for sample in samples}
            for sample in samples:
                drawn_by = [version.step for version in sample.sampled_weight_versions]
                assert sample.finish_reason is not FinishReason.ABORT and drawn_by == sorted(drawn_by) and drawn_by[-1] <= step
                assert all(drawn_by.count(each) % 4 == 0 for each in set(drawn_by) - {drawn_by[-1]})
