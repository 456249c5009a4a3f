"""A whole run whose samples vLLM draws on two tensor-parallel ranks, one of which is killed."""

import sys
import time
from pathlib import Path

import pytest
from pod_runs import HERE, SHARED_MEMORY, PodRun

sys.path.append(str(HERE.parent / "backends"))

from real_vllm import needs_vllm
from test_pod_vllm import assert_whole, begun, killed_pids, wait_for_step

pytestmark = [pytest.mark.full, needs_vllm]


def test_a_run_on_two_tensor_parallel_ranks_is_whole_where_one_is_killed(tmp_path: Path) -> None:
    run, steps, before = PodRun(tmp_path), 20, set(SHARED_MEMORY.iterdir())
    with begun(run, f"--run.max_steps={steps}", "--rollout.engine.tensor_parallel_size=2") as process:
        wait_for_step(run, 1, process)
        killed_pids(process, lambda line: "Worker_TP1" in line)
        ends = time.monotonic() + 900
        while not run.events("recovery"):
            assert process.poll() is None and time.monotonic() < ends, "the death was not seen"
            time.sleep(0.05)
        out, error = process.communicate(timeout=900)
    assert process.returncode == 0, out + error
    assert_whole(run, steps)
    assert "tensor_parallel_size=2" in (run.directory / "logs" / "vllm.log").read_text()
    assert run.left_behind() == []
    assert not [path.name for path in SHARED_MEMORY.iterdir() if path not in before and "vllm" in path.name]
