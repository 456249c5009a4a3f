"""``tandem data check``: rows as the model will see them, lengths in tokens, and what is wrong in which line."""

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.model import NewModelConfig
from tandem.model.new_model import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token per character, so that lengths are those of the texts."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(NewModelConfig(), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_texts_are_shown_with_lengths_as_they_are(command: Run, folder: Path, tmp_path: Path) -> None:
    texts = ["q" * length for length in [5, 9, 9, *range(20, 220)]]
    path = write(tmp_path / "a.jsonl", [{"prompt": text, "answer": "x", "level": 1} for text in texts])
    done = command("data", "check", path, "--model", folder, "--json", "--rows", "2")
    report = json.loads(done.out)
    assert done.code == 0 and report["form"] == "prompts" and report["problems"] == [] and report["duplicates"] == 1
    assert [row["text"] for row in report["shown"]] == texts[:2] and report["shown"][0]["answer"] == "x"
    lengths = sorted(map(len, texts))
    assert report["lengths"] == {
        "min": 5, "median": statistics.median_low(lengths), "p99": lengths[-(len(lengths) // 100) - 1], "max": 219, "allowed": 0, "too_long": 0,
    }  # fmt: skip
    assert report["columns"] == ["prompt", "answer", "level"]


def test_messages_are_shown_through_the_template_and_mistakes_with_their_lines(command: Run, folder: Path, tmp_path: Path) -> None:
    good = {"prompt": [{"role": "user", "content": "2+2="}], "reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "mine"}
    path = write(tmp_path / "a.jsonl", [good, "{", {**good, "prompt": [{"role": "user"}]}, {**good, "reward_model": {}}, good])
    done = command("data", "check", path, "--tokenizer", folder)
    assert done.code == 1
    assert "a.jsonl:1, 22 tokens, answer '4'\n  | <user>2+2=\n  | <assistant>" in done.out
    lines = done.out.splitlines()
    assert f"{path}:3: message 1 needs a 'content' that is a text" in lines
    assert any(line.startswith(f"{path}:2: not valid JSON") for line in lines)
    assert any(line.startswith(f"{path}:4: key 'reward_model.ground_truth' is missing") for line in lines)
    assert lines[-1] == "3 problems" and "duplicates: 1 rows have the prompt of an earlier row" in lines


def test_with_a_recipe_rows_are_read_as_the_run_would_and_its_context_counts(command: Run, folder: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [{"frage": text, "antwort": 1} for text in ("a", "bb", "c" * 50)])
    held_out = write(tmp_path / "b.jsonl", [{"frage": "d", "antwort": 1}])
    recipe = {
        "model": {"path": str(folder), "max_length": 60},
        "task": {
            "name": "dataset", "path": str(train), "eval_path": str(held_out), "prompt_key": "frage", "answer_key": "antwort", "chat": True,
            "system_prompt": "S", "prompt_template": "({prompt})",
        },
        "rollout": {"max_tokens": 20},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    done = command("data", "check", "--recipe", tmp_path / "r.yaml", "--json")
    first, second = map(json.loads, done.out.splitlines())
    assert done.code == 1 and first["shown"][0]["text"] == "<system>S\n<user>(a)\n<assistant>" and second["rows"] == 1
    assert first["lengths"]["allowed"] == 40 and first["lengths"]["too_long"] == 1
    assert first["problems"] == [{"where": f"{train}:3", "problem": "it has 80 tokens, more than 40; shorten it or raise the context"}]
    plain = command("data", "check", "--recipe", tmp_path / "r.yaml", "--task.chat=false", "--task.system_prompt=", "--json")
    assert json.loads(plain.out.splitlines()[0])["shown"][1]["text"] == "(bb)" and plain.code == 1


def test_examples_preferences_and_texts_are_told_by_their_keys(command: Run, folder: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("examples", {"prompt": "ab", "completion": "cde"}, 6, "abcde"),
        ("examples", {"messages": talk}, len("<user>a\n<assistant>b\n"), "<user>a\n<assistant>b\n"),
        ("preferences", {"prompt": "ab", "chosen": "c", "rejected": "def"}, 5, "ab\n[chosen] c\n[rejected] def"),
        ("text", {"text": "abc"}, 3, "abc"),
    ]
    for number, (form, row, tokens, shown) in enumerate(cases):
        done = command("data", "check", write(tmp_path / f"{number}.jsonl", [row]), "--model", folder, "--json")
        report = json.loads(done.out)
        assert (done.code, report["form"], report["shown"][0]["tokens"], report["shown"][0]["text"]) == (0, form, tokens, shown)
    done = command("data", "check", write(tmp_path / "x.jsonl", [{"messages": talk}]), "--form", "prompts", "--json")
    assert json.loads(done.out)["shown"][0]["answer"] == "b"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("data",), "ACTION"),
        (("data", "check"), "no file; name one"),
        (("data", "check", "nowhere.jsonl"), "'nowhere.jsonl' does not exist"),
        (("data", "check", "a.jsonl", "--rows", "-1"), "--rows is -1"),
        (("data", "check", "a.jsonl", "--task.chat=true"), "name it with --recipe"),
        (("data", "check", "a.jsonl", "--model", "nowhere"), "'nowhere' is not a folder here"),
        (("data", "check", "a.jsonl", "--form", "prompt"), "invalid choice"),
        (("data", "check", "--recipe", "sort.yaml"), "has task.name 'sort', which reads no data file"),
        (("data", "check", "a.jsonl", "--split", "test"), "is a file and has no split 'test'"),
    ],
)
def test_a_wrong_use_is_one_line(command: Run, given: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "sort.yaml").write_text("model: {path: m}\ntask: {name: sort}\n")
    assert problem in command(*given).refusal()


def test_prompts_are_shown_with_the_tools_of_the_recipe(command: Run, folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": f"{i}+2="}], "answer": "4"} for i in range(9)])
    sections = {"model": {"path": str(folder)}, "task": {"name": "dataset", "path": str(path), "tools": ["calculator"]}, "rollout": {"multi_turn": {}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    done = command("data", "check", "--recipe", tmp_path / "recipe.yaml", "--tokenizer", folder, "--json")
    assert '"name": "calculator"' in json.loads(done.out)["shown"][0]["text"]


def test_rows_whose_tools_the_template_does_not_show_are_named_and_those_of_a_recipe_may_be_in_its_own_words(
    command: Run, folder: Path, tmp_path: Path
) -> None:
    shows, without = tmp_path / "shows", tmp_path / "without"
    of_messages = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    for each, template in ((shows, "{% if tools %}{{ tools | tojson }}{% endif %}" + of_messages), (without, of_messages)):
        shutil.copytree(folder, each)
        (each / "chat_template.jinja").write_text(template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    asked = [{"role": "user", "content": "2+2="}]
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": asked, "answer": "4"}, {"prompt": asked, "answer": "4", "tools": tools}])
    answered = [*asked, {"role": "assistant", "content": "4"}]
    examples = write(tmp_path / "examples.jsonl", [{"messages": answered, "tools": tools}, {"messages": answered}])
    for path, line, options in ((prompts, 2, ()), (examples, 1, ("--form", "examples"))):
        assert command("data", "check", path, "--tokenizer", shows, *options).code == 0
        done = command("data", "check", path, "--tokenizer", without, *options)
        says = f"the chat template of '{without}' writes the same text with the tool and without, so that the model does not see them"
        (problem,) = [each for each in done.out.splitlines() if says in each]
        assert done.code == 1 and problem.startswith(f"{path}:{line}: ")
        assert problem.endswith("; put a template that writes 'tools' there, or leave the tools out")
    path = write(tmp_path / "plain.jsonl", [{"prompt": asked, "answer": "4"}])
    sections = {"model": {"path": str(without)}, "task": {"name": "dataset", "path": str(path), "tools": ["calculator"]}, "rollout": {"multi_turn": {}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    assert command("data", "check", "--recipe", tmp_path / "recipe.yaml").code == 0
