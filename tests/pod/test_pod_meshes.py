"""A pod whose trainer is a mesh: it learns like one process, its rollout has the bits of its ranks, and it survives dead ranks."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fault_points import NAMED_ON_A_MESH
from pod_runs import PodRun

from tandem.model.huggingface.model_folder import read_tensors

TWO_HEADS = "--model.create.num_key_value_heads=2"
FEW_STEPS = ("--run.max_steps=3", "--sft.steps=6")
MESHES = {
    "data": "--parallel.data=2",
    "tensor": "--parallel.tensor=2",
    "pipeline": "--parallel.pipeline=2 --model.create.tie_word_embeddings=false",
    "context": "--parallel.context=2",
    "expert": "--parallel.data=2 --parallel.expert=2 --model.create.architecture=qwen3_moe --model.create.num_experts=4",
    "zero 1": "--parallel.data=2 --parallel.zero=1",
    "zero 2": "--parallel.data=2 --parallel.zero=2",
    "zero 3": "--parallel.data=2 --parallel.zero=3",
    "data x tensor, zero 1": "--parallel.data=2 --parallel.tensor=2 --parallel.zero=1",
    "tensor x pipeline": "--parallel.tensor=2 --parallel.pipeline=2",
}
RunOf = Callable[[str], PodRun]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """A run with these settings and without faults, made once."""

    @cache
    def made(settings: str) -> PodRun:
        run = PodRun(tmp_path_factory.mktemp("quiet"))
        done = run.train(TWO_HEADS, *FEW_STEPS, *settings.split())
        assert done.returncode == 0, done.stdout + done.stderr
        assert run.left_behind() == []
        return run

    return made


def assert_learns_as(run: PodRun, alone: PodRun) -> None:
    rows, expected = run.rows(), alone.rows()
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * len(rows)
    # The first step's samples come from weights that differ in the last bits at most; later samples may differ.
    for name in ("reward/mean", "actor/grad_norm", "actor/entropy"):
        assert math.isclose(rows[0][name], expected[0][name], rel_tol=1e-3), name
    one, two = dict(read_tensors(alone.directory / "model")), dict(read_tensors(run.directory / "model"))
    assert {name: tensor.shape for name, tensor in one.items()} == {name: tensor.shape for name, tensor in two.items()}


@pytest.mark.full
def test_pod_of_two_ranks_has_the_curve_of_one_process_and_a_rollout_of_the_same_bits(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--parallel.data=2", "--parallel.zero=1", "--run.max_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.left_behind() == [] and len(run.rows()) == 2
    assert_learns_as(run, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_pod_on_a_mesh_has_the_curve_of_one_process_and_a_rollout_of_the_same_bits(mesh: str, run_of: RunOf) -> None:
    assert_learns_as(run_of(mesh), run_of(" ".join(word for word in mesh.split() if word.startswith("--model"))))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["data x tensor, zero 1", "zero 3", "pipeline", "context", "expert"])
def test_engine_of_two_tensor_ranks_has_the_bits_of_the_mesh_that_trains(mesh: str, run_of: RunOf, tmp_path: Path) -> None:
    """Each of its ranks reads its own slices of what the trainer's ranks own."""
    one, two = run_of(MESHES[mesh]), PodRun(tmp_path)
    done = two.train(TWO_HEADS, *FEW_STEPS, *MESHES[mesh].split(), "--rollout.engine.tensor_parallel_size=2", "--machine.threads=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in two.rows()] == [(0.0, 0.0)] * 3
    assert two.rows() == one.rows() and two.results() == one.results()


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "fault"),
    [("zero 1", NAMED_ON_A_MESH[0]), *(("data x tensor, zero 1", fault) for fault in NAMED_ON_A_MESH)],
)
def test_rank_that_is_killed_on_a_mesh_changes_no_bit(mesh: str, fault: str, run_of: RunOf, tmp_path: Path) -> None:
    quiet, run = run_of(MESHES[mesh]), PodRun(tmp_path)
    done = run.train(TWO_HEADS, *FEW_STEPS, *MESHES[mesh].split(), "--fault", fault)
    if fault.startswith("pod:"):
        assert done.returncode == -9
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((run.directory / "faults").iterdir())) == 1
    assert run.rows() == quiet.rows() and run.results() == quiet.results()
    assert run.left_behind() == []


@pytest.mark.full
def test_run_of_two_ranks_is_resumed_in_one_process_and_says_that_its_bits_may_differ(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--parallel.data=2", *FEW_STEPS, "--run.max_restarts=0", "--fault", "trainer_rank1:before:convert:2")
    assert done.returncode == 1 and "rank 1 died (killed by SIGKILL)" in done.stderr and len(done.stderr.splitlines()) == 1
    resumed = run.resume("--parallel.data=1")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
    (changed,) = run.events("mesh")
    assert (changed.detail["before"]["data"], changed.detail["now"]["data"]) == (2, 1)
