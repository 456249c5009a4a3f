"""A run whose engine computes with the published weights in shared memory is the run whose engine copies them, bit for bit."""

import shutil
from pathlib import Path

import pytest
from pod_runs import HERE, RECIPE, PodRun, difference, recipe_with

from tandem.config.recipe import load_config
from tandem.jobs.start import train
from tandem.types import UserError

SHARES = "computes with the published weights in shared memory"


def log_of(run: PodRun) -> str:
    return (run.directory / "logs" / "rollout_worker.log").read_text()


def test_samples_losses_and_weights_are_those_of_a_run_that_copies(undisturbed: PodRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_of(undisturbed).count(SHARES) == 1
    copied = PodRun(tmp_path)
    shutil.copy(HERE / "rewards.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    train(load_config(RECIPE, [f"--run.directory={tmp_path}", "--run.name=run", "--rollout.weights=copied"]), inline=True, progress=False)
    assert difference(copied, undisturbed) == []
    assert [row["mismatch_kl"] for row in undisturbed.rows()] == [0.0] * 6


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        ("--rollout.max_staleness=1",), ("--rollout.budget_tokens=4",), ("--rollout.workers=2",), ("--parallel.data=2", "--parallel.zero=3"),
        ("--residents.plan=sleep",), ("--residents.plan=figure",), ("--trainer.dtype=bfloat16", "--trainer.learning_rate=1e-5"),
        # Each rank has whole panels.
        ("--parallel.tensor=2", "--model.create.hidden_size=128", "--model.create.head_dim=64", "--model.create.num_key_value_heads=2",
         "--model.create.intermediate_size=128"),
        # Of every matrix the engine's ranks have parts of panels, which they copy, and the trainer's ranks have experts.
        ("--rollout.engine.tensor_parallel_size=2", "--model.create.num_key_value_heads=2"),
        ("--rollout.engine.tensor_parallel_size=2", "--rollout.workers=2", "--model.create.hidden_size=128", "--model.create.head_dim=64",
         "--model.create.num_key_value_heads=2", "--model.create.intermediate_size=128"),
        ("--model.create.architecture=qwen3_moe", "--model.create.num_experts=4", "--parallel.data=2", "--parallel.expert=2"),
        ("--model.create.architecture=qwen3_moe", "--model.create.num_experts=16", "--model.create.intermediate_size=64", "--residents.plan=sleep"),
    ],
    ids=lambda settings: settings[0][2:],
)  # fmt: skip
def test_it_is_the_same_run_in_every_order_of_work_and_on_every_mesh(settings: tuple[str, ...], tmp_path: Path) -> None:
    runs = []
    for weights in ("shared", "copied"):
        run = PodRun(tmp_path / weights)
        done = run.train(f"--rollout.weights={weights}", *settings)
        assert done.returncode == 0, done.stdout + done.stderr
        assert run.left_behind() == []
        assert (SHARES in log_of(run)) == (weights == "shared") or "workers" in settings[0]
        runs.append(run)
    assert difference(*runs) == []


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        "rollout_worker:after:update_weight:2", "rollout_worker:before:rollout:3", "trainer_worker:before:register:3", "trainer_worker:after:register:3",
        "trainer_shim:after:register:3", "rollout_shim:before:update_weight:3",
    ],
)  # fmt: skip
def test_a_kill_around_an_update_changes_nothing_with_two_engines_one_step_off(fault: str, tmp_path: Path) -> None:
    runs = []
    for name, faults in (("quiet", ()), ("killed", ("--fault", fault))):
        run = PodRun(tmp_path / name)
        done = run.train("--rollout.weights=shared", "--rollout.max_staleness=1", "--rollout.workers=2", *faults)
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(run)
    assert difference(*runs) == [] and runs[1].events("recovery")


def test_shared_weights_that_the_engine_cannot_compute_with_are_refused_in_one_line(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, rollout={"weights": "shared", "engine": {"quantization": "int8"}}, algorithm={"tis_cap": 2.0, "old_logprobs": "recompute"})
    with pytest.raises(UserError, match=r"'rollout.weights' is 'shared'.*'rollout.engine.quantization'"):
        load_config(recipe, [])
