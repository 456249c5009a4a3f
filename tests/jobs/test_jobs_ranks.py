"""Pretraining on several ranks with the real command: the curve of one process, exact resumes on other numbers of ranks, dead and hung
ranks."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from data_runs import command, refused, rows
from package_data import make_datasets
from pretrain_recipe import write_recipe
from safetensors.torch import load_file
from sharded import is_same, tensors_of

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.jobs.data_run import supervise as supervise_module
from tandem.jobs.start import resume, train
from tandem.layout.mesh import MeshShape
from tandem.report.run_facts import PREDICTION_KEY
from tandem.runtime.callback import Callback
from tandem.runtime.process.worker_group import GroupSettings, RanksLost
from tandem.runtime.records.journal import Journal
from tandem.trainer.checkpoint.write import PHASES
from tandem.types import RunError

STEPS = 12
SYNCHRONOUS = "--checkpoint.asynchronous=false"
"""Where a test names the checkpoint that a death right after it finds."""
TWO_HEADS = "--model.create.num_key_value_heads=2"
MESHES = ["--parallel.tensor=2 --parallel.data=2", "--parallel.tensor=2 --parallel.pipeline=2", "--parallel.tensor=2 --parallel.data=2 --parallel.zero=3"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json")


def write_ranks_recipe(folder: Path, data: Path) -> None:
    write_recipe(
        folder, data,
        data={"train": [{"path": str(data / "json")}], "held_out": str(data / "json"), "global_batch_size": 7},
        trainer={"warmup_steps": 5, "weight_decay": 0.1, "micro_batch_tokens": 100}, evaluation={"every_steps": STEPS, "sequences": 5},
        checkpoint={"every_steps": 5, "keep": 2}, run={"max_steps": STEPS}, parallel={"heartbeat_timeout_s": 2.0, "collective_timeout_s": 60.0},
    )  # fmt: skip


def run(folder: Path, data: Path, *arguments: str, status: int = 0) -> str:
    """Trains in ``folder``/run; returns the output."""
    write_ranks_recipe(folder, data)
    return command("train", "recipe.yaml", "--machine.threads=1", *arguments, status=status, folder=folder)


def prediction(folder: Path) -> dict[str, Any]:
    with Journal(folder / "run" / "journal.sqlite", read_only=True) as journal:
        return dict(journal.get(PREDICTION_KEY) or {})


def recoveries(folder: Path) -> list[dict[str, Any]]:
    with Journal(folder / "run" / "journal.sqlite", read_only=True) as journal:
        return [event.detail for event in journal.events() if event.kind == "recovery"]


def is_same_run(folder: Path, other: Path) -> bool:
    one, two, model, saved = folder / "run", other / "run", "model/model.safetensors", f"checkpoints/step-{STEPS}"
    return rows(one) == rows(two) and (one / model).read_bytes() == (two / model).read_bytes() and is_same(one / saved, two / saved)


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    write_ranks_recipe(folder, data)
    before = torch.get_num_threads()
    train(load_config(folder / "recipe.yaml", ["--machine.threads=1"]))
    torch.set_num_threads(before)
    return folder


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run(folder, data, "--parallel.data=2")
    return folder


@pytest.fixture(scope="module")
def two_heads(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with a model that two tensor-parallel ranks can shard."""
    folder = tmp_path_factory.mktemp("two_heads")
    run(folder, data, TWO_HEADS)
    return folder


def is_curve_of(folder: Path, other: Path) -> bool:
    found, wanted = rows(folder / "run"), rows(other / "run")
    assert [row["step"] for row in found] == list(range(STEPS))
    assert wanted[0]["train/loss"] - wanted[-1]["train/loss"] > 0.3, "it learns, so equal curves mean something"
    names = ("train/loss", "train/entropy", "actor/grad_norm")
    return all(math.isclose(a[name], b[name], rel_tol=2e-5) for a, b in zip(found, wanted, strict=True) for name in names)


def test_two_ranks_have_the_curve_of_one_process_and_count_what_they_send(two: Path, one: Path) -> None:
    assert is_curve_of(two, one)
    sent = [json.loads(line) for line in (two / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    numbers = sum(math.prod(shape) for shape in shapes_in(two / "run" / "model" / "model.safetensors"))
    # A reduce-scatter and an all-gather of every gradient each send half of it; the rest is padding, counts, the loss and the norm.
    assert 4 * numbers < sent["comm/sent_bytes"] < 1.1 * 4 * numbers
    assert sent["comm/wait_s"] > 0 and sent["comm/collectives"] >= 8


def shapes_in(path: Path) -> list[list[int]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


@pytest.mark.full
def test_run_of_two_ranks_goes_on_in_one_process_and_loses_and_repeats_no_sample(one: Path, data: Path, tmp_path: Path) -> None:
    said = run(tmp_path, data, "--parallel.data=2", "--parallel.zero=3", "--run.max_restarts=0", SYNCHRONOUS, "--fault=rank1:before:train:5", status=1)
    assert "rank 1 died (killed by SIGKILL)" in said.splitlines()[-1] and "run.max_restarts is 0" in said
    resume(tmp_path / "run", overrides=["--parallel.data=1", "--parallel.zero=0"])
    assert is_curve_of(tmp_path, one)
    with Journal(tmp_path / "run" / "journal.sqlite", read_only=True) as journal:
        (changed,) = [event.detail for event in journal.events() if event.kind == "mesh"]
    assert (changed["step"], changed["before"]["data"], changed["now"]["data"]) == (5, 2, 1)


@pytest.mark.full
def test_tensor_parallel_ranks_save_their_parts_and_the_run_goes_on_in_one_process(two_heads: Path, data: Path, tmp_path: Path) -> None:
    said = run(tmp_path, data, TWO_HEADS, "--parallel.tensor=2", "--run.max_restarts=0", SYNCHRONOUS, "--fault=rank1:before:train:11", status=1)
    assert "rank 1 died (killed by SIGKILL)" in said.splitlines()[-1]
    saved = tmp_path / "run" / "checkpoints" / "step-10"
    assert len(list(saved.glob("rank-*.safetensors"))) == 2
    whole = {name: tuple(tensor.shape) for name, tensor in tensors_of(saved).items()}
    assert whole == {name: tuple(tensor.shape) for name, tensor in tensors_of(two_heads / "run" / "checkpoints" / "step-10").items()}
    resume(tmp_path / "run", overrides=["--parallel.tensor=1"])
    assert is_curve_of(tmp_path, two_heads)


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_saves_and_exports_the_whole_model(mesh: str, two_heads: Path, data: Path, tmp_path: Path) -> None:
    run(tmp_path, data, TWO_HEADS, *mesh.split())
    assert is_curve_of(tmp_path, two_heads)
    wanted, found = (load_file(folder / "run" / "model" / "model.safetensors") for folder in (two_heads, tmp_path))
    assert all(torch.allclose(found[name], wanted[name], atol=3e-4) for name in wanted) and found.keys() == wanted.keys()
    saved = tensors_of(tmp_path / "run" / "checkpoints" / f"step-{STEPS}")
    assert all(torch.equal(saved[f"weights/{name}"], found[name]) for name in found)


@pytest.mark.full
def test_run_goes_on_with_two_then_four_ranks_then_one_process(one: Path, data: Path, tmp_path: Path) -> None:
    run(tmp_path, data, "--parallel.data=2", "--parallel.zero=3", "--run.max_restarts=0", SYNCHRONOUS, "--fault=rank1:before:train:5", status=1)
    again = ("--parallel.data=4", "--parallel.zero=2", "--fault=rank3:before:train:10")
    command("resume", "run", *again, status=1, folder=tmp_path)
    command("resume", "run", "--parallel.data=1", "--parallel.zero=0", folder=tmp_path)
    assert is_curve_of(tmp_path, one)


@pytest.mark.full
def test_ranks_that_die_while_they_measure_do_so_again_and_a_resumed_run_too(two: Path, data: Path, tmp_path: Path) -> None:
    mesh = ("--parallel.data=2", "--parallel.zero=1")
    run(tmp_path, data, *mesh, "--run.max_restarts=1", SYNCHRONOUS, "--fault=rank1:before:predict:0,rank0:before:train:5", status=1)
    first = prediction(tmp_path)
    command("resume", "run", "--fault=rank1:before:predict:5", "--run.max_restarts=1", folder=tmp_path)
    again = prediction(tmp_path)
    assert [event["ranks"] for event in recoveries(tmp_path)] == [[1], [1]]
    assert is_same_run(tmp_path, two)
    for made in (first, again):
        ((tokens, phases),) = made["at"]
        assert tokens == 0 and phases["train"] > 0 and made["took_s"] > 0
    assert first["took_s"] != again["took_s"], "it was measured again"


@pytest.mark.full
def test_hung_rank_is_named_with_stacks_and_the_run_goes_on_to_the_same_bits(two: Path, data: Path, tmp_path: Path) -> None:
    said = run(tmp_path, data, "--parallel.data=2", "--parallel.zero=1", "--fault=rank1:stall:backward:9")
    (hung,) = [line for line in said.splitlines() if "rank 1 has done nothing" in line]
    assert re.search(r"in 'backward' of step 9 for [\d.]+ s; rank 0 waits in the collective 'gradients of the head' \('tokens'\)", hung)
    (stacks,) = (tmp_path / "run" / "logs").glob("stacks-*.txt")
    waits, sleeps = stacks.read_text().split("rank 1 has done nothing")
    assert "in _wait" in waits and "in train_step" in waits and "in _sleep" in sleeps
    assert [event["ranks"] for event in recoveries(tmp_path)] == [[1]]
    assert is_same_run(tmp_path, two)


@pytest.mark.full
@pytest.mark.parametrize(("zero", "rank"), [(0, 1), (3, 0)])
@pytest.mark.parametrize("kind", ["step", "checkpoint"])
def test_any_rank_killed_at_any_phase_leaves_the_same_bits(kind: str, zero: int, rank: int, data: Path, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    mesh = ("--parallel.data=2", f"--parallel.zero={zero}", *(() if kind == "step" else ("--checkpoint.every_steps=1", SYNCHRONOUS)))
    run(tmp_path / "undisturbed", data, *mesh)
    if kind == "step":
        phases = ("load:0", "checkpoint:5", "train:6", "forward:7", "backward:8", "reduce:9", "optimizer:11", f"{'export' if zero else 'evaluate'}:{STEPS}")
        places = [*(f"before:{phase}" for phase in phases), "after:train:4", "after:checkpoint:10"]
    else:
        moments = [f"{when}:checkpoint_{phase}" for phase in PHASES for when in ("before", "after")]
        places = [f"{moment}:{step}" for step, moment in enumerate(moments, start=1)]
    faults = ",".join(f"rank{rank}:{place}" for place in places)
    run(tmp_path / "killed", data, *mesh, f"--fault={faults}", "--run.max_restarts=20")
    assert len(recoveries(tmp_path / "killed")) == len(places)
    assert is_same_run(tmp_path / "killed", tmp_path / "undisturbed")


LOST_TWICE = ("--parallel.data=3", SYNCHRONOUS, "--fault=rank2:before:train:6,rank2:before:forward:6")


@pytest.mark.full
def test_elastic_run_goes_on_with_fewer_ranks_and_says_so_on_the_last_line_in_the_report_and_in_the_registry(
    one: Path, data: Path, tmp_path: Path
) -> None:
    registry = ("--registry.path=registry", "--registry.name=m")
    said = run(tmp_path, data, *LOST_TWICE, "--run.elastic=true", *registry)
    assert "continuing from the newest checkpoint with 2 data-parallel ranks instead of 3 in 0.5 s (restart 2 of 20)" in said
    assert [event["mesh"]["data"] for event in recoveries(tmp_path)] == [3, 2]
    line = "run.elastic: from step 5 on it was trained with 2 of 3 data-parallel ranks: the results are not those of all ranks"
    assert said.splitlines()[-1] == line and line in (tmp_path / "run" / "report.html").read_text()
    versions = [json.loads(line) for line in command("models", "list", "--json", "--registry", "registry", folder=tmp_path).splitlines()]
    ranks = {version["step"]: (version["metrics"].get("parallel/data"), version["metrics"].get("parallel/data_asked")) for version in versions}
    assert ranks[0] == ranks[5] == (None, None) and ranks[10] == ranks[STEPS] == (2.0, 3.0)
    assert is_curve_of(tmp_path, one)


@pytest.mark.full
def test_run_that_is_not_elastic_restarts_with_all_ranks_and_has_the_same_bits(data: Path, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    run(tmp_path / "undisturbed", data, "--parallel.data=3", SYNCHRONOUS)
    said = run(tmp_path, data, *LOST_TWICE)
    assert "restarting all ranks from the newest checkpoint now (restart 1 of 20)" in said
    assert "restarting all ranks from the newest checkpoint in 0.5 s (restart 2 of 20)" in said
    assert [event["mesh"]["data"] for event in recoveries(tmp_path)] == [3, 3] and "run.elastic" not in said
    assert is_same_run(tmp_path, tmp_path / "undisturbed")


@pytest.mark.parametrize(("elastic", "shapes"), [("false", [3, 3, 3, 3]), ("true", [3, 3, 2, 1])])
def test_only_an_elastic_run_continues_with_fewer_ranks(
    elastic: str, shapes: list[int], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are lost here at the same step each time; the real ones are killed in the full tests."""
    write_ranks_recipe(tmp_path, data)
    recipe = load_config(tmp_path / "recipe.yaml", ["--parallel.data=3", f"--run.elastic={elastic}", "--run.max_restarts=3"])
    assert isinstance(recipe, PretrainRecipe)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    used, waits = [], []

    class Lost:
        def __init__(self, settings: GroupSettings, shape: MeshShape, **_: object) -> None:
            used.append(shape.data)

        def call(self, *_: object, **__: object) -> dict[str, Any]:
            raise RanksLost("the run", "train", "rank 0 died", [0], 6)

        def close(self) -> None:
            pass

    monkeypatch.setattr(supervise_module, "WorkerGroup", Lost)
    monkeypatch.setattr(supervise_module, "_wait", lambda seconds, requests: waits.append(seconds))
    with pytest.raises(RunError, match=r"rank 0 died; run\.max_restarts is 3"):
        supervise_module.supervise(recipe, tmp_path / "run", Callback())
    assert used == shapes and waits == [0.0, 0.5, 1.0]
    with Journal(tmp_path / "run" / "journal.sqlite", read_only=True) as journal:
        fewer = [(event.detail["asked"], event.detail["now"]) for event in journal.events() if event.kind == "fewer_ranks"]
    assert fewer == [(3, data) for before, data in itertools.pairwise(shapes) if data < before]


def test_dry_run_prints_the_mesh(data: Path, tmp_path: Path) -> None:
    said = run(tmp_path, data, "--parallel.data=4", "--parallel.ranks_per_node=2", "--dry-run")
    assert "mesh: 4 ranks = pipeline 1 x data 4 x context 1 x tensor 1" in said
    assert "  node 1: ranks 2, 3" in said and "  across nodes: data" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parallel.data=8"], "'parallel.data' is 8 and a step has 7 sequences"),
        (["--parallel.data=0"], "it must be at least 1"),
        (["--parallel.tensor=2"], "does not divide the model's num_key_value_heads 1"),
        (["--parallel.zero=1"], "there is one rank to shard over"),
        (["--parallel.data=2", "--trainer.offload=nvme", "--trainer.offload_parameters=nvme"], "set parallel.zero to 3, or trainer.offload_parameters"),
        (["--parallel.context=2", "--parallel.ranks_per_node=1"], "set parallel.across_nodes to true"),
        (["--parallel.data=2", "--inline"], "--inline is one process"),
    ],
)
def test_mesh_that_cannot_be_is_refused_in_one_line(arguments: list[str], said: str, data: Path, tmp_path: Path) -> None:
    write_ranks_recipe(tmp_path, data)
    assert said in refused("train", "recipe.yaml", *arguments, folder=tmp_path)
