"""Curriculum: prompts come from easy to hard, in the order of the file, or in proportion to how often they fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.config.prompt_order import PromptOrderConfig
from tandem.config.task import TaskConfig
from tandem.data.prompts import PromptSource
from tandem.types import UserError

ROWS = [{"prompt": f"q{i}", "answer": "a", "meta": {"level": level}} for i, level in enumerate([3, 1, 2, 1, 5, 4, 2.5, 0, 9, 8])]


def source(folder: Path, rows: list[dict[str, Any]], count: int = 3, **order: Any) -> PromptSource:
    train, other = folder / "train.jsonl", folder / "other.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other.write_text(json.dumps({"prompt": "other", "answer": "a", "meta": {"level": 0}}) + "\n")
    config = PromptOrderConfig(**order)
    config.check()
    return PromptSource(
        TaskConfig("dataset", path=str(train), eval_path=str(other)), lambda text: list(text.encode()), seed=0, prompts_per_draw=count, order=config,
        context_tokens=64, max_new_tokens=8,
    )  # fmt: skip


def texts(prompts: PromptSource, draws: int) -> list[str]:
    return [prompt.text for draw in range(draws) for prompt in prompts.for_step(draw)]


def test_prompts_come_from_easy_to_hard_again_and_again(tmp_path: Path) -> None:
    prompts = source(tmp_path, ROWS, by="difficulty", difficulty_key="meta.level")
    seen = texts(prompts, 10)
    assert len(seen) == 30 and seen[:10] == seen[10:20] == seen[20:], "no prompt is left out at the end of an epoch"
    levels = {row["prompt"]: row["meta"]["level"] for row in ROWS}
    assert [levels[text] for text in seen[:10]] == sorted(levels.values())
    assert prompts.order.epoch(5) == 1.5
    assert [prompts.order.difficulty(i) for i in range(len(ROWS))] == [row["meta"]["level"] for row in ROWS]


def test_prompts_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert texts(source(tmp_path, ROWS, count=5, by="file"), 3) == [row["prompt"] for row in [*ROWS, *ROWS[:5]]]


def test_weight_is_the_share_of_failures_and_at_least_that_of_a_solved_prompt(tmp_path: Path) -> None:
    order = source(tmp_path, ROWS, by="success_rate", solved_weight=0.1).order
    assert order.weights({0: 1.0, 1: 0.25, 2: 0.0, 3: 0.95}) == [0.1, 0.75, 1.0, 0.1, *[1.0] * 6]
    rates = dict.fromkeys(range(9), 1.0)
    first = [order.indices(draw, (), rates)[0] for draw in range(2000)]
    # The unsolved one has weight 1 of 1.9: 1,053 of 2,000 on average, deviation 22.
    assert abs(first.count(9) - 2000 / 1.9) < 4 * 22.4


@pytest.mark.parametrize(
    ("rows", "order", "said"),
    [
        ([*ROWS, {"prompt": "q", "answer": "a"}], {"by": "difficulty", "difficulty_key": "meta.level"}, "jsonl:11: the difficulty 'meta.level' .* is missing"),
        ([*ROWS, {"prompt": "q", "answer": "a", "meta": {"level": "hard"}}], {"by": "difficulty", "difficulty_key": "meta.level"}, "must be a number"),
        (ROWS, {"by": "difficulty"}, "difficulty_key' is empty"),
        (ROWS, {"difficulty_key": "level"}, "difficulty_key' is 'level', which is not read"),
        (ROWS, {"by": "file", "solved_weight": 0.5}, "solved_weight' is 0.5, which is not read"),
        (ROWS, {"by": "success_rate", "solved_weight": 0}, "solved_weight' is 0;"),
    ],
)
def test_an_order_that_cannot_be_made_is_refused(rows: list[dict[str, Any]], order: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        source(tmp_path, rows, **order)


def test_a_task_without_end_has_no_order() -> None:
    with pytest.raises(UserError, match="task 'sort' generates its prompts without end"):
        PromptSource(TaskConfig("sort"), lambda text: list(text.encode()), seed=0, prompts_per_draw=2, order=PromptOrderConfig("success_rate"),
                     context_tokens=64, max_new_tokens=8)  # fmt: skip
