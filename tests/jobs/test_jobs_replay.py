"""``tandem replay`` of pretraining: a recorded step is reproduced bit for bit on its mesh, and the replay of a skipped step locates the
first non-finite value."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from package_data import make_datasets
from pretrain_recipe import write_recipe

from tandem.cli.main import main
from tandem.config.recipe import load_config
from tandem.jobs.start import train
from tandem.runtime.records.metrics import VOLATILE
from tandem.runtime.records.tensor_digests import compare_digests
from tandem.trainer.checkpoint.format.manifest import read_manifest
from tandem.trainer.checkpoint.format.shard import Key
from tandem.trainer.checkpoint.read import Contents
from tandem.types import RunError

STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "train")


def begin(data: Path, directory: Path, *overrides: str) -> Path:
    recipe = write_recipe(
        directory, data, data={"train": [{"path": str(data / "train")}], "global_batch_size": 4}, trainer={"micro_batch_tokens": 100},
        checkpoint={"every_steps": 2, "keep": 2, "asynchronous": False}, run={"max_steps": STEPS},
    )  # fmt: skip
    train(load_config(recipe, list(overrides)))
    return directory / "run"


def replay(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> tuple[int, str]:
    """Returns the exit status and the output."""
    capsys.readouterr()
    status = main(["replay", str(run), *arguments])
    said = capsys.readouterr()
    return status, said.out + said.err


def files_of(run: Path) -> dict[Path, bytes]:
    changing = ("replays.jsonl", "lock", "journal.sqlite-wal", "journal.sqlite-shm")
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in changing}


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with the checkpoints of steps 4 and 6."""
    torch.set_num_threads(1)
    return begin(data, tmp_path_factory.mktemp("finished"))


def test_recorded_step_is_equal_bit_for_bit_and_the_run_stays_as_it_was(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(finished)
    status, said = replay(capsys, finished, "--step", "5")
    row = json.loads((finished / "metrics.jsonl").read_text().splitlines()[5])
    count = sum(not name.startswith(VOLATILE) for name in row)
    assert status == 0 and f"train: {count} of {count} equal bit for bit" in said
    assert "loaded the checkpoint of step 4\nreplaying step 4\nreplaying step 5\n" in said
    assert files_of(finished) == before


def changed(finished: Path, folder: Path, step: int, name: str, change: Any) -> Path:
    """Copies the run and changes its row of ``step``."""
    run = folder / "run"
    shutil.copytree(finished, run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[step][name] = change(rows[step][name])
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_number_that_does_not_follow_is_named_down_to_its_last_bit(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = changed(finished, tmp_path, 5, "train/loss", lambda loss: math.nextafter(loss, math.inf))
    status, said = replay(capsys, run, "--step", "5")
    assert status == 1 and "  train/loss: recorded " in said and said.count(": recorded ") == 1


def test_step_before_that_does_not_follow_is_named_too(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = replay(capsys, changed(finished, tmp_path, 4, "actor/grad_norm", lambda norm: norm * 2), "--step", "5")
    assert status == 0 and "step 4, an earlier one, differs from its record" in said


def test_what_cannot_be_replayed_is_refused_in_one_line(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, wanted in (
        (("--step", "3"), "no checkpoint at or before step 3 of"),
        (("--step", "6"), "its metrics have the steps 0 to 5"),
        (("--step", "5", "--only", "rewards"), "have one part, 'train'"),
    ):
        status, said = replay(capsys, finished, *arguments)
        assert status == 2 and wanted in said and len(said.splitlines()) == 1
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("threads: 1", "threads: 2"))
    status, said = replay(capsys, run, "--step", "5")
    assert status == 2 and "threads was '1', now '2'" in said
    torch.set_num_threads(1)
    for path in run.glob("checkpoints/step-4/rank-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    config.write_text(config.read_text().replace("threads: 2", "threads: 1"))
    status, said = replay(capsys, run, "--step", "5")
    assert status == 1 and "no checkpoint at or before step 5 is whole" in said


@pytest.fixture(scope="module")
def diverged(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after two skipped steps: 1, which has a row, and 2, which has none."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("diverged")
    with pytest.raises(RunError):
        begin(data, folder, "trainer.learning_rate=1e30", "trainer.max_skipped_steps=1")
    return folder / "run"


@pytest.mark.parametrize("step", [1, 2])
def test_kept_batch_says_where_it_stops_being_finite(step: int, diverged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(diverged)
    status, said = replay(capsys, diverged, "--step", str(step))
    kept = json.loads((diverged / "skipped" / f"step-{step}.json").read_text())
    count = len(kept["metrics"])
    assert status == 0 and f"train: {count} of {count} equal bit for bit" in said, said
    assert f"step {step}: {len(kept['sequences'])} sequences" in said and "the largest 1e+30 in" in said
    assert f"loss {kept['metrics']['train/loss']}, gradient norm {kept['metrics']['actor/grad_norm']}" in said
    assert "backward: first not finite is the gradient of the output of layer 1, MLP: micro-batch 0, sequence 0/0, token 0 (nan)" in said
    assert "  layer 0: " in said and len(said.splitlines()) <= 24
    assert files_of(diverged) == before


@pytest.mark.full
def test_shares_of_two_ranks_are_run_in_one_process_and_their_recorded_step_on_two(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError):
        begin(data, tmp_path, "trainer.learning_rate=1e30", "trainer.max_skipped_steps=0", "parallel.data=2")
    status, said = replay(capsys, tmp_path / "run", "--step", "0")
    assert status == 0 and "loaded the checkpoint of step 0\nreplaying step 0\n" in said and " equal bit for bit" in said
    status, said = replay(capsys, tmp_path / "run", "--step", "1")
    assert status == 0 and "train: 2 of 2 finite or not as recorded" in said
    assert "the run has 2 ranks and the replay has one process" in said and "of rank 0's share" in said
    (tmp_path / "run/skipped/step-1-share-0-of-2.json").unlink()
    status, said = replay(capsys, tmp_path / "run", "--step", "1")
    assert status == 2 and "of the 2 shares of the saved batch of step 1" in said


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", [("parallel.data=2", "parallel.zero=2"), ("parallel.pipeline=2", "parallel.data=2")], ids=["zero 2", "pipeline 2 x data 2"]
)
def test_step_of_a_mesh_is_equal_bit_for_bit_on_that_mesh(
    mesh: tuple[str, ...], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(data, tmp_path, *mesh)
    before = files_of(run)
    status, said = replay(capsys, run, "--step", "5")
    assert status == 0 and "loaded the checkpoint of step 4\nreplaying step 4\nreplaying step 5\n" in said and " equal bit for bit" in said
    assert files_of(run) == before
    status, said = replay(capsys, run, "--step", "5", "--inline")
    assert status == 2 and "--inline is one process" in said
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[5]["actor/grad_norm"] = math.nextafter(rows[5]["actor/grad_norm"], 0.0)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, said = replay(capsys, run, "--step", "5")
    assert status == 1 and "  actor/grad_norm: recorded " in said and said.count(": recorded ") == 1


def recorded(capsys: pytest.CaptureFixture[str], run: Path, folder: Path) -> list[dict[str, Any]]:
    replay(capsys, run, "--step", "5", "--record", str(folder))
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def test_record_has_every_tensor_from_the_weights_of_the_checkpoint_to_those_after_the_step(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recorded(capsys, finished, tmp_path / "record")
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines) and {line["step"] for line in lines} == {4, 5}
    names = [line["name"] for line in lines if line["step"] == 4]
    assert len(set(names)) == len(names)
    folder = finished / "checkpoints" / "step-4"
    contents = Contents(folder, read_manifest(folder)[0])
    norm = {line["name"]: line["norm"] for line in lines if line["step"] == 4}
    assert norm["before the step, norm.weight"] == contents.tensor(Key("weights", "model.norm.weight")).double().norm().item()
    parts = ("token_ids", "before the", "layer 0, att", "gradient of model,", "gradient of norm", "after the")
    order = [next(place for place, name in enumerate(names) if part in name) for part in parts]
    assert order == sorted(order) and {name.split(",")[0] for name in names} >= {"batch", "model", "gradient of model"}
    status, said = replay(capsys, finished, "--step", "5", "--record", str(tmp_path / "record"))
    assert status != 0 and "exists; name a folder that does not" in said


MESHES = ["--parallel.data=2", "--parallel.data=2 --parallel.zero=3", "--parallel.pipeline=2"]


@pytest.mark.parametrize("mesh", ["", *(pytest.param(mesh, marks=pytest.mark.full) for mesh in MESHES)])
def test_another_optimizer_shows_first_in_the_weights_after_the_step(
    mesh: str, data: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(data, tmp_path / "run", *mesh.split()) if mesh else finished
    recorded(capsys, run, tmp_path / "one")
    other = tmp_path / "other" / "run"
    shutil.copytree(run, other)
    config = other / "config.yaml"
    changed = config.read_text().replace("weight_decay: ", "weight_decay: 1")
    assert changed != config.read_text()
    config.write_text(changed)
    recorded(capsys, other, tmp_path / "two")
    same = compare_digests(tmp_path / "one", tmp_path / "one")
    assert same.first is None and same.equal == same.count > 50 and same.unmatched == 0
    compared = compare_digests(tmp_path / "one", tmp_path / "two")
    assert compared.first is not None
    place, one, two = compared.first
    # The stages of a pipeline record different tensors, so that either may be the first one by its place in the file.
    assert place in ({"rank-0", "rank-1"} if "pipeline" in mesh else {"rank-0"})
    assert (one.step, one.stage) == (4, "train") and one.name.startswith("after the step, ") and one.norm != two.norm
