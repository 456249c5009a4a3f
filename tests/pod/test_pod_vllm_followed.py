"""The weights of a run whose samples vLLM draws are served while it trains."""

import sys
from pathlib import Path

import pytest
from pod_runs import HERE, PodRun

sys.path.append(str(HERE.parent / "backends"))

from real_vllm import needs_vllm
from test_pod_followed import follow
from test_pod_vllm import VLLM, assert_whole

pytestmark = [pytest.mark.full, needs_vllm]


def test_clients_get_the_versions_that_vllm_draws_with(tmp_path: Path) -> None:
    run, steps = PodRun(tmp_path / "run"), 60
    found = follow(run, tmp_path / "serve.log", *VLLM, f"--run.max_steps={steps}")
    assert_whole(run, steps)
    # Versions that the run drew samples with, of its one incarnation.
    assert found.seen <= {"0.0", *(f"1.{step}" for step in range(steps + 1))}
    assert run.events("recovery") == [] and run.left_behind() == []
