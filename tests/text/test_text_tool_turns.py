"""What stands between two turns of an episode, over chat templates of many families: the ids that the template gives the whole conversation."""

import random
import sys
from pathlib import Path

import pytest

from tandem.text.chat import ChatTemplate
from tandem.text.tool_turns import Call, Role, ToolTurns
from tandem.types import UserError

sys.path.insert(0, str(Path(__file__).parent))
from template_tokenizers import HERE, make_tokenizer

ROOT = Path(__file__).parents[2]
FAMILIES: dict[str, tuple[Role, list[str]]] = {
    "chatml": ("tool", ["<|im_end|>"]),
    "chatml_think": ("tool", ["<|im_end|>"]),
    "header": ("tool", ["<|eot_id|>", "<|eom_id|>"]),
    "inst": ("tool", ["</s>"]),
    "tool_outputs": ("tool", ["<|eos|>"]),
    "observation": ("tool", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "alternating": ("user", ["<end_of_turn>"]),
    "silent": ("user", ["<|end|>"]),
    "action": ("tool", ["<|END_OF_TURN_TOKEN|>"]),
    "role_tokens": ("tool", ["<|end_of_text|>"]),
    "trimmed": ("tool", ["<|im_end|>"]),
    "channels": ("tool", ["<|return|>", "<|call|>"]),
}
ONE_CALL = ("header", "channels", "llama3_1", "llama3_2", "gptoss")
ONE_ROUND = ("deepseekv3", "deepseek_r1_distill")
"""These templates forget the opening of the results in every round but the first; an episode writes it."""
SEVERAL_CALLS = ("deepseek_r1_distill",)
"""This template forgets the end of a turn with one call."""
REWRITES = ("qwen3_5_think", "qwen3_6", "nemotron_3_nano", "deepseekv3", "deepseek_r1_distill")
"""Templates that open a turn with reasoning and write an earlier turn without it."""
TEXT_ARGUMENTS = ("tool_outputs", "deepseekv3", "deepseek_r1_distill")
TRL_FAMILIES: dict[str, tuple[Role, list[str]]] = {
    "qwen2_5": ("tool", ["<|im_end|>"]),
    "qwen3": ("tool", ["<|im_end|>"]),
    "qwen3_instruct_2507": ("tool", ["<|im_end|>"]),
    "qwen3_5_think": ("tool", ["<|im_end|>"]),
    "qwen3_6": ("tool", ["<|im_end|>"]),
    "llama3": ("tool", ["<|eot_id|>"]),
    "llama3_1": ("tool", ["<|eot_id|>", "<|eom_id|>"]),
    "llama3_2": ("tool", ["<|eot_id|>", "<|eom_id|>"]),
    "deepseekv3": ("tool", ["<｜end▁of▁sentence｜>"]),
    "deepseek_r1_distill": ("tool", ["<｜end▁of▁sentence｜>"]),
    "glm4moe": ("tool", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "gptoss": ("tool", ["<|return|>", "<|call|>"]),
    "gemma": ("user", ["<end_of_turn>"]),
    "gemma3": ("user", ["<end_of_turn>"]),
    "phi3": ("user", ["<|end|>"]),
    "phi3_5": ("user", ["<|end|>"]),
    "cohere": ("user", ["<|END_OF_TURN_TOKEN|>"]),
    "lfm2": ("tool", ["<|im_end|>"]),
    "nemotron_3_nano": ("tool", ["<|im_end|>"]),
}
"""Templates of the models that TRL supports, with the tokens that end a completion of the model."""


def trl_templates() -> Path | None:
    """Returns the folder of TRL's templates where the benchmarks' peers are installed."""
    return next(iter(ROOT.glob(".venv-peer/lib/python*/site-packages/trl/chat_templates")), None)


def conversation(name: str, role: Role, rounds: int, draw: random.Random) -> list[dict]:
    """Returns a question, ``rounds`` of calls with their results, and an answer."""
    messages: list[dict] = [{"role": "user", "content": "What is it?"}]
    for turn in range(rounds):
        count = 1 if name in ONE_CALL else draw.randint(1, 3) if name not in SEVERAL_CALLS else draw.randint(2, 3)
        results = [draw.choice(("42", "a longer\nresult of two lines", '{"x": [1, 2]}', "Zürich")) for _ in range(count)]
        if role == "user":
            messages += [{"role": "assistant", "content": f"compute step {turn}"}, {"role": "user", "content": "\n".join(results)}]
            continue
        calls = []
        for number in range(count):
            arguments: object = {"expression": f"{turn}+{number}"}
            if name in TEXT_ARGUMENTS:
                arguments = f'{{"expression": "{turn}+{number}"}}'
            calls.append({"id": f"call{turn:02}{number:03}", "type": "function", "function": {"name": "calculator", "arguments": arguments}})
        messages.append({"role": "assistant", "content": None if name in TEXT_ARGUMENTS else "", "tool_calls": calls})
        messages += [{"role": "tool", "name": "calculator", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, results, strict=True)]
    return [*messages, {"role": "assistant", "content": "It is 42."}]


def check_ids_of_whole_conversations(name: str, role: Role, ends: list[str], template: str, folder: Path) -> int:
    """Checks that an episode has the ids of the whole conversation at each of its turns, for random conversations. Returns how many turns were compared
    whole, and not by what follows the assistant's turn alone: a template may rewrite what stands before."""
    tokenizer, chat = make_tokenizer(folder, template, ends)
    turns, draw, compared = ToolTurns.make(chat, tokenizer, role), random.Random(0), 0
    end_ids = set(tokenizer.eos_token_ids)

    def encoded(messages: list[dict]) -> list[int]:
        return tokenizer.encode(chat.render(messages, add_generation_prompt=True))

    for rounds in (1, 1, 2, 3) if name not in ONE_ROUND else (1, 1):
        messages = conversation(name, role, rounds, draw)
        ids, place = encoded(messages[:1]), 1
        while place < len(messages) - 1:
            after = place + 1
            while messages[after]["role"] in ("tool", "user") and after < len(messages) - 1:
                after += 1
            called, results = messages[place], [message["content"] for message in messages[place + 1 : after]]
            calls = [Call("calculator", call["id"]) for call in called.get("tool_calls", [])] or [Call("unknown", "call00000")]
            whole = encoded(messages[:after])
            if whole[: len(ids)] == ids:
                stop = next(i for i in range(len(ids), len(whole)) if whole[i] in end_ids)
                sampled = whole[len(ids) : stop + 1]
                ids = ids + sampled + turns.between(calls, results, sampled[-1])
                assert ids == whole, (name, tokenizer.decode(ids, False), tokenizer.decode(whole, False))
                compared += 1
            else:
                last = max(i for i, token in enumerate(whole) if token in end_ids and i < len(whole) - 1)
                tail = turns.between(calls, results, end_of(tokenizer, whole, end_ids, last))
                assert whole[-len(tail) :] == tail, name
                ids = whole
            place = after
    return compared


def end_of(tokenizer, whole: list[int], end_ids: set[int], last: int) -> int:
    """Returns the end token of the assistant's last turn: the last but one of ``whole``, where the result's turn ends with one too."""
    ends = [token for token in whole[: last + 1] if token in end_ids]
    return ends[-2] if len(ends) > 1 else ends[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_has_the_ids_of_the_whole_conversation(name: str, tmp_path: Path) -> None:
    role, ends = FAMILIES[name]
    compared = check_ids_of_whole_conversations(name, role, ends, (HERE / f"{name}.jinja").read_text(), tmp_path)
    assert compared >= 4


@pytest.mark.full
@pytest.mark.parametrize("name", TRL_FAMILIES)
def test_an_episode_has_the_ids_of_the_whole_conversation_with_the_templates_of_models(name: str, tmp_path: Path) -> None:
    folder = trl_templates()
    if folder is None:
        pytest.skip("the benchmarks' peers are not installed: make .venv-peer/.installed")
    role, ends = TRL_FAMILIES[name]
    compared = check_ids_of_whole_conversations(name, role, ends, (folder / f"{name}.jinja").read_text(), tmp_path)
    assert compared == 0 if name in REWRITES else compared >= 4


def made(tmp_path: Path, name: str, role: Role | None = None) -> ToolTurns:
    own, ends = FAMILIES[name]
    tokenizer, chat = make_tokenizer(tmp_path, (HERE / f"{name}.jinja").read_text(), ends)
    return ToolTurns.make(chat, tokenizer, role or own)


def text(turns: ToolTurns, last: str | None, results: tuple[str, ...] = ("42",)) -> str:
    calls = [Call("calculator", f"call0000{i}") for i in range(len(results))]
    token = None if last is None else turns.tokenizer.encode(last)[-1]
    return turns.tokenizer.decode(turns.between(calls, results, token), skip_special_tokens=False)


def test_the_separator_after_the_end_of_a_turn_is_not_lost(tmp_path: Path) -> None:
    # The line break of verl's issue 6719: the model stops at <|im_end|> and never writes what the template puts after it.
    opening = "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    turns = made(tmp_path, "chatml")
    assert text(turns, "<|im_end|>") == "\n" + opening
    # A turn that a stop text ended has not written its end token, which is then an observation.
    assert text(turns, ">") == text(turns, None) == "<|im_end|>\n" + opening


def test_a_turn_that_another_end_token_ended_is_continued(tmp_path: Path) -> None:
    # Of Llama's two end tokens the model may write either; the template writes the one of calls.
    turns = made(tmp_path / "header", "header")
    after = '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    assert text(turns, "<|eom_id|>") == text(turns, "<|eot_id|>") == after
    # GLM ends a turn with the token that opens the next one, which is written where the model wrote another.
    turns = made(tmp_path / "observation", "observation")
    assert text(turns, "<|observation|>") == "\n42<|assistant|>"
    assert text(turns, "<|endoftext|>") == "<|observation|>\n42<|assistant|>"


def test_reasoning_of_earlier_turns_is_not_read_from_the_template(tmp_path: Path) -> None:
    # chatml_think removes it from every turn but the last (NeMo-RL's issue 2822); the episode keeps the tokens that it sampled.
    turns = made(tmp_path, "chatml_think")
    assert text(turns, "<|im_end|>") == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_several_results_stand_together(tmp_path: Path) -> None:
    assert text(made(tmp_path / "a", "chatml"), "<|im_end|>", ("1", "2")).count("<tool_response>") == 2
    assert '"tool_call_id": "1", "results": "b"' in text(made(tmp_path / "b", "action"), "<|END_OF_TURN_TOKEN|>", ("a", "b"))


def test_a_template_that_cannot_show_results_is_one_clear_line(tmp_path: Path) -> None:
    for name, problem in (("alternating", "roles must alternate"), ("silent", "does not show the content of messages with the role 'tool'")):
        with pytest.raises(UserError, match=problem) as error:
            made(tmp_path / name, name, "tool")
        assert "set rollout.multi_turn.observation_role to user" in str(error.value) and "\n" not in str(error.value)


def test_a_model_whose_end_token_is_not_the_template_s_is_one_clear_line(tmp_path: Path) -> None:
    tokenizer, chat = make_tokenizer(tmp_path, (HERE / "chatml.jinja").read_text(), ["<|endoftext|>"])
    with pytest.raises(UserError, match=r"none of the tokens that end a completion, <\|endoftext\|>: name the right ones as eos_token_id"):
        ToolTurns.make(chat, tokenizer)
    assert isinstance(chat, ChatTemplate)
