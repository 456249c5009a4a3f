"""Absurd files in the place of those that a command reads: one line, at once, with bounded memory."""

import contextlib
import itertools
import json
import os
import random
import struct
from pathlib import Path

import pytest
from absurd_files import SPECIAL, damaged, damaged_cases, defects, places_of_data, run_case, special_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.config.load import read_yaml
from tandem.config.task import TaskConfig
from tandem.data.rows.source import file_rows
from tandem.data.tasks.dataset import items_of
from tandem.data.tokenizing.documents import DocumentFormat, Part, documents, most_bytes
from tandem.data.tokenizing.tokenize import read_dataset
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.peft_folder import load_adapter
from tandem.model.huggingface.safetensors_file import read_file
from tandem.storage.files import open_storage
from tandem.text.chat import template_source
from tandem.text.long_text import exceeds
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

SPECIAL_FILES = ("FIFO", "folder", "link to /dev/zero", "link to itself", "sparse, 1 TiB")
BOMBS = (
    "YAML bomb", "YAML merge bomb", "YAML that contains itself", "YAML keys that are lists", "YAML date", "100,000 nested lists", "5,000 digits", "NUL bytes",
)  # fmt: skip


@pytest.mark.parametrize("kind", SPECIAL_FILES + BOMBS)
def test_a_recipe_that_is_a_special_file_or_a_bomb_is_refused(command, tmp_path: Path, kind: str) -> None:
    SPECIAL[kind](tmp_path / "recipe.yaml")
    message = command("train", tmp_path / "recipe.yaml", "--dry-run").refusal()
    assert str(tmp_path / "recipe.yaml") in message


@pytest.mark.parametrize("kind", [*SPECIAL_FILES, "100,000 nested lists", "lone surrogates", "infinite numbers", "one line of 2 MiB"])
def test_prompts_that_are_a_special_file_or_no_characters_are_refused(command, recipe: Path, tmp_path: Path, kind: str) -> None:
    SPECIAL[kind](tmp_path / "prompts.jsonl")
    task = f"--task={{name: dataset, path: {json.dumps(str(tmp_path / 'prompts.jsonl'))}}}"
    assert "prompts.jsonl" in command("train", recipe, task, "--sft.corrupted_share=0", "--dry-run").refusal()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_a_model_that_is_huge_or_nested_deeply_is_refused(command, model: Path, tmp_path: Path, name: str) -> None:
    for kind in ("sparse, 1 TiB", "100,000 nested lists", "link to /dev/full"):
        folder = tmp_path / kind.replace("/", " ")
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).symlink_to(file)
        (folder / name).unlink()
        SPECIAL[kind](folder / name)
        # What is no regular file counts as missing, and the settings of a tokenizer may be missing.
        done = command("generate", folder, "--prompt", "1")
        if "link" not in kind:
            assert name in done.refusal()
        elif name != "tokenizer_config.json":
            done.refusal()


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**32])
def test_a_header_of_weights_that_claims_more_than_the_file_has_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + bytes(64))
    with pytest.raises(UserError, match="broken or truncated"):
        list(read_file(tmp_path / "model.safetensors"))


def test_a_model_of_more_tensors_than_a_file_can_name_is_refused_before_they_are_listed(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: 10**400}))
        with pytest.raises(UserError, match=r"it must be a whole number below 2\^63"):
            read_shapes(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2**40}))
    with pytest.raises(UserError, match="that a file of weights can name"):
        read_shapes(tmp_path)


def test_lone_surrogates_are_broken_documents_that_can_be_skipped(tmp_path: Path) -> None:
    rows = ['{"text": "good"}', '{"text": "bad \\ud800"}', '{"text": "pair \\ud83c\\udf0d"}', '{"text": "also good"}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    storage, part = open_storage(str(tmp_path)), Part("rows.jsonl", 0, (tmp_path / "rows.jsonl").stat().st_size)
    with pytest.raises(UserError, match="half of a surrogate pair"):
        list(documents(storage, part, DocumentFormat()))
    skipped = [document.text for document in documents(storage, part, DocumentFormat(skip_broken=True))]
    assert skipped == ["good", None, "pair 🌍", "also good"]


def test_a_line_larger_than_the_memory_to_tokenize_it_is_broken_in_every_division_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.data.tokenizing.documents.most_bytes", lambda: 100)
    lines = [json.dumps({"text": "x" * size}) for size in (10, 50, 500, 3000, 20, 85, 200, 5)]
    content = ("\n".join(lines) + "\n").encode()
    (tmp_path / "rows.jsonl").write_bytes(content)
    storage, form = open_storage(str(tmp_path)), DocumentFormat(skip_broken=True)
    draw = random.Random(0)
    for _ in range(50):
        cuts = sorted({0, len(content), *(draw.randrange(len(content)) for _ in range(draw.randrange(6)))})
        parts = [Part("rows.jsonl", start, stop) for start, stop in itertools.pairwise(cuts)]
        found = [len(document.text) for part in parts for document in documents(storage, part, form) if document.text is not None]
        assert found == [10, 50, 20, 85, 5]


def test_a_document_may_be_as_large_as_the_memory_allows() -> None:
    assert 2**20 < most_bytes() < 2**40


def test_a_sparse_file_is_named_before_it_is_read(command, model: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    SPECIAL["sparse, 1 TiB"](tmp_path / "data" / "rows.jsonl")
    for options in ((), ("--skip-broken",)):
        message = command("tokenize", tmp_path / "data", tmp_path / "tokens", "--tokenizer", model, *options).refusal()
        assert "rows.jsonl' has a hole at byte 0 of 1,099,511,627,776: it is a sparse file, not text" in message


def test_completions_are_written_to_a_fifo_or_device_and_do_not_replace_it(command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "out"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert command("generate", model, "--prompt", "1=", "--max-tokens", "1", "--output", path).code == 0
        assert path.is_fifo() and json.loads(os.read(reader, 2**16))["prompt"] == "1="
    finally:
        os.close(reader)


def test_a_text_of_far_too_many_tokens_is_told_from_its_beginning() -> None:
    asked: list[int] = []

    def encode(text: str) -> list[int]:
        asked.append(len(text))
        return [1] * (len(text) // 4)

    assert exceeds(encode, "x" * 10_000_000, 100) and max(asked) < 10_000
    # A text that may fit is encoded as a whole by the caller: few tokens for many characters, or short enough.
    assert not exceeds(lambda text: [1], "x" * 10_000_000, 100) and not exceeds(encode, "x" * 5000, 100)


def read_any(folder: Path, name: str) -> None:
    """Reads the file ``name`` as the commands do."""
    path = folder / name
    if name == "recipe.yaml":
        read_yaml(path)
    elif name == "data/prompts.jsonl":
        items_of(file_rows(str(path)), TaskConfig("dataset", path=str(path)))
    elif name == "data/rows.jsonl":
        for examples in (False, True):
            form = DocumentFormat(suffixes=(), examples=examples)
            list(documents(open_storage(str(path.parent)), Part(path.name, 0, path.stat().st_size), form))
    elif name == "dataset.json":
        read_dataset(open_storage(str(folder)))
    elif name.endswith(".safetensors") and "adapter" not in name:
        list(read_file(path))
    elif "adapter" in name:
        load_adapter(path.parent, read_shapes(folder / "model"), 8)
    else:
        read_shapes(path.parent)
        Tokenizer.from_folder(path.parent)
        template_source(path.parent)


READ = ("recipe.yaml", "data/prompts.jsonl", "data/rows.jsonl", "dataset.json", "model/config.json", "model/tokenizer.json", "model/tokenizer_config.json",
        "model/model.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_any_damaged_file_is_read_or_refused(files: Path, name: str) -> None:
    path = files / name
    if name == "dataset.json":
        path.write_text('{"tokenizer": "a", "vocab_size": 5, "end_token": 1, "dtype": "u2", "shards": []}')
    whole = path.read_bytes()

    # YAML is parsed in Python, 50 times as slowly.
    @settings(max_examples=10 if name == "recipe.yaml" else 40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64))
    def damage(seed: int) -> None:
        path.write_bytes(damaged(whole, random.Random(seed)))
        with contextlib.suppress(UserError):
            read_any(files, name)

    try:
        damage()
    finally:
        path.write_bytes(whole)


@pytest.mark.full
def test_every_special_file_in_the_place_of_data_ends_the_command_in_one_line(files: Path, tmp_path: Path) -> None:
    assert defects(special_cases(files, tmp_path, places_of_data(files))) == []


@pytest.mark.full
def test_random_changes_of_every_file_of_data_end_the_command_in_one_line(files: Path, tmp_path: Path) -> None:
    assert defects(damaged_cases(files, tmp_path, places_of_data(files), 5)) == []


def test_an_unchanged_file_is_accepted_by_the_same_runner(files: Path, tmp_path: Path) -> None:
    place = next(place for place in places_of_data(files) if place.name == "recipe")
    assert run_case(files, tmp_path, place, lambda path: path.write_bytes((files / "recipe.yaml").read_bytes()) and None).kind == "accepted"
