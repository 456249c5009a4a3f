import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.config.task import TaskConfig
from tandem.data.prompt_format import ChatFormat, Messages
from tandem.data.prompts import PromptSource
from tandem.types import UserError

END = 7


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def source(config: TaskConfig | None = None, **settings: Any) -> PromptSource:
    merged: dict[str, Any] = {"seed": 0, "prompts_per_draw": 4, "context_tokens": 64, "max_new_tokens": 16, **settings}
    return PromptSource(config or TaskConfig("sort"), merged.pop("encode", encode), **merged)


def jsonl(folder: Path, prompts: list[str]) -> TaskConfig:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "yes"}) + "\n" for p in prompts), encoding="utf-8")
    return TaskConfig("dataset", path=str(path))


def test_prompts_are_tokenised_once_and_carry_what_the_judges_need() -> None:
    prompt = source().for_step(3)[1]
    assert prompt.id == "train-13"
    assert prompt.token_ids == tuple(encode(prompt.text))
    assert prompt.task == "sort"
    assert prompt.ground_truth == "".join(sorted(prompt.text.removesuffix("=")))


def test_a_step_can_be_asked_for_first_or_last_and_is_the_same() -> None:
    whole = [source().for_step(step) for step in range(6)]
    fresh = source()
    assert [fresh.for_step(step) for step in (5, 0, 3)] == [whole[5], whole[0], whole[3]]


def test_ids_are_unique_within_a_step_and_over_the_splits(tmp_path: Path) -> None:
    for prompts in (source(), source(jsonl(tmp_path, [f"q{i}" for i in range(30)]))):
        ids = [p.id for step in range(4) for p in prompts.for_step(step)]
        assert len(ids) == len(set(ids))
        evaluation = [p.id for p in (*prompts.held_out(3), *prompts.fresh(3))]
        assert len(evaluation) == len(set(evaluation)) == 6
        assert not set(ids) & set(evaluation)
        assert not any("/" in identifier for identifier in (*ids, *evaluation))


def test_held_out_and_fresh_prompts_are_disjoint_and_stay_the_same() -> None:
    prompts = source()
    held_out, fresh = prompts.held_out(200), prompts.fresh(200)
    assert prompts.held_out(200) == held_out == source().held_out(200)
    assert not {p.text for p in held_out} & {p.text for p in fresh}
    assert not {p.text for p in fresh} & {p.text for step in range(200) for p in prompts.for_step(step)}


def test_a_prompt_longer_than_the_context_leaves_room_for_is_named_by_line(tmp_path: Path) -> None:
    config = jsonl(tmp_path, ["short"] * 4 + ["x" * 48] + [f"q{i}" for i in range(9)])
    source(config)
    config = jsonl(tmp_path, ["short"] * 4 + ["x" * 49] + [f"q{i}" for i in range(9)])
    with pytest.raises(UserError) as error:
        source(config)
    assert str(error.value).startswith(f"{config.path}:5: the prompt has 49 tokens, more than 48 (a context of 64 less 16 new")


def test_a_made_prompt_that_is_too_long_is_named_before_work_begins() -> None:
    with pytest.raises(UserError, match=r"sort, training prompt 0: the prompt has \d+ tokens, more than 3"):
        source(context_tokens=19)


def test_a_task_that_cannot_hold_instances_out_is_refused_before_work_begins() -> None:
    with pytest.raises(UserError, match="too few distinct instances for a 'held_out' split"):
        source(TaskConfig("addition", 1, 1, held_out_share=0.0001))


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    config = jsonl(tmp_path, [f"q{i}" for i in range(9)] + ["???"])
    with pytest.raises(UserError, match=r"data.jsonl:10: the prompt has no tokens"):
        source(config, encode=lambda text: [] if text == "???" else [1])


def test_fewer_prompts_than_a_step_takes_are_refused_before_work_begins(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fewer than rollout.prompts_per_step"):
        source(jsonl(tmp_path, ["a", "b", "c", "d"]))


def test_the_template_is_filled_and_braces_are_left_alone(tmp_path: Path) -> None:
    template = 'Answer as {"answer": ...}.\n{prompt}\nAnswer:'
    path = jsonl(tmp_path, [f"{{q{i}}}" for i in range(20)]).path
    prompts = source(TaskConfig("dataset", path=path, prompt_template=template))
    text = prompts.for_step(0)[0].text
    assert text.startswith('Answer as {"answer": ...}.\n{q')
    assert text.endswith("}\nAnswer:")


def encode_whole(messages: Messages, tools: object) -> tuple[list[int], list[int]]:
    raise AssertionError("no prompt has an answer")


def test_chat_goes_through_the_template_of_the_tokenizer() -> None:
    def render(messages: Messages, tools: object) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    config = TaskConfig("sort", chat=True, system_prompt="Be brief.")
    text = source(config, chat_format=ChatFormat(render, encode, encode_whole), context_tokens=128).for_step(0)[0].text
    assert text.startswith("<system>Be brief.<user>")
    assert text.endswith("=<assistant>")
    with pytest.raises(UserError, match="no chat template"):
        source(config)


def test_prompts_that_are_messages_go_through_the_template_with_their_tools(tmp_path: Path) -> None:
    def render(messages: Messages, tools: object) -> str:
        return f"{tools}" + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    path, system = tmp_path / "data.jsonl", {"role": "system", "content": "own"}
    rows = [{"prompt": [*([system] if i % 2 else []), {"role": "user", "content": f"q{i}"}], "answer": "a"} for i in range(20)]
    path.write_text("".join(json.dumps({**row, "tools": [{"type": "t"}]}) + "\n" for row in rows))
    settings: dict[str, Any] = {"chat_format": ChatFormat(render, encode, encode_whole), "context_tokens": 128}
    prompts = source(TaskConfig("dataset", path=str(path), system_prompt="Be brief."), **settings)
    texts = {prompt.text for step in range(4) for prompt in prompts.for_step(step)}
    assert texts <= {f"({{'type': 't'}},)<system>{'own' if i % 2 else 'Be brief.'}<user>q{i}<assistant>" for i in range(20)} and len(texts) == 16
    assert prompts.for_step(0)[0].messages in [tuple(row["prompt"]) for row in rows]
    for wrong, said in (({"chat": False}, "only the chat template formats"), ({"prompt_template": "Q {prompt}"}, "'task.prompt_template' is 'Q {prompt}'")):
        with pytest.raises(UserError, match=said):
            source(TaskConfig("dataset", path=str(path), **wrong), **settings)


def test_a_system_prompt_for_texts_of_a_dataset_needs_chat(tmp_path: Path) -> None:
    config = jsonl(tmp_path, [f"q{i}" for i in range(20)])
    with pytest.raises(UserError, match=r"set task.chat to true"):
        source(TaskConfig("dataset", path=config.path, system_prompt="Be brief."))


def test_demonstrations_are_the_rollouts_prompts_with_an_answer_and_an_end() -> None:
    prompts = source()
    shown = list(itertools.islice(prompts.demonstrations(1, 0.5, END), 40))
    assert shown == [prompts.demonstration(i, 1, 0.5, END) for i in range(40)]
    for demonstration in shown:
        asked = "".join(map(chr, demonstration.prompt_token_ids))
        answered = "".join(map(chr, demonstration.completion_token_ids[:-1]))
        right = "".join(sorted(asked.removesuffix("=")))
        assert (answered == right) == demonstration.correct
        assert demonstration.completion_token_ids[-1] == END
    assert 5 < sum(d.correct for d in shown) < 35
    assert [d.prompt_token_ids for d in shown] != [d.prompt_token_ids for d in itertools.islice(prompts.demonstrations(2, 0.5, END), 40)]


def test_a_beginning_of_sequence_token_stands_once_in_a_demonstration() -> None:
    shown = source(encode=lambda text: [1, *encode(text)]).demonstration(0, 1, 0.0, END)
    assert shown.prompt_token_ids[0] == 1
    assert 1 not in shown.completion_token_ids


def test_a_tokenizer_that_joins_prompt_and_answer_is_refused() -> None:
    def joined(text: str) -> list[int]:
        return [
            999 if pair[0] == "=" and len(pair) == 2 else ord(pair[0])
            for pair in map("".join, itertools.zip_longest(text, text[1:], fillvalue=""))
        ]

    with pytest.raises(UserError, match="joins the end of prompt"):
        source(encode=joined).demonstration(0, 1, 0.0, END)


def test_a_demonstration_longer_than_the_context_is_named(tmp_path: Path) -> None:
    config = jsonl(tmp_path, [f"q{i}" for i in range(20)])
    with pytest.raises(UserError, match=r"data.jsonl:\d+: prompt and answer have \d+ tokens"):
        source(config, context_tokens=5, max_new_tokens=1).demonstration(0, 0, 0.0, END)
