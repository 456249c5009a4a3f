"""Whole runs of a mixture of experts whose samples vLLM draws: the recorded routing is in the journal, is what is trained with, and outlives a kill."""

import os
import signal
import sys
from pathlib import Path

import pytest
from pod_runs import HERE, PodRun, finish

sys.path.append(str(HERE.parent / "backends"))

from real_vllm import needs_vllm
from test_pod_vllm import wait_for_step

from tandem.runtime.records.journal import Journal

pytestmark = [pytest.mark.full, needs_vllm]
MIXTURE = (
    "--rollout=vllm", "--model.create.architecture=qwen3_moe", "--model.create.head_dim=32", "--model.create.hidden_size=64",
    "--model.create.moe_intermediate_size=64", "--model.create.num_experts=8", "--model.create.initializer_range=0.2",
)  # fmt: skip

MANY_CHOICES = (
    "--model.create.num_hidden_layers=4", "--model.create.num_experts=32", "--model.create.max_position_embeddings=64", "--task.min_digits=8",
    "--task.max_digits=12", "--rollout.max_tokens=32", "--rollout.prompts_per_step=8",
)  # fmt: skip
"""Some 6,000 choices of experts in a step: so many that rounding changes some on any processor."""


def routed_samples(run: PodRun, step: int) -> int:
    """Returns how many samples of ``step`` have a routing in the journal, each for every token but the last."""
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        samples = journal.samples(step)
    assert samples is not None
    found = [sample for sample in samples if sample.routed_experts is not None]
    assert all(s.routed_experts and s.routed_experts.tokens == len(s.prompt_token_ids) + len(s.token_ids) - 1 for s in found)
    return len(found)


def test_a_replayed_routing_makes_the_mismatch_of_16_bits_smaller(tmp_path: Path) -> None:
    mismatch = {}
    for mode in ("R3", "disabled"):
        (tmp_path / mode).mkdir()
        run = PodRun(tmp_path / mode)
        done = run.train(*MIXTURE, *MANY_CHOICES, "--trainer.dtype=bfloat16", f"--trainer.router_replay={mode}", "--run.max_steps=2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert {routed_samples(run, step) for step in (0, 1)} == ({32} if mode == "R3" else {0})
        row = run.rows()[0]
        mismatch[mode] = row["mismatch_kl"]
        if mode == "R3":
            # Four layers, two experts of each token, a byte each.
            assert row["router_replay/bytes_per_token"] == 8 and 0 < row["router_replay/differing_share"] < 0.2
        else:
            assert not any(name.startswith("router_replay/") for name in row)
    assert 0 < mismatch["R3"] < mismatch["disabled"] / 2


def test_a_run_that_is_killed_and_resumed_replays_the_routing_that_it_recorded(tmp_path: Path) -> None:
    run, steps = PodRun(tmp_path), 12
    arguments = ("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}", *MIXTURE, f"--run.max_steps={steps}")
    process = run.begin(*arguments)
    try:
        wait_for_step(run, 2, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps)) and all(row["mismatch_kl"] < 1e-9 for row in rows)
    assert all(routed_samples(run, step) == 16 for step in range(steps))
    for command in (("verify", str(run.directory)), ("replay", str(run.directory), "--step", "1"), ("replay", str(run.directory), "--step", str(steps - 1))):
        checked = finish(run.begin(*command))
        assert checked.returncode == 0, checked.stdout + checked.stderr
