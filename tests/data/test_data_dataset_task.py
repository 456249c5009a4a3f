import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.config.task import TaskConfig
from tandem.data.tasks.dataset import DatasetTask, dataset_task
from tandem.types import UserError

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(*lines: str | dict[str, Any], name: str = "data.jsonl", end: str = "\n") -> str:
        texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
        (tmp_path / name).write_text("\n".join(texts) + end, encoding="utf-8")
        return str(tmp_path / name)

    return written


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "answer": str(i), "level": i} for i in range(start, start + count)]


def texts(task: DatasetTask, split: str) -> set[str]:
    return {item.text for item in task.splits[split]}  # type: ignore[index]


def test_a_row_becomes_prompt_ground_truth_and_columns(write: Write) -> None:
    line = {"frage": "Größe? 你好 \u2028 ✓", "lösung": 42, "level": {"deep": [1, None]}}
    path = write(line, *({"frage": f"q{i}", "lösung": 1} for i in range(9)))
    task = dataset_task(TaskConfig("dataset", path=path, prompt_key="frage", answer_key="lösung"), 0)
    item = next(item for split in task.splits.values() for item in split if item.where == f"{path}:1")
    assert item.text == line["frage"]
    assert item.ground_truth == 42
    assert item.columns == {"lösung": 42, "level": {"deep": [1, None]}}


def test_a_file_without_answers_is_fine_where_no_key_is_named(write: Write) -> None:
    path = write(*({"prompt": f"q{i}"} for i in range(10)))
    task = dataset_task(TaskConfig("dataset", path=path, answer_key=""), 0)
    assert task.train_prompt(0).ground_truth is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "x", "answer": ', "not valid JSON: Expecting value at column"),
        ("{'prompt': 'x'}", "not valid JSON: Expecting property name"),
        ("", "the line is empty; remove it"),
        ("  \t", "the line is empty; remove it"),
        ('["x", "y"]', "this is a list"),
        ("null", "this is null"),
        ('{"question": "x", "answer": "y"}', "key 'prompt' is missing; the line has 'question', 'answer'"),
        ('{"prompt": "x"}', "key 'answer' is missing"),
        ('{"prompt": 3, "answer": "y"}', "'prompt' is a number; it must be a text"),
        ('{"prompt": null, "answer": "y"}', "'prompt' is null"),
        (r'{"prompt": "\ud800", "answer": "y"}', "contains half of a surrogate pair"),
        ('{"prompt": " ", "answer": "y"}', "'prompt' is an empty text"),
        ('{"prompt": "x", "answer": true}', "'answer' is true or false"),
        ('{"prompt": "x", "answer": null}', "'answer' is null"),
        ('{"prompt": "x", "answer": NaN}', "NaN is not a JSON number"),
        ('{"prompt": "x", "prompt": "z", "answer": "y"}', "key 'prompt' is given twice"),
        ('{"prompt": "x", "answer": "y", "completions": []}', "key 'completions' is reserved for the arguments of reward functions"),
        ("[" * 100_000, "not valid JSON"),
        ('{"prompt": "x", "answer": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("at", [1, 7])
def test_a_bad_line_is_named_by_file_and_line_before_work_begins(write: Write, line: str, problem: str, at: int) -> None:
    good = [json.dumps(row) for row in rows(10)]
    path = write(*good[: at - 1], line, *good[at - 1 :])
    with pytest.raises(UserError) as error:
        dataset_task(TaskConfig("dataset", path=path), 0)
    text = str(error.value)
    assert text.startswith(f"{path}:{at}: ")
    assert problem in text
    assert "\n" not in text


def test_an_empty_last_line_is_named_too(write: Write) -> None:
    path = write(*rows(10), end="\n\n")
    with pytest.raises(UserError, match=":11: the line is empty"):
        dataset_task(TaskConfig("dataset", path=path), 0)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_break_at_the_end_of_the_file_makes_no_difference(write: Write, end: str) -> None:
    task = dataset_task(TaskConfig("dataset", path=write(*rows(10), end=end)), 0)
    assert sum(map(len, task.splits.values())) == 10


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(row) for row in rows(10)).encode() + b"\r\n")
    assert sum(map(len, dataset_task(TaskConfig("dataset", path=str(path)), 0).splits.values())) == 10


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(rows(1)[0]).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=":2: not UTF-8"):
        dataset_task(TaskConfig("dataset", path=str(path)), 0)


@pytest.mark.parametrize(("content", "problem"), [(None, "does not exist"), (b"", "is empty"), (b"\n", "is empty")])
def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        dataset_task(TaskConfig("dataset", path=str(path)), 0)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        dataset_task(TaskConfig("dataset", path=str(tmp_path)), 0)


def test_the_splits_share_no_prompt_and_equal_prompts_stay_together(write: Write) -> None:
    path = write(*rows(100), *rows(100))
    task = dataset_task(TaskConfig("dataset", path=path, held_out_share=0.2), 0)
    assert [len(task.splits[split]) for split in ("train", "held_out", "final")] == [120, 40, 40]
    assert not texts(task, "train") & texts(task, "held_out")
    assert not texts(task, "train") & texts(task, "final")
    assert not texts(task, "held_out") & texts(task, "final")


def test_the_side_of_a_prompt_does_not_depend_on_the_seed_or_the_order_of_lines(write: Write) -> None:
    task = dataset_task(TaskConfig("dataset", path=write(*rows(50))), 0)
    turned = dataset_task(TaskConfig("dataset", path=write(*rows(50)[::-1], name="turned.jsonl")), 9)
    for split in ("train", "held_out", "final"):
        assert texts(task, split) == texts(turned, split)


def test_evaluation_prompts_are_the_same_at_every_call_and_never_more_than_there_are(write: Write) -> None:
    task = dataset_task(TaskConfig("dataset", path=write(*rows(50))), 0)
    assert task.eval_prompts("held_out", 3, 0) == task.eval_prompts("held_out", 5, 0)[:3]
    assert len(task.eval_prompts("held_out", 1000, 0)) == 5


def test_a_file_of_its_own_serves_evaluation_and_a_shared_prompt_is_said(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    config = TaskConfig("dataset", path=write(*rows(10)), eval_path=write(*rows(5, start=9), name="eval.jsonl"))
    task = dataset_task(config, 0)
    assert task.size == 10
    assert texts(task, "held_out") == {f"question {i}" for i in range(9, 14)}
    assert "1 prompts are in both" in caplog.text


def test_too_few_prompts_to_hold_some_out_are_refused(write: Write) -> None:
    with pytest.raises(UserError, match=r"2 distinct prompts.*task.eval_path"):
        dataset_task(TaskConfig("dataset", path=write(*rows(2))), 0)


def test_demonstrations_are_the_files_answers_every_one_once_an_epoch(write: Write) -> None:
    task = dataset_task(TaskConfig("dataset", path=write(*rows(20))), 0)
    assert task.size == 16
    for epoch in range(2):
        shown = [task.demonstration(epoch * 16 + i, 3, 0.0) for i in range(16)]
        assert {s.item.text for s in shown} == texts(task, "train")
        assert all(s.completion == s.item.ground_truth and s.correct for s in shown)
    with pytest.raises(UserError, match="cannot make wrong answers"):
        task.demonstration(0, 3, 0.5)


def test_a_changed_file_has_another_fingerprint(write: Write) -> None:
    config = TaskConfig("dataset", path=write(*rows(10)))
    before = dataset_task(config, 0).fingerprint
    assert dataset_task(config, 0).fingerprint == before
    write(*rows(10, start=1))
    assert dataset_task(config, 0).fingerprint != before
