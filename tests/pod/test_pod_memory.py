"""The memory predicted by a pod's plan against that of its processes."""

import json
from pathlib import Path

import pytest
from pod_runs import PodRun

WIDE = (
    "--model.create.hidden_size=512", "--model.create.num_hidden_layers=12", "--model.create.num_attention_heads=8",
    "--model.create.num_key_value_heads=4", "--model.create.head_dim=64", "--model.create.intermediate_size=1536",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "choice",
    [
        "", "parallel.data=2 parallel.zero=3", "parallel.tensor=2", "residents.plan=offload", "rollout.engine.tensor_parallel_size=2",
        "rollout.workers=2", "reference.update=ema", "reference.update=ema residents.plan=terminate",
        "algorithm.name=ppo", "trainer.share_prompts=true",
    ],
)
def test_phases_of_a_pod_take_what_was_predicted_for_all_ranks_of_its_mesh(choice: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*WIDE, *(f"--{override}" for override in choice.split()), "--run.max_steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-1])
    for phase, least, most in (("train", 0.85, 1.1), ("wait_rollout", 0.85, 1.25), ("rollout", 0.6, 1.1)):
        measured, predicted = row[f"memory/{phase}/measured"], row[f"memory/{phase}/predicted"]
        assert least * predicted < measured < most * predicted, (phase, measured / 2**20, predicted / 2**20)
