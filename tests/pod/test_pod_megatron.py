"""Whole GRPO runs with Megatron-Core as the trainer, on a CPU with the shim. Skipped by name where its environment is missing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, EtcdServer, program
from pod_runs import PodRun, difference
from safetensors.torch import load_file

from tandem.backends.environment import FOLDER, installed

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        installed("megatron") is None, reason="the megatron sidecar has no environment here; make it with: tandem sidecar install megatron"
    ),
]
STEPS = 4
SHARES = "computes with the published weights in shared memory"
MESHES = {
    "data": ("--parallel.data=2", "--parallel.zero=1"),
    "tensor": ("--parallel.tensor=2", "--model.create.num_key_value_heads=2"),
    "pipeline": ("--parallel.pipeline=2",),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sidecars with the shim of a CPU."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "backends" / "megatron_on_cpu"))
    import megatron_environment

    return {FOLDER: str(megatron_environment.make(tmp_path_factory.mktemp("sidecars")))}


def trained(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> PodRun:
    run = PodRun(folder, environment=environment or {})
    done = run.train(f"--run.max_steps={STEPS}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_trains_as_with_tandems_own_trainer(mesh: str, environment: dict[str, str], tmp_path: Path) -> None:
    found = trained(tmp_path / "megatron", "--trainer=megatron", *MESHES[mesh], environment=environment)
    expected = trained(tmp_path / "tandem", *(each for each in MESHES[mesh] if each.startswith("--model")))
    assert found.left_behind() == []
    for own, other in zip(found.rows(), expected.rows(), strict=True):
        for name in ("reward/mean", "actor/pg_loss", "kl", "actor/entropy", "actor/grad_norm", "response_length/mean"):
            assert own[name] == pytest.approx(other[name], abs=1e-5), (own["step"], name)
        # Another network than the engine's: equal but for the last bits, and said to be so.
        assert 0 < own["mismatch_max_abs"] < 1e-5 and own["mismatch_kl"] < 1e-10
    assert not found.events("mismatch")
    if mesh == "data":
        # What it has saved is what Tandem's own trainer saves.
        done = found.resume(f"--run.max_steps={STEPS + 2}", "--trainer.backend=tandem")
        assert done.returncode == 0, done.stdout + done.stderr
        assert [row["mismatch_kl"] for row in found.rows()[STEPS:]] == [0.0, 0.0]
        return
    ours, theirs = (load_file(run.directory / "model" / "model.safetensors") for run in (found, expected))
    assert ours.keys() == theirs.keys() and all(float((ours[name] - theirs[name]).abs().max()) < 1e-4 for name in theirs)


def test_a_rank_and_the_controller_are_killed_and_the_run_is_the_same(environment: dict[str, str], tmp_path: Path) -> None:
    arguments = ("--trainer=megatron", *MESHES["data"])
    undisturbed = trained(tmp_path / "undisturbed", *arguments, environment=environment)
    faults = "trainer_rank1:before:forward:1,trainer_worker:before:optimizer:2,pod:after:commit_scores:3"
    run = PodRun(tmp_path / "killed", environment=environment)
    done = run.train(f"--run.max_steps={STEPS}", *arguments, "--fault", faults)
    assert done.returncode == -9, done.stdout + done.stderr
    done = run.resume("--fault", faults)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (run.directory / "faults").iterdir()) == sorted(faults.replace(":", "-").split(","))
    assert difference(run, undisturbed) == []
    assert run.left_behind() == []


@pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)
def test_two_pods_over_etcd_give_the_bits_of_one(etcd_server: EtcdServer, environment: dict[str, str], tmp_path: Path) -> None:
    from tandem.runtime.coordination.etcd import EtcdStore

    alone = trained(tmp_path / "alone", "--trainer=megatron", environment=environment)
    run = PodRun(tmp_path / "run", name=f"run-{time.time_ns()}", environment=environment)
    pods = ("--pods", "2", "--coordination", "etcd", f"--coordination.endpoints=[{etcd_server.url}]")
    done = run.train(f"--run.max_steps={STEPS}", "--trainer=megatron", *pods)
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, alone) == [] and run.left_behind() == [] and run.events("recovery") == []
    # Both pods drew samples, the second with every version that Megatron's ranks had published.
    received = (run.directory / "pods" / "1" / "logs" / "rollout_shim.log").read_text()
    assert [f"weights of step {step} (incarnation 1) came from pod" in received for step in range(STEPS)] == [True] * STEPS
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert all(row["perf/rollout_groups/pod-0"] > 0 and row["perf/rollout_groups/pod-1"] > 0 for row in rows)
    assert EtcdStore(etcd_server.config(), f"/tandem/{run.name}/").list("") == []


def test_an_engine_computes_with_the_parts_of_tensor_ranks_where_they_are_as_one_that_copies_them(environment: dict[str, str], tmp_path: Path) -> None:
    # Parts of columns of two ranks, and of rows that are whole panels of the engine's kernels.
    sizes = {"hidden_size": 128, "head_dim": 64, "num_key_value_heads": 2, "intermediate_size": 128}
    settings = ("--parallel.tensor=2", *(f"--model.create.{key}={size}" for key, size in sizes.items()))
    shared, copied = (
        trained(tmp_path / weights, "--trainer=megatron", f"--rollout.weights={weights}", *settings, environment=environment)
        for weights in ("shared", "copied")
    )
    said = [SHARES in (run.directory / "logs" / "rollout_worker.log").read_text() for run in (shared, copied)]
    assert said == [True, False]
    assert difference(shared, copied) == []
    # What the engine drew with is what the trainer has: its own network computes nearly the same log-probabilities.
    assert all(0 < row["mismatch_max_abs"] < 1e-5 for row in shared.rows())


@pytest.mark.parametrize("trainer", ["data=2,zero=1", "tensor=2"])
def test_weights_reach_quantized_engines_unchanged_before_and_after_a_step(trainer: str, environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli.main", "weights", "check", "--trainer", f"backend=megatron,{trainer}", "--rollout", "quantization=int8", "--json"],
        env={**os.environ, **environment}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
