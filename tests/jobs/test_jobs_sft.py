"""Supervised fine-tuning: the curve is that of a plain loop over transformers' model with labels of -100 on prompts, the model learns the
answers, and a run that died or is divided between ranks has the same results."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import write_byte_model
from data_runs import forget_end, rows, train_until_killed, write_sections
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem import LLM, SamplingParams
from tandem.config.recipe import Recipe, load_config
from tandem.data.example_stream import ExampleStream
from tandem.data.mixture import Mixture
from tandem.data.shards import ShardReader
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, read_dataset, tokenize
from tandem.jobs import run_files
from tandem.jobs.replay.replay_step import replay
from tandem.jobs.run_files import record_config
from tandem.jobs.sft import sft_recipe
from tandem.jobs.start import dry_run, resume, train
from tandem.runtime.callback import Callback
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.records.journal import Journal
from tandem.storage.files import open_storage
from tandem.types import RunError, UserError

STEPS, PER_STEP, SEED = 60, 6, 3
IGNORED = -100
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content + '<eos>' }}{% endgeneration %}"
    "{% else %}<u>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
PAIRS = [{"prompt": f"{i}+{i}=", "completion": f"{i + i}"} for i in range(1, 9)]
CHATS = [
    {"messages": [{"role": role, "content": content} for role, content in zip(("user", "assistant") * 2, turns, strict=False)]}
    for turns in (("hi", "hello"), ("who?", "me"), ("a b c", "d e f", "and?", "g"), ("what is a very long question?", "no"))
]
HELD_OUT = [{"prompt": "9+9=", "completion": "18"}, {"prompt": "7+1=", "completion": "8"}, {"prompt": "hi", "completion": "you"}]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a chat template, two datasets of examples, a held-out one, and one of plain text."""
    folder = tmp_path_factory.mktemp("data")
    write_byte_model(folder / "model", TEMPLATE)
    form = DocumentFormat(suffixes=(), examples=True)
    for name, examples in (("pairs", PAIRS), ("chats", CHATS), ("held-out", HELD_OUT)):
        (folder / "source" / name).mkdir(parents=True)
        (folder / "source" / name / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
        tokenize(TokenizeSettings(str(folder / "source" / name), str(folder / name), str(folder / "model"), form, workers=1))
    (folder / "source" / "text").mkdir()
    (folder / "source" / "text" / "a.txt").write_text("plain text")
    tokenize(TokenizeSettings(str(folder / "source" / "text"), str(folder / "text"), str(folder / "model"), workers=1))
    return folder


def write_recipe(folder: Path, data: Path, /, **changed: Any) -> Path:
    sections: dict[str, Any] = {
        "algorithm": {"name": "sft"},
        "model": {"path": str(data / "model")},
        "data": {
            "train": [{"path": str(data / "pairs"), "weight": 0.7}, {"path": str(data / "chats"), "weight": 0.3}],
            "held_out": str(data / "held-out"), "sequence_length": 48, "global_batch_size": PER_STEP,
        },
        "trainer": {"learning_rate": 1.0e-2, "warmup_steps": 5, "weight_decay": 0.1, "micro_batch_tokens": 40},
        "evaluation": {"every_steps": 20, "sequences": 32},
        "checkpoint": {"every_steps": 10, "keep": 2},
        "run": {"max_steps": STEPS, "seed": SEED, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
    }  # fmt: skip
    return write_sections(folder, sections, changed)


class Heard(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    before = torch.get_num_threads()
    heard = Heard()
    found = train(load_config(write_recipe(folder, data)), callbacks=[heard])
    torch.set_num_threads(before)
    assert "60 steps: held-out loss" in found.summary() and "--prompt" in found.summary()
    (folder / "heard").write_text("\n".join(heard.messages))
    return folder


def labelled(data: Path, row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens of an example and its labels, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    if "messages" in row:
        found = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
    else:
        asked, answer = tokenizer(row["prompt"])["input_ids"], [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        ids, mask = asked + answer, [0] * len(asked) + [1] * len(answer)
    return torch.tensor([ids]), torch.tensor([token if learned else IGNORED for token, learned in zip(ids, mask, strict=True)])


def batches(data: Path, steps: int) -> list[list[dict[str, Any]]]:
    """Returns the examples of each step, read from their lines, in the order of datasets and mixture."""
    streams = []
    for name in ("pairs", "chats"):
        dataset = read_dataset(open_storage(str(data / name)))
        (shard,) = dataset.shards
        reader = ShardReader(data / name / f"{shard.name}.tar", data / name / f"{shard.name}.lengths", shard, dataset.dtype)
        streams.append(ExampleStream([reader.lengths], lambda _, reader=reader: reader, seed=SEED, longest=48))  # type: ignore[misc]
    mixture = Mixture([0.7, 0.3], SEED)
    taken = [mixture.place(i) for i in range(steps * PER_STEP)]
    chosen = [(PAIRS, CHATS)[stream][streams[stream].sequence(nth)[0].document] for stream, nth in taken]
    return [chosen[i : i + PER_STEP] for i in range(0, len(chosen), PER_STEP)]


def summed(model: Any, data: Path, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Returns the cross entropy of an example's learned tokens, and their number."""
    tokens, labels = labelled(data, row)
    loss = torch.nn.functional.cross_entropy(model(tokens).logits[0, :-1], labels[1:], ignore_index=IGNORED, reduction="sum")
    return loss, int((labels[1:] != IGNORED).sum())


def test_loss_curve_is_that_of_a_plain_loop_over_transformers(undisturbed: Path, data: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float32, attn_implementation="eager")
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == decayed], "weight_decay": 0.1 * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    found = rows(undisturbed / "run")
    for step, batch in enumerate(batches(data, 12)):
        optimizer.zero_grad()
        parts = [summed(model, data, row) for row in batch]
        count = sum(tokens for _, tokens in parts)
        loss = torch.stack([part for part, _ in parts]).sum() / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 5)
        optimizer.step()
        assert abs(found[step]["train/loss"] - loss.item()) < 1e-5
        assert found[step]["train/learned_tokens"] == count and found[step]["train/examples"] == (step + 1) * PER_STEP
        assert found[step]["train/step_tokens"] == sum(labelled(data, row)[0].numel() for row in batch)
    assert found[0]["train/loss"] - found[11]["train/loss"] > 1, "it learns, so equal curves mean something"


def test_held_out_loss_is_the_mean_over_each_held_out_example_once(undisturbed: Path, data: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        parts = [summed(model, data, row) for row in HELD_OUT]
    loss, count = sum(part.item() for part, _ in parts) / sum(tokens for _, tokens in parts), sum(tokens for _, tokens in parts)
    said = [line for line in (undisturbed / "heard").read_text().splitlines() if "held-out loss" in line]
    assert [line.split(":")[0] for line in said] == ["step 0", "step 20", "step 40", "step 60"]
    assert f"held-out loss {loss:.4f}, " in said[0] and said[0].endswith(f"on {count} tokens")


def test_model_answers_what_it_was_taught(undisturbed: Path, data: Path) -> None:
    llm = LLM(str(undisturbed / "run" / "model"))
    greedy = SamplingParams(temperature=0, max_tokens=16)
    answers = [output.outputs[0].text for output in llm.generate([row["prompt"] for row in PAIRS], greedy)]
    assert answers == [row["completion"] for row in PAIRS]
    assert llm.chat(CHATS[2]["messages"][:3], greedy)[0].outputs[0].text == "g"
    untaught = LLM(str(data / "model")).generate([PAIRS[0]["prompt"]], greedy)
    assert untaught[0].outputs[0].text != PAIRS[0]["completion"]


@pytest.mark.full
def test_two_data_parallel_ranks_have_the_curve_of_one_process(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    # One held-out example: the second rank has none.
    overrides = ["--parallel.data=2", "--parallel.zero=1", "--run.max_steps=10", "--evaluation.sequences=1"]
    train(load_config(write_recipe(tmp_path, data), overrides))
    names = ("train/loss", "actor/grad_norm", "train/learned_tokens", "train/step_tokens")
    found = rows(tmp_path / "run")
    assert len(found) == 10
    assert all(math.isclose(a[name], b[name], rel_tol=2e-5) for a, b in zip(found, rows(undisturbed / "run"), strict=False) for name in names)
    with Journal(tmp_path / "run" / "journal.sqlite", read_only=True) as journal:
        measured = [result for step, _, result in journal.evaluations() if step == 0]
    model = AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        parts = [summed(model, data, row) for row in HELD_OUT]
    assert [result["tokens"] for result in measured] in [[tokens] for _, tokens in parts]
    assert any(abs(measured[0]["loss"] - loss.item() / tokens) < 1e-5 for loss, tokens in parts)


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", ["--parallel.pipeline=2 --parallel.data=2", "--parallel.tensor=2 --parallel.context=2", "--parallel.data=3 --parallel.zero=3"]
)
def test_every_mesh_has_the_curve_of_one_process_though_a_rank_is_killed(mesh: str, undisturbed: Path, data: Path, tmp_path: Path) -> None:
    recipe = load_config(write_recipe(tmp_path, data), [*mesh.split(), "--run.max_steps=15"])
    train(recipe, faults=FaultPlan.parse("rank1:before:forward:12"))
    with Journal(tmp_path / "run" / "journal.sqlite", read_only=True) as journal:
        assert [event.detail["ranks"] for event in journal.events() if event.kind == "recovery"] == [[1]]
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(15))
    assert all(math.isclose(a["train/loss"], b["train/loss"], rel_tol=2e-5) for a, b in zip(found, rows(undisturbed / "run"), strict=False))


def is_same_run(folder: Path, other: Path) -> bool:
    names = ("model/model.safetensors", f"checkpoints/step-{STEPS}/rank-00000.safetensors")
    return rows(folder / "run") == rows(other / "run") and all((folder / "run" / name).read_bytes() == (other / "run" / name).read_bytes() for name in names)


class Crash(BaseException):
    """No ``Exception``, so that the run ends at once: after one of a callback it would be saved."""


class Crashing(Callback):
    def row(self, row: Any) -> None:
        if row["step"] == 13:
            raise Crash


class Failing(Callback):
    def row(self, row: Any) -> None:
        if row["step"] == 7:
            raise OSError("this callback fails")


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_step_of_a_callback_that_raises_is_saved(undisturbed: Path, data: Path, tmp_path: Path, ranks: int) -> None:
    before = torch.get_num_threads()
    with pytest.raises(RunError, match=r"Failing\.row raised OSError: this callback fails; the run is saved, and .*tandem resume"):
        train(load_config(write_recipe(tmp_path, data), [f"parallel.data={ranks}"]), callbacks=[Failing()], progress=False)
    torch.set_num_threads(before)
    saved = len(rows(tmp_path / "run"))
    # A second process may have begun the next step before it is told.
    assert 8 <= saved < STEPS and (tmp_path / "run" / "checkpoints" / f"step-{saved}" / "COMMIT").is_file()
    resume(tmp_path / "run", progress=False)
    torch.set_num_threads(before)
    if ranks == 1:
        assert is_same_run(tmp_path, undisturbed)


def test_run_that_failed_goes_on_to_the_same_bits(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(Crash):
        train(load_config(write_recipe(tmp_path, data)), callbacks=[Crashing()])
    assert len(rows(tmp_path / "run")) == 14 and not (tmp_path / "run" / "model").exists()
    resume(tmp_path / "run")
    torch.set_num_threads(before)
    assert is_same_run(tmp_path, undisturbed)


@pytest.mark.full
def test_killed_run_goes_on_to_the_same_bits(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data)
    train_until_killed(recipe, tmp_path / "run", 13, limit_s=120)
    assert len(rows(tmp_path / "run")) < STEPS
    before = torch.get_num_threads()
    resume(tmp_path / "run")
    torch.set_num_threads(before)
    assert is_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data": {"train": [{"path": "{data}/text"}]}}, "does not say which tokens are learned; make it with 'tandem tokenize --examples'"),
        ({"data": {"held_out": "{data}/text"}}, "does not say which tokens are learned"),
        ({"data": {"sequence_length": 20}}, "examples of more than data.sequence_length (20) tokens (2 of 4), the longest 34 (document 3 of shard-000000)"),
        ({"data": {"sequence_length": 2, "too_long": "leave_out"}}, "has no example of at most 2 tokens"),
        ({"data": {"too_long": "cut"}}, "'data.too_long' is 'cut'; it must be one of refuse, leave_out"),
        ({"algorithm": {"name": "pretrain"}, "data": {"too_long": "leave_out"}}, "'data.too_long' is 'leave_out', which belongs to algorithm.name sft"),
    ],
)
def test_recipe_that_cannot_work_is_refused_in_one_line_before_any_work(changed: dict[str, Any], said: str, data: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data, **json.loads(json.dumps(changed).replace("{data}", str(data))))
    with pytest.raises(UserError) as caught:
        train(load_config(recipe))
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_stage_of_a_pod_that_sleeps_in_a_folder_of_its_own_has_a_recipe_that_can_be_read(offload: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "fast-disk")
    recipe = load_config("recipes/sort.yaml", ["residents.plan=offload", f"trainer.offload_folder={folder}", f"trainer.offload={offload}"])
    assert isinstance(recipe, Recipe)
    stage = sft_recipe(recipe, tmp_path, tmp_path / "model", 128)
    run_files.write_recipe(stage, tmp_path)
    assert load_config(tmp_path / "config.yaml") == stage
    assert stage.trainer.offload_folder == ("" if offload == "none" else folder)


@pytest.mark.usefixtures("unmeasured_speed")
def test_examples_that_are_too_long_are_counted_and_left_out(data: Path, tmp_path: Path) -> None:
    recipe = load_config(write_recipe(tmp_path, data, data={"sequence_length": 20, "too_long": "leave_out"}, run={"max_steps": 4}))
    left_out = f"left out of '{data / 'chats'}': 2 of 4 examples"
    assert f"{left_out}, which have more than 20 tokens" in dry_run(recipe, "recipe.yaml") and "10 examples in 2 datasets" in dry_run(recipe, "")
    heard, before = Heard(), torch.get_num_threads()
    train(recipe, callbacks=[heard])
    torch.set_num_threads(before)
    assert f"{left_out}, which are too long" in heard.messages


def test_pretraining_learns_every_token_of_examples_and_says_so(data: Path, tmp_path: Path) -> None:
    recipe = load_config(write_recipe(tmp_path, data, algorithm={"name": "pretrain"}, run={"max_steps": 1}))
    heard, before = Heard(), torch.get_num_threads()
    train(recipe, callbacks=[heard])
    torch.set_num_threads(before)
    assert any("has a loss mask, which pretraining ignores" in message for message in heard.messages)
    (row,) = rows(tmp_path / "run")
    assert row["train/tokens"] == PER_STEP * 48 and "train/examples" not in row


def test_run_is_not_resumed_on_other_examples(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(data / "pairs"), str(data / "held-out")))
    with Journal(tmp_path / "run" / "journal.sqlite") as journal:
        record_config(tmp_path / "run", journal)
    forget_end(tmp_path / "run")
    with pytest.raises(UserError, match="has changed since this run started"):
        resume(tmp_path / "run")


def test_replayed_step_of_examples_is_equal_bit_for_bit(data: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    train(load_config(write_recipe(tmp_path, data, run={"max_steps": 4, "name": "run", "directory": str(tmp_path)}, checkpoint={"every_steps": 2})))
    [found] = replay(tmp_path / "run", 3)
    row = rows(tmp_path / "run")[3]
    assert {"train/learned_tokens", "train/step_tokens", "train/examples"} < row.keys()
    assert (found.part, found.count, found.differences, found.how) == ("train", len(row), (), "equal bit for bit")
