"""A reference that follows the actor: after each update it has the weights that the formula gives, computed here from exported states; it is state of the
run, which survives kills, is replayed and verified, under every plan of residents and on meshes."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from pod_runs import PodRun, difference, finish
from torch import Tensor

from tandem.model.huggingface.model_folder import read_tensors
from tandem.trainer.checkpoint.format.manifest import read_manifest
from tandem.trainer.checkpoint.format.shard import REFERENCE
from tandem.trainer.checkpoint.read import Contents

COPY = "--reference.update=copy --reference.every_steps=2"
EMA = "--reference.update=ema --reference.mixup_alpha=0.25"
EVERY_STEP = ("--run.max_steps=4", "--sft.steps=6", "--checkpoint.every_steps=1", "--checkpoint.keep=9", "--evaluation.every_steps=10")
TWO_HEADS = "--model.create.num_key_value_heads=2"
RunOf = Callable[..., PodRun]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """A run with these settings and without faults, made once. Its checkpoints of every step are kept."""

    @cache
    def made(settings: str, *arguments: str) -> PodRun:
        run = PodRun(tmp_path_factory.mktemp("reference"))
        done = run.train(*EVERY_STEP, *settings.split(), *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return run

    return made


def weights(run: PodRun, step: int, of: str = "") -> dict[str, Tensor]:
    folder = run.directory / "checkpoints" / f"step-{step}"
    contents = Contents(folder, read_manifest(folder)[0], of)
    return {key.name: contents.tensor(key) for key in contents.held if key.state == "weights"}


def start_of(run: PodRun) -> dict[str, Tensor]:
    return dict(read_tensors(run.directory / "sft" / "model"))


def assert_follows(run: PodRun, start: dict[str, Tensor], alpha: float, every: int) -> None:
    """The reference in each checkpoint is the recurrence over the actors of the same checkpoints, in float32."""
    wanted = start
    for step in (1, 2, 3, 4):
        actor = weights(run, step)
        if step % every == 0:
            wanted = {name: actor[name] if alpha == 1 else wanted[name] * (1 - alpha) + actor[name] * alpha for name in wanted}
        found = weights(run, step, REFERENCE)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.full
def test_the_reference_is_a_mean_of_the_actors_and_each_step_measures_its_kl_to_it(run_of: RunOf) -> None:
    run = run_of(EMA, "--inline")
    assert_follows(run, start_of(run), 0.25, 1)
    folder = run.directory / "checkpoints" / "step-4"
    assert {key.state for key in Contents(folder, read_manifest(folder)[0], REFERENCE).held} == {"weights"}
    assert [row["mismatch_kl"] for row in run.rows()] == [0.0] * 4


@pytest.mark.full
def test_a_copied_reference_has_the_actors_bits_so_that_the_kl_is_0_until_the_next_update(run_of: RunOf) -> None:
    run = run_of(COPY, "--inline")
    assert_follows(run, start_of(run), 1.0, 2)
    # One update a step: the KL of step 2 is that of the actor to itself, of step 1 and 3 to the actor one step before.
    kl = [row["kl"] for row in run.rows()]
    assert kl[0] == kl[2] == 0.0 and kl[1] > 0 and kl[3] > 0


MESHES = {
    "data": "--parallel.data=2",
    "tensor": "--parallel.tensor=2",
    "pipeline": "--parallel.pipeline=2",
    "context": "--parallel.context=2",
    "expert": "--parallel.data=2 --parallel.expert=2 --model.create.architecture=qwen3_moe --model.create.num_experts=4",
    "zero 1": "--parallel.data=2 --parallel.zero=1",
    "zero 2": "--parallel.data=2 --parallel.zero=2",
    "zero 3": "--parallel.data=2 --parallel.zero=3",
    "zero 3, 8 bits": "--parallel.data=2 --parallel.zero=3 --trainer.optimizer=adamw8bit",
    "expert, zero 3": "--parallel.data=2 --parallel.expert=2 --parallel.zero=3 --model.create.architecture=qwen3_moe --model.create.num_experts=4",
    "tensor x pipeline": "--parallel.tensor=2 --parallel.pipeline=2",
    "pages": "--trainer.offload=nvme --trainer.offload_parameters=nvme",
    "zero 3, pages": "--parallel.data=2 --parallel.zero=3 --trainer.offload=nvme --trainer.offload_parameters=nvme",
}


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_the_reference_of_every_mesh_is_the_same_mean_of_its_actors(mesh: str, run_of: RunOf) -> None:
    run = run_of(f"{EMA} {TWO_HEADS} {mesh}")
    assert_follows(run, start_of(run), 0.25, 1)
    assert [row["mismatch_kl"] for row in run.rows()] == [0.0] * 4


@pytest.mark.full
@pytest.mark.parametrize("plan", ["sleep", "offload", "figure", "terminate"])
def test_no_plan_of_residents_rebuilds_a_reference_that_changes(plan: str, run_of: RunOf, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*EVERY_STEP, *EMA.split(), f"--residents.plan={plan}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, run_of(EMA, "--inline")) == [] and run.events("residue") == []
    moves = [one for each in run.transitions() for one in each.detail.get("moves", []) if "reference" in one["resident"]]
    kinds = {(one["resident"], one["move"]) for one in moves}
    assert kinds == (set() if plan == "sleep" else {("updated_reference", "offload"), ("updated_reference", "reload")})


FAULTS = (
    "trainer_worker:before:train:2", "trainer_worker:after:train:3", "pod:before:train:3", "pod:after:commit_checkpoint:2",
    "trainer_worker:after:checkpoint_stage:2", "trainer_worker:before:checkpoint_commit:2",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kill_changes_no_bit_of_the_reference(fault: str, run_of: RunOf, tmp_path: Path) -> None:
    """Checkpoints are two steps apart, so that steps between them are taken again."""
    run, few = PodRun(tmp_path), ("--checkpoint.every_steps=2", "--checkpoint.keep=1")
    done = run.train(*EVERY_STEP, *EMA.split(), *few, "--fault", fault)
    if fault.startswith("pod:"):
        assert done.returncode == -9
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((run.directory / "faults").iterdir())) == 1
    quiet = run_of(EMA, "--inline")
    assert run.rows() == quiet.rows()
    for of in ("", REFERENCE):
        ours, theirs = weights(run, 4, of), weights(quiet, 4, of)
        assert ours.keys() == theirs.keys() and [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.full
def test_replay_repeats_a_step_with_the_reference_that_it_had(run_of: RunOf, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    shutil.copytree(run_of(EMA, "--inline").directory, run.directory)
    shutil.rmtree(run.directory / "checkpoints" / "step-3")
    done = finish(run.begin("replay", str(run.directory), "--step", "3", "--only", "train", "--inline"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded the checkpoint of step 2" in done.stdout and "equal bit for bit" in done.stdout


@pytest.mark.full
def test_verify_finds_a_damaged_reference(run_of: RunOf, tmp_path: Path) -> None:
    quiet, run = run_of(EMA, "--inline"), PodRun(tmp_path)
    shutil.copytree(quiet.directory, run.directory)
    folder = run.directory / "checkpoints" / "step-4"
    contents = Contents(folder, read_manifest(folder)[0], REFERENCE)
    stored = contents.stored[contents.held[0]][0]
    with (folder / stored.file.file).open("r+b") as file:
        file.seek(stored.placed.offset)
        byte = file.read(1)
        file.seek(stored.placed.offset)
        file.write(bytes([byte[0] ^ 1]))
    found = finish(run.begin("verify", str(run.directory)))
    assert found.returncode == 1 and "step-4" in found.stdout + found.stderr


@pytest.mark.full
def test_one_process_goes_on_with_the_reference_that_two_ranks_saved_in_parts(run_of: RunOf, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    shutil.copytree(run_of(f"{EMA} {TWO_HEADS} {MESHES['zero 3']}").directory, run.directory)
    done = run.resume("--parallel.data=1", "--parallel.zero=0", "--run.max_steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    before, actor, found = weights(run, 4, REFERENCE), weights(run, 5), weights(run, 5, REFERENCE)
    assert [name for name in before if not torch.equal(found[name], before[name] * 0.75 + actor[name] * 0.25)] == []
