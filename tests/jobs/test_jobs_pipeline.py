"""``tandem train`` on the stages of a pipeline: the results of one process, a traced step in the published order, and its picture."""

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch
from data_runs import refused
from package_data import make_datasets
from pretrain_recipe import write_recipe
from safetensors.torch import load_file
from sharded import tensors_of

from tandem.runtime.records.tracing import Span, read_trace

STEPS = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "train", "held-out")


def recipe_in(folder: Path, data: Path) -> str:
    recipe = write_recipe(
        folder, data, create={"num_hidden_layers": 5, "num_key_value_heads": 2},
        data={"train": [{"path": str(data / "train")}], "held_out": str(data / "held-out"), "global_batch_size": 8},
        trainer={"weight_decay": 0.1, "micro_batch_tokens": 100}, evaluation={"every_steps": STEPS, "sequences": 4},
        checkpoint={"every_steps": 2, "keep": 9}, run={"max_steps": STEPS, "trace_steps": [1]},
    )  # fmt: skip
    return str(recipe)


def run(folder: Path, data: Path, *arguments: str) -> tuple[int, str, str]:
    return command("train", recipe_in(folder, data), *arguments)


def command(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "tandem.cli.main", *arguments], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    status, _, error = run(folder, data)
    assert status == 0, error
    return folder


@pytest.fixture(scope="module")
def piped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("piped")
    status, _, error = run(folder, data, "--parallel.pipeline=2")
    assert status == 0, error
    return folder


def is_same_run(found: Path, wanted: Path) -> None:
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-5)
    saved = [folder / "run" / "checkpoints" / "step-4" for folder in (found, wanted)]
    assert [json.loads((folder / "MANIFEST.json").read_text())["state"]["updates"] for folder in saved] == [4, 4]
    ours, theirs = map(tensors_of, saved)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], value, rtol=1e-3, atol=3e-4) for key, value in theirs.items())
    ours, theirs = load_file(found / "run" / "model" / "model.safetensors"), load_file(wanted / "run" / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], value, atol=3e-4) for key, value in theirs.items())


def test_the_run_of_two_stages_is_that_of_one_process(piped: Path, alone: Path) -> None:
    is_same_run(piped, alone)


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("--parallel.pipeline=2", "--parallel.schedule=interleaved", "--parallel.virtual_stages=2"),
        ("--parallel.pipeline=2", "--parallel.schedule=gpipe", "--parallel.pipeline_layers=[3, 2]"),
        ("--parallel.pipeline=4",),
        ("--parallel.pipeline=2", "--parallel.data=2"),
        ("--parallel.pipeline=2", "--parallel.data=2", "--parallel.zero=1"),
        ("--parallel.pipeline=2", "--parallel.data=2", "--parallel.zero=3", "--parallel.schedule=gpipe", "--trainer.recompute=full"),
        (
            "--parallel.pipeline=2", "--parallel.data=2", "--parallel.zero=3", "--parallel.schedule=interleaved", "--parallel.virtual_stages=2",
            "--trainer.offload=nvme", "--trainer.offload_parameters=nvme",
        ),
        ("--parallel.pipeline=2", "--parallel.tensor=2"),
        ("--parallel.pipeline=2", "--parallel.tensor=2", "--parallel.data=2"),
    ],
    ids=" ".join,
)
def test_every_pipeline_runs_the_run_of_one_process(arguments: tuple[str, ...], data: Path, alone: Path, tmp_path: Path) -> None:
    status, _, error = run(tmp_path, data, *arguments)
    assert status == 0, error
    is_same_run(tmp_path, alone)


@pytest.mark.full
def test_a_pipeline_goes_on_from_its_checkpoint_with_the_same_numbers(piped: Path, data: Path, tmp_path: Path) -> None:
    status, _, error = run(tmp_path, data, "--parallel.pipeline=2", "--run.max_steps=2")
    assert status == 0, error
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 2", f"max_steps: {STEPS}"))
    status, _, error = command("resume", str(tmp_path / "run"))
    assert status == 0, error
    assert losses(tmp_path) == losses(piped)


def names_of(spans: list[Span], rank: int) -> list[str]:
    """Returns the operations of a rank without transfers and waits for collectives; consecutive equal ones count once."""
    found = [span.name for span in spans if span.rank == rank and not span.category and not span.name.startswith(("send", "receive"))]
    return [name for name, _ in groupby(found)]


def test_a_traced_step_shows_the_published_sequence(piped: Path) -> None:
    spans = read_trace(piped / "run" / "traces", 1)
    count = 1 + max(span.arguments["micro_batch"] for span in spans if span.name == "forward")
    assert count == 4
    pair = ["forward", "backward"]
    # 1F1B on two ranks: the first one is one forward pass ahead.
    for rank, turns in ((0, count - 1), (1, count)):
        assert names_of(spans, rank) == ["shard the batch", *pair * turns, "reduce", "clip", "optimizer", "checkpoint write"]
    passes = [[(s.name[0], s.arguments["micro_batch"]) for s in spans if s.rank == rank and s.name in pair] for rank in (0, 1)]
    assert passes[0] == [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("f", 3), ("b", 2), ("b", 3)]
    assert passes[1] == [("f", 0), ("b", 0), ("f", 1), ("b", 1), ("f", 2), ("b", 2), ("f", 3), ("b", 3)]
    ends = {(s.name, s.rank, s.arguments.get("micro_batch")): s for s in spans}
    for number in range(count):
        assert ends["forward", 0, number].end_s <= ends["send_activation", 0, number].start_s <= ends["forward", 1, number].start_s
        assert ends["backward", 1, number].end_s <= ends["send_gradient", 1, number].start_s <= ends["backward", 0, number].start_s


def test_the_trace_of_one_process_has_the_same_sequence_without_transfers(alone: Path) -> None:
    spans = read_trace(alone / "run" / "traces", 1)
    assert names_of(spans, 0) == ["shard the batch", *["forward", "backward"] * 4, "clip", "optimizer", "checkpoint write"]
    assert {span.rank for span in spans} == {0}


def test_the_report_shows_the_traced_step_and_its_bubble_measured_beside_predicted(piped: Path, alone: Path) -> None:
    page = (piped / "run" / "report.html").read_text()
    assert '"traced":[1]' in page and "Bubble of 2 ranks, 4 micro-batches" in page and "predicted 20.0% for equal stages" in page
    assert "Bubble of" not in (alone / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parallel.pipeline=6"], "the model has 5 layers, and a stage needs one"),
        (["--parallel.pipeline=3", "--parallel.schedule=interleaved", "--parallel.virtual_stages=2"], "the model has 5 layers, and a stage needs one"),
        (["--parallel.pipeline=2", "--parallel.pipeline_layers=[3, 3]"], "do not split the model's 5 layers"),
        (["--parallel.pipeline=2", "--parallel.pipeline_layers=[5]"], "it must name 1 layer or more for each of 2 stages"),
        (["--parallel.pipeline=2", "--parallel.virtual_stages=2"], "'interleaved' needs 2 or more"),
        (["--parallel.schedule=interleaved", "--parallel.virtual_stages=2"], "needs 2 ranks or more"),
        (["--parallel.virtual_stages=0"], "must be at least 1"),
        (["--run.trace_steps=[-1]"], "counted from 0"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_in_one_line_before_any_work(arguments: list[str], said: str, data: Path, tmp_path: Path) -> None:
    assert said in refused("train", recipe_in(tmp_path, data), *arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_dry_run_says_which_stages_there_will_be_and_the_bubble(data: Path, tmp_path: Path) -> None:
    status, out, error = run(tmp_path, data, "--parallel.pipeline=2", "--dry-run")
    assert status == 0, error
    assert "about 4 micro-batches a step: 20% of the ranks' time is bubble" in " ".join(out.split())
    assert "predicted time: " in out
