"""Preference pairs become the tokens and masks of TRL's DPO trainer, chosen and rejected side by side, and what is no preference is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from example_tokenizer import MARKED, PLAIN, examples_in, save_tokenizer
from transformers import AutoTokenizer

from tandem.data.example_stream import ExampleStream
from tandem.data.shard_files import ShardFiles
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, read_dataset, tokenize
from tandem.storage.files import open_storage
from tandem.types import UserError

FORM = DocumentFormat(suffixes=(), pairs=True)
TEXTS = [{"prompt": f"{i} + 1 =", "chosen": f" {i + 1}", "rejected": f" {i} or so"} for i in range(8)]
TURNS = [
    {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2 + 2?"},
]  # fmt: skip
CHATS = [
    {"prompt": TURNS[:size], "chosen": [{"role": "assistant", "content": "It is 4."}], "rejected": [{"role": "assistant", "content": "No 😀"}]}
    for size in (2, 4)
]
# The prompt is what both begin with.
IMPLICIT = {"chosen": [*TURNS[:2], {"role": "assistant", "content": "4"}], "rejected": [*TURNS[:2], {"role": "assistant", "content": "5"}]}


@pytest.fixture(scope="module", params=[MARKED, PLAIN], ids=["marked", "plain"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("t") / "tokenizer", request.param)


def made(folder: Path, tokenizer: Path, rows: list[Any], **changed: Any) -> Path:
    (folder / "source").mkdir()
    (folder / "source" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"form": FORM, "workers": 1, **changed}
    tokenize(TokenizeSettings(str(folder / "source"), str(folder / "pairs"), str(tokenizer), **settings))  # type: ignore[arg-type]
    return folder / "pairs"


def side_of_trl(folder: Path, row: dict[str, Any], side: str) -> tuple[list[int], list[int]]:
    """TRL's DPOTrainer, ``tokenize_fn``: everything after the prompt with its generation prompt is the completion; texts get an end token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if isinstance(row[side], str):
        asked = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row[side], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return asked + answer, [0] * len(asked) + [1] * len(answer)
    asked = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*row["prompt"], *row[side]], return_dict=True)["input_ids"]
    assert whole[: len(asked)] == asked
    return whole, [0] * len(asked) + [1] * (len(whole) - len(asked))


def test_tokens_and_masks_are_those_of_trl_and_of_an_earlier_answer_in_the_prompt_nothing_is_learned(tokenizer: Path, tmp_path: Path) -> None:
    folder = made(tmp_path, tokenizer, TEXTS + CHATS + [IMPLICIT])
    explicit = {"prompt": IMPLICIT["chosen"][:-1], "chosen": IMPLICIT["chosen"][-1:], "rejected": IMPLICIT["rejected"][-1:]}
    wanted = [side_of_trl(tokenizer, row, side) for row in [*TEXTS, *CHATS, explicit] for side in ("chosen", "rejected")]
    assert examples_in(folder) == wanted
    dataset = read_dataset(open_storage(str(folder)))
    assert dataset.pairs and dataset.documents == 2 * (len(TEXTS) + len(CHATS) + 1)
    assert json.loads((folder / "plan.json").read_text()).keys() >= {"pairs", "chat_template"}


def test_a_pair_comes_as_two_pieces_once_an_epoch_and_is_left_out_whole(tokenizer: Path, tmp_path: Path) -> None:
    long = {"prompt": "a", "chosen": "b", "rejected": "b " * 300}
    files = ShardFiles(open_storage(str(made(tmp_path, tokenizer, [*TEXTS, long]))))
    stream = ExampleStream([files.lengths(0)], files.open, seed=3, longest=60, each=2)
    assert (stream.examples, stream.left_out) == (len(TEXTS), 1)
    found = [stream.sequence(i) for i in range(2 * len(TEXTS))]
    for epoch in (found[: len(TEXTS)], found[len(TEXTS) :]):
        assert sorted(chosen.document for chosen, _ in epoch) == list(range(0, 2 * len(TEXTS), 2))
    assert all(rejected.document == chosen.document + 1 for chosen, rejected in found)
    shown = [[list(piece.tokens) for piece in pair] for pair in found]
    assert all(side_of_trl(tokenizer, TEXTS[pair[0].document // 2], "rejected")[0] == tokens[1] for pair, tokens in zip(found, shown, strict=True))


BAD: list[tuple[Any, str]] = [
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same, so there is no preference"),
    ({"prompt": "a", "chosen": "b"}, "key 'rejected' is missing"),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is an empty text"),
    ({"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "x"}]}, "partly texts and partly messages"),
    ({"prompt": TURNS[:2], "chosen": TURNS[3:], "rejected": TURNS[2:3]}, "no message is the assistant's"),
    ([1], "it is not a JSON object"),
]


@pytest.mark.parametrize(("row", "problem"), BAD, ids=[problem[:30] for _, problem in BAD])
def test_what_is_no_preference_is_refused_by_its_row_or_skipped_if_that_is_asked_for(row: Any, problem: str, marked: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        made(tmp_path, marked, [TEXTS[0], row])
    message = str(caught.value)
    assert message.startswith(f"a.jsonl, the line at byte {len(json.dumps(TEXTS[0])) + 1}: ") and problem in message and "\n" not in message
    (tmp_path / "again").mkdir()
    folder = made(tmp_path / "again", marked, [TEXTS[0], row], form=DocumentFormat(suffixes=(), pairs=True, skip_broken=True))
    dataset = read_dataset(open_storage(str(folder)))
    assert (dataset.documents, dataset.skipped) == (2, 1)


def test_answers_that_differ_in_text_alone_and_not_in_tokens_are_no_preference(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", "{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    row = {"prompt": TURNS[1:2], "chosen": [{"role": "assistant", "content": "4"}], "rejected": [{"role": "assistant", "content": " 4 "}]}
    with pytest.raises(UserError, match=r"a.jsonl, the line at byte 0: 'chosen' and 'rejected' have the same tokens"):
        made(tmp_path, folder, [row])


def test_both_answers_of_a_question_are_on_one_side_of_the_split(marked: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i % 20}", "chosen": f"{i}", "rejected": f"not {i}"} for i in range(60)]
    asked = []
    for side in ("train", "held_out"):
        (tmp_path / side).mkdir()
        examples = examples_in(made(tmp_path / side, marked, rows, side=side, held_out_share=0.3))
        assert examples and len(examples) % 2 == 0
        asked.append({tuple(ids[: learned.index(1)]) for ids, learned in examples})
    assert not asked[0] & asked[1] and len(asked[0] | asked[1]) == 20


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("t") / "marked", MARKED)
