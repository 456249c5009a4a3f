"""Pretraining: the curve is that of a plain loop over transformers' model, and a run that died continues with the same bits."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from data_runs import forget_end, rows
from pretrain_recipe import recipe_sections
from transformers import AutoModelForCausalLM

from tandem.config.recipe import load_config
from tandem.data.mixture import Mixture
from tandem.data.shard_files import ShardFiles
from tandem.data.stream import TokenStream
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.data.tokenizing.train_tokenizer import train_tokenizer
from tandem.jobs.run_files import record_config
from tandem.jobs.start import resume, train
from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.records.run_records import Records
from tandem.storage.files import open_storage
from tandem.trainer.checkpoint.format.manifest import Damaged, read_manifest
from tandem.types import RunError, UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from flips import check_changes_nothing, found_in, random_flips, try_flips

CHECKPOINT_FILES = ("COMMIT", "MANIFEST.json", "rank-00000.json", "rank-00000.safetensors")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets and held-out data from sources of the standard library, with a tokenizer trained on them."""
    folder = tmp_path_factory.mktemp("data")
    library = Path(json.__file__).parent.parent
    (folder / "text").mkdir()
    for package in ("json", "email"):
        for path in sorted((library / package).glob("*.py")):
            shutil.copyfile(path, folder / "text" / f"{package}-{path.name}")
    form = DocumentFormat(suffixes=(".py",))
    train_tokenizer(open_storage(str(folder / "text")), form, 300, folder / "tokenizer")
    for name, exclude, side in (("json", ("email-*",), "train"), ("email", ("json-*",), "train"), ("held-out", (), "held_out")):
        settings = TokenizeSettings(
            str(folder / "text"), str(folder / name), str(folder / "tokenizer"), DocumentFormat(suffixes=(".py",), exclude=exclude),
            side=side, held_out_share=0.2, workers=1,  # type: ignore[arg-type]
        )  # fmt: skip
        tokenize(settings)
    return folder


def recipe(data: Path, /, **changed: Any) -> dict[str, Any]:
    sections = recipe_sections(
        data,
        data={
            "train": [{"path": str(data / "json"), "weight": 0.25}, {"path": str(data / "email"), "weight": 0.75}],
            "held_out": str(data / "held-out"), "global_batch_size": 6,
        },
        trainer={"warmup_steps": 5, "schedule": "cosine", "weight_decay": 0.1, "micro_batch_tokens": 100},
        evaluation={"every_steps": 10, "sequences": 8}, checkpoint={"every_steps": 5, "keep": 2}, run={"max_steps": 12},
    )  # fmt: skip
    for name, values in changed.items():
        sections[name] = {**sections.get(name, {}), **values}
    return sections


def begin(folder: Path, sections: dict[str, Any], *arguments: str) -> "subprocess.Popen[str]":
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return command(folder, "train", "recipe.yaml", f"--run.directory={folder}", "--run.name=run", *arguments)


def command(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tandem.cli.main", *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, error = process.communicate(timeout=300)
    return process.returncode, out, error


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    status, out, error = finish(begin(folder, recipe(data)))
    assert status == 0, error
    assert "12 steps: held-out loss" in out
    return folder


def sequences_of(data: Path, count: int, seed: int) -> list[list[list[int]]]:
    """Returns the pieces of the first ``count`` sequences, from the datasets and the mixture alone."""
    streams = []
    for name in ("json", "email"):
        files = ShardFiles(open_storage(str(data / name)))
        streams.append(TokenStream(files.dataset, files.open, seed=seed, length=48))
    mixture = Mixture([0.25, 0.75], seed)
    places = [mixture.place(i) for i in range(count)]
    return [[list(piece.tokens) for piece in streams[stream].sequence(nth)] for stream, nth in places]


def plain_losses(folder: Path, data: Path, steps: int) -> list[float]:
    """A plain loop: transformers' model, torch's AdamW, each document separately, the mean over the step's predictions."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "models" / "initial", dtype=torch.float32, attn_implementation="eager")
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.999))
    found, batches = [], sequences_of(data, 6 * steps, seed=3)
    for step in range(steps):
        pieces = [piece for sequence in batches[6 * step : 6 * step + 6] for piece in sequence if len(piece) > 1]
        count = sum(len(piece) - 1 for piece in pieces)
        optimizer.zero_grad()
        total = 0.0
        for piece in pieces:
            tokens = torch.tensor([piece])
            logits = model(tokens).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = 3e-3 * (step + 1) / 5 if step < 5 else 3e-3 * 0.5 * (1 + torch.cos(torch.tensor((step - 5) / (steps - 5) * torch.pi)).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        found.append(total)
    return found


def test_loss_curve_is_that_of_a_plain_loop_over_transformers(undisturbed: Path, data: Path) -> None:
    losses = [row["train/loss"] for row in rows(undisturbed / "run")]
    expected = plain_losses(undisturbed, data, 12)
    assert losses[0] - losses[-1] > 0.5, "it learns, so equal curves mean something"
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5


@pytest.mark.full
def test_loss_curve_is_that_of_a_plain_loop_over_a_hundred_steps(data: Path, tmp_path: Path) -> None:
    status, _, error = finish(begin(tmp_path, recipe(data, run={"max_steps": 100})))
    assert status == 0, error
    losses = [row["train/loss"] for row in rows(tmp_path / "run")]
    expected = plain_losses(tmp_path, data, 100)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.full), 7])
def test_killed_run_goes_on_to_the_same_bits(step: int, undisturbed: Path, data: Path, tmp_path: Path) -> None:
    process = begin(tmp_path, recipe(data))
    path, ends = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") <= step:
        assert time.monotonic() < ends and process.poll() is None
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert len(rows(tmp_path / "run")) < 12
    status, _, error = finish(command(tmp_path, "resume", "run"))
    assert status == 0, error
    assert rows(tmp_path / "run") == rows(undisturbed / "run")
    for name in ("model/model.safetensors", *(f"checkpoints/step-{n}/{file}" for n in (10, 12) for file in CHECKPOINT_FILES)):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / "run" / name).read_bytes()


@pytest.mark.full
def test_run_saves_on_request_ends_on_sigterm_and_goes_on_from_its_upload_to_the_same_bits(data: Path, tmp_path: Path) -> None:
    # Enough steps for both signals to arrive before the last one on a busy machine.
    steps, target, whole = 40, tmp_path / "uploads", tmp_path / "undisturbed"
    whole.mkdir()
    assert finish(begin(whole, recipe(data, checkpoint={"every_steps": 100}, run={"max_steps": steps})))[0] == 0
    checkpoint, registry = {"every_steps": 100, "upload": str(target)}, {"path": str(tmp_path / "registry"), "name": "small"}
    sections = recipe(data, checkpoint=checkpoint, registry=registry, run={"max_steps": steps})
    process = begin(tmp_path, sections)
    path, ends = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120

    def wait_for(is_there: Callable[[], bool]) -> None:
        while not is_there():
            assert time.monotonic() < ends and process.poll() is None
            time.sleep(0.002)

    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") > 1)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: any(name.name not in ("step-0",) for name in (tmp_path / "run" / "checkpoints").glob("step-*")))
    process.send_signal(signal.SIGTERM)
    status, out, error = finish(process)
    assert (status, error) == (130, "tandem: interrupted\n") and re.search(r"which is saved: '\S*tandem resume", out)
    stopped = len(rows(tmp_path / "run"))
    assert stopped < steps and (tmp_path / "run" / "checkpoints" / f"step-{stopped}" / "COMMIT").is_file()
    assert any("timing_s/checkpoint_stall" in line for line in path.read_text().splitlines())
    shutil.rmtree(tmp_path / "run")
    status, _, error = finish(command(tmp_path, "resume", "run", "--from", str(target)))
    assert status == 0, error
    assert rows(tmp_path / "run") == rows(whole / "run")
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == (whole / "run/model/model.safetensors").read_bytes()
    status, listed, error = finish(command(tmp_path, "models", "list", "--registry", "registry", "--json"))
    assert status == 0, error
    versions = [json.loads(line) for line in listed.splitlines()]
    assert [v["version"] for v in versions] == list(range(1, len(versions) + 1)) and {stopped, steps} < {v["step"] for v in versions}
    assert versions[-1]["path"] == str(tmp_path / "run" / "checkpoints" / f"step-{steps}") and len(versions[-1]["data"]) == 3
    assert versions[-1]["metrics"]["train/loss"] == rows(whole / "run")[-1]["train/loss"] and "held_out/loss" in versions[-1]["metrics"]
    status, _, error = finish(command(tmp_path, "resume", "other", "--from", str(tmp_path / "run" / "checkpoints")))
    assert status == 2 and "holds no run" in error and len(error.splitlines()) == 1
    sections = recipe(data, checkpoint={"upload": str(target)})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    with pytest.raises(UserError, match="which holds a run's checkpoints"):
        train(load_config(tmp_path / "recipe.yaml", [f"--run.directory={tmp_path}", "--run.name=second"]))


@pytest.mark.full
def test_interrupted_run_says_so_and_a_finished_one_is_resumed_to_the_same(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    process = begin(tmp_path, recipe(data, run={"max_steps": 100_000}))
    path, ends = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") <= 2:
        assert time.monotonic() < ends and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    status, out, error = finish(process)
    assert (status, error) == (130, "tandem: interrupted\n") and "Traceback" not in out
    assert "a second signal stops at once" in out and re.search(r"which is saved: '\S*tandem resume", out)
    assert (tmp_path / "run" / "checkpoints" / f"step-{len(rows(path.parent))}" / "COMMIT").is_file()
    shutil.copytree(undisturbed / "run", tmp_path / "done")
    before = {path: path.read_bytes() for path in files_of(tmp_path / "done")}
    status, out, error = finish(command(tmp_path, "resume", "done"))
    assert status == 0, error
    assert "'done' has finished: it has taken all of its 12 steps; nothing is repeated" in out and "12 steps: held-out loss" in out
    assert "start a new run with --model.path=done/model --model.create=null: trainer.schedule 'cosine' ended with its last step" in out
    assert {path: path.read_bytes() for path in files_of(tmp_path / "done")} == before
    forget_end(tmp_path / "done")
    status, out, error = finish(command(tmp_path, "resume", "done"))
    assert status == 0, error
    assert rows(tmp_path / "done") == rows(undisturbed / "run") and "continuing after step 12" in out
    with pytest.raises(UserError, match=r"it is where trainer.schedule 'cosine' ends, and step 6, already taken, would have had another learning rate"):
        resume(tmp_path / "done", overrides=["--run.max_steps=20"])
    assert load_config(tmp_path / "done" / "config.yaml").run.max_steps == 12, "a refused resume changes nothing"


def files_of(run: Path) -> list[Path]:
    """Returns every file that a resume may not touch."""
    return [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "lock" and path.suffix != ".log" and "journal" not in path.name]


@pytest.mark.full
def test_finished_run_with_more_steps_is_the_run_that_had_them_from_the_start(data: Path, tmp_path: Path) -> None:
    sections = recipe(data, trainer={"schedule": "constant"}, evaluation={"every_steps": 4})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    longer, run = tmp_path / "longer", tmp_path / "run"
    for folder, steps in ((longer, 8), (run, 4)):
        train(load_config(tmp_path / "recipe.yaml", [f"--run.directory={tmp_path}", f"--run.name={folder.name}", f"--run.max_steps={steps}"]))
    assert (run / "model/model.safetensors").read_bytes() != (longer / "model/model.safetensors").read_bytes()
    result = resume(run, overrides=["--run.max_steps=8"])
    assert result.steps == 8 and rows(run) == rows(longer)
    assert (run / "model/model.safetensors").read_bytes() == (longer / "model/model.safetensors").read_bytes()
    before = {path: path.read_bytes() for path in files_of(run)}
    assert resume(run) == result
    assert {path: path.read_bytes() for path in files_of(run)} == before


def test_report_shows_the_loss_and_the_trained_model_generates(undisturbed: Path) -> None:
    page = (undisturbed / "run" / "report.html").read_text()
    assert '"title":"Loss"' in page and "held-out loss" in page
    status, _, error = finish(command(undisturbed, "generate", "run/model", "--prompt", "import ", "--max-tokens", "4", "--temperature", "0"))
    assert status == 0, error


def test_held_out_loss_is_taken_at_the_start_every_so_many_steps_and_at_the_end(undisturbed: Path) -> None:
    with Journal(undisturbed / "run" / "journal.sqlite", read_only=True) as journal:
        losses = {step: result["loss"] for step, kind, result in journal.evaluations() if kind == "held_out"}
    assert list(losses) == [0, 10, 12] and losses[0] > losses[10] > losses[12]


def test_row_says_how_long_compute_has_waited_for_data_in_its_step(tmp_path: Path) -> None:
    with contextlib.closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
        records = Records(None, metrics, Callback())
        for step, waited_s in enumerate((0.25, 1.5)):
            records.add_time("data_wait", waited_s)
            records.row({"step": step}, 100)
        assert [row["timing_s/data_wait"] for row in metrics.rows()] == [0.25, 1.5]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data": {"train": []}}, "'data.train' is empty"),
        ({"data": {"train": [{"path": "nix"}]}}, "'nix' is not a folder"),
        ({"data": {"train": [{"path": "{data}/json", "weight": 0}]}}, "it must be above 0"),
        ({"data": {"train": [{"path": "{data}/text"}]}}, "has no dataset.json"),
        ({"data": {"sequence_length": 65}}, "more than the model's context of 64"),
        ({"data": {"sequnce_length": 5}}, "did you mean 'data.sequence_length'?"),
        ({"data": {"train": [{"path": "s3://x/y"}]}}, "in 'data.cache'"),
        ({"checkpoint": {"every_minutes": -1}}, "'checkpoint.every_minutes' is -1"),
        ({"checkpoint": {"upload": "nosuch://x"}}, "'nosuch://x' cannot be read"),
        ({"model": {"create": {"tokenizer": "{other}"}}}, "was tokenized with another tokenizer"),
        ({"model": {"create": {"tokenizer": "nix"}}}, "'nix' is not a folder here"),
        ({"machine": {"memory_gib": 1e-6}}, "so take a smaller model"),
        ({"data": {"global_batch_size": 10**10}}, "data.global_batch_size to "),
    ],
)
def test_recipe_that_cannot_work_is_refused_in_one_line_before_any_work(changed: dict[str, Any], said: str, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train_tokenizer(open_storage(str(data / "text")), DocumentFormat(suffixes=(".py",), exclude=("json-*",)), 300, other)
    text = json.dumps(changed).replace("{data}", str(data)).replace("{other}", str(other))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(data, **json.loads(text))))
    with pytest.raises(UserError) as caught:
        train(load_config(tmp_path / "recipe.yaml", [f"--run.directory={tmp_path}", "--run.name=run"]))
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("damage", "said", "is_begun"),
    [
        (lambda shard: shard.unlink(), "has no shard-000000.tar", False),
        (lambda shard: os.truncate(shard, 5000), "shard-000000.tar in '{tokens}' has 5000 bytes and was written with", False),
        (lambda shard: shard.with_suffix(".lengths").unlink(), "has no shard-000000.lengths", False),
        (lambda shard: flip(shard), "shard-000000.tar of '{tokens}' does not have the digest it was written with", True),
    ],
    ids=["missing", "truncated", "no lengths", "flipped byte"],
)
def test_damaged_shard_is_refused_by_name_and_nothing_is_learned_from_it(
    damage: Callable[[Path], None], said: str, is_begun: bool, data: Path, tmp_path: Path
) -> None:
    tokens = shutil.copytree(data / "json", tmp_path / "tokens")
    damage(tokens / "shard-000000.tar")
    sections = recipe(data, data={"train": [{"path": str(tokens)}]})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    with pytest.raises((UserError, RunError)) as caught:
        train(load_config(tmp_path / "recipe.yaml", [f"--run.directory={tmp_path}", "--run.name=run"]))
    assert said.replace("{tokens}", str(tokens)) in str(caught.value) and "tandem tokenize" in str(caught.value)
    assert (tmp_path / "run").exists() == is_begun and not (is_begun and (tmp_path / "run" / "metrics.jsonl").read_bytes())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.full
def test_resume_says_what_is_damaged_or_gone_and_never_begins_again_over_a_run(undisturbed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(undisturbed / "run", tmp_path / "run")
    newest, before = sorted((run / "checkpoints").glob("step-*"), key=lambda path: -int(path.name.split("-")[1]))
    flip(newest / "rank-00000.safetensors")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[3:]))
    (run / "journal.sqlite").write_bytes(b"")
    status, out, error = finish(command(tmp_path, "resume", "run"))
    assert status == 0, error
    step = int(before.name.split("-")[1])
    assert f"{newest.name}' is skipped" in out and f"metrics.jsonl lacks 3 of the {step} rows" in out
    assert f"the journal has no record of the {step} steps" in out
    for folder in (run / "checkpoints").glob("step-*"):
        flip(folder / "rank-00000.safetensors")
    forget_end(run)
    kept = (run / "metrics.jsonl").read_bytes()
    status, _, error = finish(command(tmp_path, "resume", "run"))
    assert status == 1 and "no checkpoint of this run is whole" in error and len(error.splitlines()) == 1
    assert (run / "metrics.jsonl").read_bytes() == kept


def test_flipped_bits_of_a_run_on_data_are_noticed_or_change_nothing_that_is_read(undisturbed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(undisturbed / "run", tmp_path / "run")
    assert found_in(run) == []
    outcome = try_flips(run, random_flips(run, 25, seed=3))
    check_changes_nothing(run, outcome.unnoticed)
    assert outcome.noticed.total() >= 20


@pytest.mark.full
def test_damage_of_a_start_model_that_a_checkpoint_has_replaced_is_told_and_of_its_config_refused(undisturbed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(undisturbed / "run", tmp_path / "run")
    weights = run / "models" / "initial" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    forget_end(run)
    status, out, error = finish(command(tmp_path, "resume", "run"))
    assert status == 0, error
    assert "model.safetensors' does not have the digest it was written with; the run continues from its checkpoint" in out
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        assert any("model.safetensors" in event.detail["reason"] for event in journal.events() if event.kind == "damage")
    (run / "models" / "initial" / "config.json").write_text((run / "models" / "initial" / "config.json").read_text() + " ")
    forget_end(run)
    status, out, error = finish(command(tmp_path, "resume", "run"))
    assert status == 1 and "config.json' has" in error and "the model that the run starts from" in error and len(error.splitlines()) == 1


def test_run_is_not_resumed_on_other_data(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(data / "json"), str(data / "held-out")))
    status, _, error = finish(command(tmp_path, "resume", "run"))
    assert status == 1 and "config.yaml' has data.train" in error and "put the old value back" in error and len(error.splitlines()) == 1
    with Journal(tmp_path / "run" / "journal.sqlite") as journal:
        record_config(tmp_path / "run", journal)
    forget_end(tmp_path / "run")
    status, _, error = finish(command(tmp_path, "resume", "run"))
    assert status == 2 and "has changed since this run started" in error and len(error.splitlines()) == 1


def test_run_and_checkpoint_of_the_version_before_are_refused_with_what_to_do(tmp_path: Path) -> None:
    run = tmp_path / "old"
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    (run / "config.yaml").write_text("model: {path: x}\ntask: {name: sort}\nwarm_up: {steps: 3}\n")
    with pytest.raises(UserError, match=r"was written by another version of Tandem .unknown key 'warm_up'.*or start a new run$"):
        resume(run)
    (run / "model").mkdir()
    for overrides in ((), ("--parallel.data=2",)):
        with pytest.raises(UserError, match=r"was written by another version of Tandem .unknown key 'warm_up'.*--model.path="):
            resume(run, overrides=overrides)
    (run / "config.yaml").write_text("model: {path: x}\ntask: {name: sort}\nresidents: {plan: last}\n")
    with pytest.raises(UserError, match=r"another version of Tandem .'residents.plan' is 'last'; it must be one of"):
        resume(run)
    (run / "config.yaml").write_text("model: {path: x}\nalgorithm: {name: pretrain}\nmachine: {call_deadline_s: 1800.0}\n")
    with pytest.raises(UserError, match=r"was written by another version of Tandem .'machine.call_deadline_s' cannot be set"):
        resume(run)
    (run / "checkpoints" / "step-3" / "trainer.json").write_text("{}")
    with pytest.raises(Damaged, match="older version of Tandem"):
        read_manifest(run / "checkpoints" / "step-3")
    for folder, recipe in (("pod", "model: {path: x}\ntask: {name: sort}\n"), ("data", "algorithm: {name: sft}\nmodel: {path: x}\ntask: {name: sort}\n")):
        for checkpoint in ("checkpoints/step-3", "sft/checkpoints/step-3"):
            run = tmp_path / f"{folder} {checkpoint.count('/')}"
            (run / checkpoint).mkdir(parents=True)
            (run / checkpoint / "trainer.json").write_text("{}")
            (run / "config.yaml").write_text(recipe)
            before = sorted(run.rglob("*"))
            message = r"^'.*' was written by an older version of Tandem .its checkpoint 'step-3'.*resume it with that version, or start a new run$"
            with pytest.raises(UserError, match=message):
                resume(run)
            assert sorted(run.rglob("*")) == before
