"""Examples become tokens and loss masks as in transformers, for any number of workers."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_tokenizer import MARKED, PLAIN, QUESTIONS, TURN, examples_in, save_tokenizer
from transformers import AutoTokenizer

from tandem.config.model import NewModelConfig
from tandem.data.examples import BrokenExample, read_example
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.encode_examples import ExampleEncoder
from tandem.data.tokenizing.tokenize import DATASET, TokenizeSettings, tokenize
from tandem.model.new_model import write_tokenizer
from tandem.storage.files import open_storage
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

EXAMPLES = DocumentFormat(suffixes=(), examples=True)
LAST_ONLY = PLAIN.replace("{{ '\\n' }}{% endfor %}", "{{ '\\n' if loop.last else ' ' }}{% endfor %}")


def conversation(number: int) -> list[dict[str, str]]:
    """One to three questions with their answers, some after a system message."""
    found = [{"role": "system", "content": "Be kind."}] if number % 3 == 0 else []
    for turn in range(1 + number % 3):
        asked = QUESTIONS[(number + turn) % len(QUESTIONS)]
        found += [{"role": "user", "content": f"{asked} {number}"}, {"role": "assistant", "content": f"It is {asked}{'!' * (number % 4)}"}]
    return found


CHATS = [{"messages": conversation(i)} for i in range(60)]
PAIRS = [{"prompt": f"{QUESTIONS[i % 6]} {i}?", "completion": f" {i * 7} {QUESTIONS[(i + 1) % 6]}"} for i in range(60)]


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("t") / "marked", MARKED)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("t") / "plain", PLAIN)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    (folder / "b.jsonl").write_text("".join(json.dumps({**row, "other": 1}, ensure_ascii=False) + "\n" for row in PAIRS), encoding="utf-8")
    (folder / "c.txt").write_text("no example")
    return folder


def settings(source: Path, destination: Path, tokenizer: Path, **changed: Any) -> TokenizeSettings:
    return TokenizeSettings(str(source), str(destination), str(tokenizer), **{"form": EXAMPLES, "unit_bytes": 3000, "workers": 1, **changed})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def chat_of_transformers(folder: Path, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    found = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return found["input_ids"], found["assistant_masks"]


def pair_of_transformers(folder: Path, row: dict[str, str]) -> tuple[list[int], list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer(row["prompt"])["input_ids"]
    answer = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return asked + answer, [0] * len(asked) + [1] * len(answer)


def test_tokens_and_mask_of_every_example_are_those_of_transformers(source: Path, marked: Path, tmp_path: Path) -> None:
    found = tokenize(settings(source, tmp_path / "t", marked))
    expected = [chat_of_transformers(marked, row["messages"]) for row in CHATS] + [pair_of_transformers(marked, row) for row in PAIRS]
    assert len(found.shards) > 2 and examples_in(tmp_path / "t") == expected
    assert found.learned == sum(sum(mask) for _, mask in expected) > 0 and found.tokens == sum(len(ids) for ids, _ in expected)
    assert json.loads((tmp_path / "t" / DATASET).read_text())["learned"] == found.learned


def test_calls_of_tools_are_learned_and_their_answers_are_not(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}" + TURN + "{% generation %}{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"
        "{% else %}" + TURN + "{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    folder = save_tokenizer(tmp_path / "tools", template)
    add = {"type": "function", "function": {"name": "add", "description": "é <b>", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}
    row = {
        "tools": [add],
        "messages": [
            {"role": "user", "content": "2 + 2 ="},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "It is 4"},
        ],
    }  # fmt: skip
    tokenizer = Tokenizer.from_folder(folder)
    encoder = ExampleEncoder(folder, tokenizer.backend, None)
    ((ids, learned),) = encoder.encode([encoder.render(read_example(row, "prompt", "completion"))])
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert (ids, learned) == (expected["input_ids"], expected["assistant_masks"])
    said = tokenizer.decode([token for token, is_learned in zip(ids, learned, strict=True) if is_learned], skip_special_tokens=False)
    assert said == '<call>{"name": "add", "arguments": {"a": 2}}<|im_end|>It is 4<|im_end|>'


def test_content_in_text_parts_is_learned_as_transformers_renders_it_with_a_template_that_reads_parts(tmp_path: Path) -> None:
    said = "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    template = (
        "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}{% generation %}" + said + "{{ '<|im_end|>' }}{% endgeneration %}"
        "{% else %}" + said + "{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    folder = save_tokenizer(tmp_path / "parts", template)
    parts = lambda *texts: [{"type": "text", "text": text} for text in texts]
    messages = [
        {"role": "system", "content": parts("Be kind.")}, {"role": "user", "content": parts("2 + ", "2 =", "")},
        {"role": "assistant", "content": parts("It ", "is\n", "4")}, {"role": "user", "content": "and then?"}, {"role": "assistant", "content": "naïve café"},
    ]  # fmt: skip
    encoder = ExampleEncoder(folder, Tokenizer.from_folder(folder).backend, None)
    (example,) = encoder.encode([encoder.render(read_example({"messages": messages}, "prompt", "completion"))])
    assert example == chat_of_transformers(folder, messages) and 0 < sum(example[1]) < len(example[0])


def test_template_without_marks_learns_what_rendering_with_each_turn_adds(plain: Path, marked: Path) -> None:
    tokenizer = Tokenizer.from_folder(plain)
    encoder = ExampleEncoder(plain, tokenizer.backend, None)
    found = encoder.encode([encoder.render(read_example(row, "prompt", "completion")) for row in CHATS])
    line = tokenizer.encode("\n")[0]
    for row, (ids, learned) in zip(CHATS, found, strict=True):
        expected_ids, expected = chat_of_transformers(marked, row["messages"])
        # What the template adds after a turn belongs to the turn: here the line break.
        after = [i for i, token in enumerate(ids) if i and token == line and expected[i - 1] and not expected[i]]
        assert ids == expected_ids and [1 if i in after else value for i, value in enumerate(expected)] == learned
        assert len(after) == sum(message["role"] == "assistant" for message in row["messages"])


def test_character_of_several_tokens_at_the_end_is_learned_whole(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ '.' }}{% endfor %}")
    tokenizer = Tokenizer.from_folder(folder)
    encoder = ExampleEncoder(folder, tokenizer.backend, None)
    messages = [{"role": "assistant", "content": "ab 😃"}]
    ((ids, learned),) = encoder.encode([encoder.render(read_example({"messages": messages}, "prompt", "completion"))])
    assert len(tokenizer.encode("😃")) > 1 and learned == [0] + [1] * (len(ids) - 2) + [0]


def test_template_cannot_ask_for_the_date(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%Y') if strftime_now is defined else 'no date' }}" + MARKED
    folder = save_tokenizer(tmp_path / "t", dated)
    encoder = ExampleEncoder(folder, Tokenizer.from_folder(folder).backend, None)
    assert encoder.render(read_example(CHATS[1], "prompt", "completion")).text.startswith("no date<bos>")


def test_shards_are_the_same_bytes_for_any_number_of_workers_and_after_a_kill(source: Path, marked: Path, tmp_path: Path) -> None:
    tokenize(settings(source, tmp_path / "calm", marked))
    killed: list[int] = []

    def kill_one(done: int, total: int, tokens: int) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        if done > total / 3 and not killed:
            killed.extend([int(pid) for pid in children if b"tokenize_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()][:1])
            os.kill(killed[0], signal.SIGKILL)

    tokenize(settings(source, tmp_path / "storm", marked, workers=2), kill_one)
    assert killed and contents(tmp_path / "storm") == contents(tmp_path / "calm")
    shutil.copytree(tmp_path / "calm", tmp_path / "cut")
    for name in (DATASET, "units/000001.json", "shard-000001.tar"):
        (tmp_path / "cut" / name).unlink()
    tokenize(settings(source, tmp_path / "cut", marked))
    assert contents(tmp_path / "cut") == contents(tmp_path / "calm")


def test_work_that_was_begun_with_another_template_or_as_text_is_not_gone_on_with(source: Path, marked: Path, plain: Path, tmp_path: Path) -> None:
    (source / "a.jsonl").unlink()
    tokenize(settings(source, tmp_path / "t", marked))
    with pytest.raises(UserError, match="started with another chat_template"):
        tokenize(settings(source, tmp_path / "t", plain))
    with pytest.raises(UserError, match=r"started with another .*examples"):
        tokenize(settings(source, tmp_path / "t", marked, form=DocumentFormat()))


def test_webdataset_reads_tokens_and_masks(source: Path, marked: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed, so that it reads our shards is not shown here")
    found = tokenize(settings(source, tmp_path / "t", marked))
    urls = [str(tmp_path / "t" / f"{shard.name}.tar") for shard in found.shards]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert [(sample["npy"].tolist(), sample["learned.npy"].tolist()) for sample in samples] == examples_in(tmp_path / "t")


def test_shards_of_webdataset_give_the_examples_of_the_same_json_lines(marked: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed, so that its shards are read is not shown here")
    (tmp_path / "lines").mkdir()
    (tmp_path / "shards").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS + PAIRS))
    with webdataset.TarWriter(str(tmp_path / "shards" / "a.tar")) as writer:
        for i, row in enumerate(CHATS + PAIRS):
            writer.write({"__key__": f"{i:06d}", "json": row, "txt": "not an example"})
    for name in ("lines", "shards"):
        tokenize(settings(tmp_path / name, tmp_path / f"{name}-tokens", marked))
    assert examples_in(tmp_path / "shards-tokens") == examples_in(tmp_path / "lines-tokens") and len(examples_in(tmp_path / "shards-tokens")) == 120


def test_no_question_is_both_trained_on_and_held_out(marked: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    rows = [{"prompt": f"question {i % 40}", "completion": f"answer {i}"} for i in range(120)]
    (tmp_path / "s" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: dict[str, set[tuple[int, ...]]] = {}
    for side in ("train", "held_out"):
        tokenize(settings(tmp_path / "s", tmp_path / side, marked, side=side, held_out_share=0.3))
        asked[side] = {tuple(ids[: learned.index(1)]) for ids, learned in examples_in(tmp_path / side)}
    assert asked["train"] and asked["held_out"] and not asked["train"] & asked["held_out"] and len(asked["train"] | asked["held_out"]) == 40


def test_rows_of_tables_are_the_examples_of_the_same_json_lines(source: Path, tmp_path: Path) -> None:
    from tandem.data.tokenizing.documents import Document, Part, divide, documents

    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables = tmp_path / "tables"
    tables.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(CHATS), tables / "a.parquet")
    with pyarrow.ipc.new_stream(str(tables / "b.arrow"), pyarrow.Table.from_pylist(PAIRS).schema) as stream:
        stream.write_table(pyarrow.Table.from_pylist(PAIRS))

    def read(folder: Path) -> list[Document]:
        storage = open_storage(str(folder))
        parts = [part for unit in divide(storage.files(), EXAMPLES, 10**6) for part in unit]
        assert [part.name for part in parts] == sorted(path.name for path in folder.iterdir() if path.suffix != ".txt")
        return [document for part in parts for document in documents(storage, part, EXAMPLES)]

    found = read(tables)
    assert [document.examples for document in found] == [document.examples for document in read(source)] and len(found) == 120
    assert sum(document.size for document in found) == sum(path.stat().st_size for path in tables.iterdir())
    (tables / "a.parquet").write_bytes((tables / "a.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"a.parquet: is not a whole Parquet file: .*correct it, remove it or skip broken documents"):
        list(documents(open_storage(str(tables)), Part("a.parquet", 0, (tables / "a.parquet").stat().st_size), EXAMPLES))


def test_trls_conversational_prompts_and_completions_are_learned_as_the_conversation(marked: Path) -> None:
    question, answer = {"role": "user", "content": "What color is the sky?"}, {"role": "assistant", "content": "It is blue."}
    row = read_example({"prompt": [question], "completion": [answer]}, "prompt", "completion")
    assert row == read_example({"messages": [question, answer]}, "prompt", "completion")
    with pytest.raises(BrokenExample, match="'prompt' has a message of the assistant, which would be learned too"):
        read_example({"prompt": [question, answer, question], "completion": [answer]}, "prompt", "completion")


BROKEN: list[tuple[Any, str]] = [
    ({"prompt": "a", "completion": ""}, "'completion' is empty"),
    ({"prompt": "a", "completions": "b"}, "neither 'messages' nor a text under the key 'completion' (it has 'prompt', 'completions')"),
    ({"prompt": None, "completion": "b"}, "under the key 'prompt'"),
    ({"messages": [{"role": "user", "content": "a"}]}, "no message is the assistant's"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}, "message 2 is the assistant's and empty"),
    ({"messages": [{"role": "user"}]}, "message 1 needs a 'content' that is a text"),
    ({"messages": [{"content": "a"}]}, "message 1 needs a 'role' that is a text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "image", "image": "a"}]}]}, "message 1 needs a 'content' that is a text"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "message 1 has 'tool_calls' that are not a list of calls by the assistant"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "message 1 needs a 'content' that is a text"),
    ({"messages": CHATS[0]["messages"], "tools": {"name": "add"}}, "'tools' is not a list of tools"),
    ({"messages": []}, "'messages' is not a list of messages"),
    ({"messages": CHATS[0]["messages"], "completion": "b"}, "both 'messages' and 'completion'"),
    ({"messages": [{"role": "assistant", "content": "\ufdd0"}]}, "a noncharacter"),
    ([], "it is not a JSON object"),
]


@pytest.fixture(scope="module")
def refused(marked: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], str]:
    """The error for a line with this content."""

    def said(row: Any) -> str:
        folder = tmp_path_factory.mktemp("broken")
        (folder / "s").mkdir()
        (folder / "s" / "x.jsonl").write_text(json.dumps(PAIRS[0]) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(UserError) as caught:
            tokenize(settings(folder / "s", folder / "t", marked))
        return str(caught.value)

    return said


@pytest.mark.parametrize(("row", "why"), [BROKEN[0], BROKEN[8]], ids=["read", "rendered"])
def test_broken_example_is_one_line_with_file_and_place(row: Any, why: str, refused: Callable[[Any], str]) -> None:
    said = refused(row)
    assert said.startswith(f"x.jsonl, the line at byte {len(json.dumps(PAIRS[0])) + 1}: ") and why in said and "\n" not in said


def test_broken_examples_of_every_kind_can_be_skipped_and_are_counted(marked: Path, tmp_path: Path) -> None:
    from tandem.data.tokenizing.documents import Part, documents

    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [PAIRS[0], *(row for row, _ in BROKEN), PAIRS[1]]))
    form = DocumentFormat(suffixes=(), examples=True, skip_broken=True)
    found = tokenize(settings(tmp_path / "s", tmp_path / "t", marked, form=form, unit_bytes=10**6))
    assert (found.documents, found.skipped) == (2, len(BROKEN))
    storage = open_storage(str(tmp_path / "s"))
    problems = [d.problem for d in documents(storage, Part("x.jsonl", 0, 10**6), form) if d.text is None]
    expected = [why for row, why in BROKEN if why != "a noncharacter"]
    assert len(problems) == len(expected) and all(why in problem for why, problem in zip(expected, problems, strict=True))


@pytest.mark.parametrize("kind", ["text", "example"])
def test_character_that_the_tokenizer_does_not_know_is_one_line_with_file_and_place(kind: str, tmp_path: Path) -> None:
    write_tokenizer(NewModelConfig(), tmp_path / "characters")
    rows = [{"prompt": "a", "completion": text, "text": text} for text in ("b", "caf\u00e9", "c")]
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = DocumentFormat(suffixes=(), examples=kind == "example")
    with pytest.raises(UserError) as caught:
        tokenize(settings(tmp_path / "s", tmp_path / "t", tmp_path / "characters", form=form))
    place = f"x.jsonl, the line at byte {len(json.dumps(rows[0])) + 1}: character 'é' (U+00E9, at 3) is not in the tokenizer's vocabulary"
    assert str(caught.value).startswith(place) and "\n" not in str(caught.value)
    found = tokenize(settings(tmp_path / "s", tmp_path / "u", tmp_path / "characters", form=replace(form, skip_broken=True)))
    assert (found.documents, found.skipped) == (2, 1)


def test_template_whose_prefixes_do_not_nest_is_refused_even_where_broken_examples_are_skipped(source: Path, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", LAST_ONLY)
    form = DocumentFormat(suffixes=(), examples=True, skip_broken=True)
    with pytest.raises(UserError) as caught:
        tokenize(settings(source, tmp_path / "t", folder, form=form))
    said = str(caught.value)
    assert said.startswith("a.jsonl, the line at byte ") and "put {% generation %} and {% endgeneration %}" in said and "\n" not in said


def test_source_without_examples_or_with_a_suffix_is_refused(marked: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.txt").write_text("text")
    with pytest.raises(UserError, match="contains no document"):
        tokenize(settings(tmp_path / "s", tmp_path / "t", marked))
    with pytest.raises(UserError, match="examples are JSON objects"):
        tokenize(settings(tmp_path / "s", tmp_path / "t", marked, form=DocumentFormat(suffixes=(".txt",), examples=True)))
