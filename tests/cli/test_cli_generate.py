"""``tandem generate``: prompts from files, completions to files, and all output formats."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cli import Done

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_of_a_jsonl_file_are_answered_in_an_output_file(command, model, tmp_path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "12=", "id": "a"}\n\n{"prompt_token_ids": [20, 21, 22]}\n')
    (tmp_path / "in.txt").write_text("12=\n345=\n")
    given = ("--n", "2", "--max-tokens", "4", "--output", tmp_path / "out.jsonl")
    done: Done = command("generate", model, "--prompts", tmp_path / "in.jsonl", *given)
    rows = json_lines((tmp_path / "out.jsonl").read_text())
    assert done.code == 0 and done.out == "" and [row["index"] for row in rows] == [0, 1, 0, 1]
    assert [row.get("id") for row in rows] == ["a", "a", None, None] and rows[2]["prompt_token_ids"] == [20, 21, 22]
    (printed,) = [command("generate", model, "--prompt", "12=", "--n", "2", "--max-tokens", "4", "--json").out]
    assert [row["token_ids"] for row in json_lines(printed)] == [row["token_ids"] for row in rows[:2]]
    lines = command("generate", model, "--prompts", tmp_path / "in.txt", "--max-tokens", "4").out.splitlines()
    assert [line.partition("=")[0] for line in lines] == ["12", "345"]


def test_a_completion_matches_what_was_asked_for(command, model, tmp_path) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 3, "x-guidance": {"whitespace_flexible": False}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    (tmp_path / "g.lark").write_text('start: ("ab" | "c")~2 "."')
    given = ("generate", model, "--prompt", "7=", "--n", "5", "--max-tokens", "60", "--json")
    for more, holds in (
        (("--json-schema", tmp_path / "s.json"), lambda text: set(json.loads(text)) <= {1, 22}),
        (("--regex", "[a-c]{3}[0-9]?"), lambda text: re.fullmatch("[a-c]{3}[0-9]?", text)),
        (("--choice", "yes", "--choice", "no"), lambda text: text in ("yes", "no")),
        (("--grammar", tmp_path / "g.lark"), lambda text: re.fullmatch(r"(ab|c){2}\.", text)),
    ):
        rows = json_lines(command(*given, *more).out)
        finished = [row["text"] for row in rows if row["finish_reason"] == "stop"]
        assert len(finished) >= 3 and all(holds(text) and " " not in text for text in finished), more


def test_scores_of_a_prompt_and_the_most_likely_tokens_are_printed(command, model) -> None:
    (row,) = json_lines(command("generate", model, "--prompt", "31=", "--max-tokens", "0", "--prompt-logprobs", "2", "--json").out)
    assert row["token_ids"] == [] and row["prompt_logprobs"][0] is None and len(row["prompt_logprobs"]) == 3
    assert all(len(entry) in (2, 3) and {"logprob", "rank", "decoded_token"} == set(next(iter(entry.values()))) for entry in row["prompt_logprobs"][1:])
    (row,) = json_lines(command("generate", model, "--prompt", "31=", "--max-tokens", "3", "--logprobs", "1", "--json").out)
    assert len(row["logprobs"]) == len(row["token_ids"])


def test_messages_and_system_go_through_the_chat_template(command, model, tmp_path) -> None:
    pytest.importorskip("jinja2")
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "m.jsonl").write_text('{"messages": [{"role": "system", "content": "be 1"}, {"role": "user", "content": "2="}]}\n')
    given = ("--max-tokens", "5", "--json")
    plain = command("generate", folder, "--prompt", "[system]be 1[user]2=[assistant]", *given).out
    for asked in (("--prompts", tmp_path / "m.jsonl"), ("--prompt", "2=", "--chat", "--system", "be 1")):
        assert [row["token_ids"] for row in json_lines(command("generate", folder, *asked, *given).out)] == [json_lines(plain)[0]["token_ids"]]


def test_a_model_in_object_storage_gives_the_same_completions(command, model, tmp_path) -> None:
    given = ("--prompt", "31=", "--max-tokens", "8", "--json")
    cache = ("--download-dir", tmp_path / "cache", "--weight-cache-gib", "1")
    far: Done = command("generate", f"file://{Path(model).resolve()}", *given, *cache)
    assert far.code == 0 and far.out == command("generate", model, *given).out
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 1
    small = command("generate", f"file://{Path(model).resolve()}", *given, "--download-dir", tmp_path / "other", "--weight-cache-gib", "0.000001")
    assert "the weight cache may hold 1073;" in small.refusal()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompts", "nowhere.txt"), "'nowhere.txt' does not exist"),
        (("--prompts", "bad.jsonl"), "bad.jsonl:2: a line is an object with one of prompt"),
        (("--prompts", "torn.jsonl"), "torn.jsonl:1: not valid JSON"),
        (("--prompts", "empty.txt"), "contains no prompt"),
        (("--prompts", "empty.txt", "--prompt", "x"), "exclude each other"),
        (("--prompt", "1", "--system", "x"), "--system needs --chat"),
        (("--prompt", "1", "--json-schema", "nowhere.json"), "'nowhere.json' does not exist"),
        (("--prompt", "1", "--regex", "a", "--choice", "b"), "not allowed with"),
        (("--prompt", "1", "--max-tokens", "0"), "max_tokens is 0"),
        (("--prompt", "1", "--weight-cache-gib", "-1"), "weight_cache_gib is -1"),
        (("--prompt", "1", "--presence-penalty", "3"), "presence_penalty is 3"),
        (("--prompt", "1", "--max-model-len", "1000"), "max_model_len is 1000"),
        (("--prompt", "1", "--output", "no/such/folder/x"), "No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(command, model, tmp_path, monkeypatch, arguments, says) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "1"}\n{"prompt": "1", "messages": []}\n')
    Path("torn.jsonl").write_text('{"prompt": \n')
    Path("empty.txt").write_text("\n\n")
    done: Done = command("generate", model, *arguments)
    assert done.code in (1, 2) and says in done.err and done.err.count("\n") == 1


def test_an_output_file_is_whole_or_untouched(command, model, tmp_path) -> None:
    (tmp_path / "out.jsonl").write_text("precious")
    done: Done = command("generate", model, "--prompt", "1" * 97, "--output", tmp_path / "out.jsonl")
    assert done.code == 2 and (tmp_path / "out.jsonl").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_terminal_sees_the_download_and_the_completions_as_bars_and_the_answers_stay_clean(command, model, tmp_path) -> None:
    master, slave = pty.openpty()
    prompts = [part for number in range(40) for part in ("--prompt", f"{number}=")]
    arguments = ["generate", f"file://{Path(model).resolve()}", *prompts, "--max-tokens", "4", "--download-dir", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "tandem.cli.main", *arguments], stdout=subprocess.PIPE, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # A closed pipe.
            break
        if not part:
            break
        seen += part
    assert process.stdout is not None
    printed = process.stdout.read().decode()
    process.stdout.close()
    os.close(master)
    assert process.wait() == 0 and b"downloading [======" in seen and b"generating" in seen
    assert printed == command("generate", model, *prompts, "--max-tokens", "4").out
