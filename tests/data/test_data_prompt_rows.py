"""Prompts of the forms that TRL, verl and OpenAI document, read from their own examples."""

import json
from typing import Any

import pytest

from tandem.data.rows.preference_rows import read_preference
from tandem.data.tasks.base import TaskItem
from tandem.data.tasks.prompt_rows import PromptKeys, find_keys, read_prompt
from tandem.types import UserError

SKY = [{"role": "user", "content": "What color is the sky?"}]
"""TRL, "Dataset formats and types"."""
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [
        {
            "role": "user",
            "content": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell "
            'altogether in April and May? Let\'s think step by step and output the final answer after "####".',
        }
    ],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {
        "split": "train", "index": 0, "question": "Natalia sold clips to 48 of her friends in April, ...",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
    },
}  # fmt: skip
"""A row as verl's examples/data_preprocess/gsm8k.py writes it."""
WEATHER = {
    "messages": [
        {"role": "user", "content": "What is the weather in San Francisco?"},
        {"role": "assistant", "tool_calls": [{"id": "call_id", "type": "function", "function": {"name": "get_current_weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_id", "content": "21.0"},
        {"role": "assistant", "content": "It is 21 degrees celsius in San Francisco, CA"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_current_weather", "description": "Get the current weather",
                "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
            },
        }
    ],
}  # fmt: skip
"""OpenAI, "Fine-tuning examples: tool calling"."""


def read(*rows: dict[str, Any], prompt_key: str = "auto", answer_key: str = "auto") -> list[TaskItem]:
    placed = [(f"f:{i}", row) for i, row in enumerate(rows, 1)]
    keys = find_keys(placed, prompt_key, answer_key)
    return [read_prompt(where, row, keys) for where, row in placed]


def test_trls_standard_and_conversational_prompts() -> None:
    (standard,) = read({"prompt": "The sky is"})
    assert (standard.text, standard.messages, standard.ground_truth) == ("The sky is", (), None)
    (conversational,) = read({"prompt": SKY, "ground_truth": "blue", "level": 1})
    assert (conversational.messages, conversational.ground_truth) == (tuple(SKY), "blue")
    assert conversational.columns == {"ground_truth": "blue", "level": 1}


def test_verls_row_is_read_without_a_key_and_keeps_what_its_reward_functions_take() -> None:
    for rows in (read(VERL), read(VERL, prompt_key="prompt", answer_key="reward_model.ground_truth")):
        (item,) = rows
        assert item.messages == tuple(VERL["prompt"]) and item.ground_truth == "72"
        assert item.columns == {key: value for key, value in VERL.items() if key != "prompt"}


def test_openais_messages_end_with_the_answer_and_bring_their_tools() -> None:
    (item,) = read(WEATHER)
    assert item.messages == tuple(WEATHER["messages"][:-1]) and item.tools == tuple(WEATHER["tools"])
    assert item.ground_truth == "It is 21 degrees celsius in San Francisco, CA"
    (as_text,) = read({**WEATHER, "tools": json.dumps(WEATHER["tools"])})
    assert as_text.tools == item.tools


def test_a_table_that_fills_missing_keys_with_null_gives_the_same_messages_and_tools() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    (filled,) = pyarrow.Table.from_pylist([WEATHER]).to_pylist()
    assert "tool_calls" in filled["messages"][0]
    assert [(i.messages, i.tools) for i in read(filled)] == [(i.messages, i.tools) for i in read(WEATHER)]


def test_content_of_text_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "What color "}, {"type": "text", "text": "is the sky?"}]
    (item,) = read({"prompt": [{"role": "user", "content": parts}]})
    assert item.messages == tuple(SKY)


def test_keys_of_gsm8k_and_math_are_found_and_every_key_can_be_named() -> None:
    assert [(i.text, i.ground_truth) for i in read({"question": "q", "answer": "a #### 1"})] == [("q", "a #### 1")]
    assert [(i.text, i.ground_truth) for i in read({"problem": "p", "level": "Level 1", "solution": r"\boxed{2}"})] == [("p", r"\boxed{2}")]
    row = {"in": {"text": "p"}, "a.b": "dots", "a": {"b": "nested"}}
    assert [(i.text, i.ground_truth) for i in read(row, prompt_key="in.text", answer_key="a.b")] == [("p", "dots")]
    assert read({"prompt": "p", "answer": "x"}, answer_key="")[0].ground_truth is None


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"promt": "a", "answer": "b"}], "f:1: key 'prompt' is missing; the row has 'promt', 'answer': set task.prompt_key to the key of"),
        ([{"promt": "a", "answer": "b"}], "the key of the prompt, for example promt"),
        ([{"chosen": "a", "rejected": "b"}], "preference pairs without a 'prompt', for DPO"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": SKY, "answer": "b"}], "f:2: 'prompt' is a list; and the first row has a text: use one form"),
        ([{"prompt": SKY}, {"prompt": "a"}], "f:2: 'prompt' is not a list of messages (it is a text, and the first row has messages"),
        ([{"prompt": ["a", "b"]}], "'prompt' is a list; it must be a text, or a list of messages"),
        ([{"prompt": [{"from": "human", "value": "a"}]}], "as ShareGPT has; rename them to 'role' (user, assistant) and 'content'"),
        ([{"prompt": [{"role": "human", "content": "a"}]}], "message 1 has the role 'human'; a role is one of system, developer, user, assistant, tool"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}], "has a part of type 'image'; only text is read"),
        ([{"prompt": [*SKY, {"role": "assistant", "content": "blue"}], "answer": "x"}], "the last message of 'prompt' is the assistant's"),
        ([{"prompt": SKY, "tools": "not json"}], "'tools' is a text that is not JSON"),
        ([WEATHER, {"messages": SKY}], "f:2: the last message of 'messages' is not the assistant's, as it is in the first row"),
    ],
)  # fmt: skip
def test_a_row_of_another_form_is_one_line_with_its_place(rows: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        read(*rows)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_the_keys_are_described_in_one_line() -> None:
    assert find_keys([("f:1", VERL)], "auto", "auto").describe() == "prompts under 'prompt' (messages), answers under 'reward_model.ground_truth'"
    assert PromptKeys("messages", "", True, True).describe() == "prompts under 'messages' (messages), answers in the last message"


def test_trls_preference_pairs_with_an_explicit_and_an_implicit_prompt() -> None:
    blue, green = {"role": "assistant", "content": "It is blue."}, {"role": "assistant", "content": "It is green."}
    explicit = read_preference("f:1", {"prompt": SKY, "chosen": [blue], "rejected": [green]})
    implicit = read_preference("f:1", {"chosen": [*SKY, blue], "rejected": [*SKY, green]})
    assert explicit == implicit and explicit.prompt == tuple(SKY) and explicit.chosen == (blue,)
    explicit = read_preference("f:1", {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."})
    assert explicit == read_preference("f:1", {"chosen": "The sky is blue.", "rejected": "The sky is green."})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a"}, "f:9: key 'rejected' is missing; the line has 'chosen'"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "are the same, so there is no preference"),
        ({"prompt": "p", "chosen": SKY, "rejected": SKY}, "partly texts and partly messages"),
        ({"prompt": "p", "chosen": "", "rejected": "a"}, "'chosen' is an empty text"),
        ({"prompt": "p", "chosen": 3, "rejected": "a"}, "'chosen' is a number; it must be a text or a list of messages"),
        ({"chosen": "x", "rejected": "y"}, "do not begin with the same prompt"),
    ],
)
def test_a_pair_that_is_none_is_one_line(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        read_preference("f:9", row)
    assert problem in str(caught.value)
