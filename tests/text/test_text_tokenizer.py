"""Token ids are those of transformers; special tokens of a folder are found; errors are reported."""

import json
import random
import shutil
import threading
import time

import pytest

from tandem.text.characters import ASCII, make_character_tokenizer
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

TEXTS = ["", "the lazy dog", "  two  spaces and a\nline ", "naïve 你好 😀", "<eos> in the text"]


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_ids_and_text_are_those_of_transformers(kind, request) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = request.getfixturevalue(kind)
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert (ours.bos_token_id, ours.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id)


def test_special_tokens_are_added_only_where_asked(byte_level, tmp_path) -> None:
    from tokenizers import processors

    shutil.copytree(byte_level, tmp_path / "t")
    backend = Tokenizer.from_folder(byte_level).backend
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    backend.enable_padding(length=16)
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "t" / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path / "t")
    plain = tokenizer.encode("the lazy dog")
    assert len(plain) > 2 and tokenizer.decode(plain) == "the lazy dog"
    assert tokenizer.encode("the lazy dog", add_special_tokens=True) == [1, *plain]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2,)),
        ({"config.json": 5}, (5,)),
        ({"config.json": 5, "generation_config.json": [7, 2]}, (7, 2)),
        ({"config.json": [5, 6], "generation_config.json": None}, (5, 6)),
    ],
)
def test_end_of_sequence_ids_come_from_the_most_particular_file(files, expected, byte_level, tmp_path) -> None:
    shutil.copytree(byte_level, tmp_path / "t")
    for name, value in files.items():
        (tmp_path / "t" / name).write_text(json.dumps({"eos_token_id": value}))
    assert Tokenizer.from_folder(tmp_path / "t").eos_token_ids == expected


def test_a_special_token_may_be_written_as_an_object_or_be_absent(byte_level, tmp_path) -> None:
    shutil.copytree(byte_level, tmp_path / "t")
    settings = {"eos_token": {"content": "<eos>", "lstrip": False}}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(tmp_path / "t")
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id) == ((2,), None, None)


def test_faulty_folders_are_named_in_one_line(byte_level, tmp_path) -> None:
    def fails(file: str, content: str | None, *named: str) -> None:
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        shutil.copytree(byte_level, tmp_path / "t")
        (tmp_path / "t" / file).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "t" / file).write_text(content)
        with pytest.raises(UserError) as error:
            Tokenizer.from_folder(tmp_path / "t")
        assert all(part in str(error.value) for part in named) and "\n" not in str(error.value)

    fails("tokenizer.json", None, "no tokenizer.json")
    fails("tokenizer.json", "{}", "tokenizer.json", "not a tokenizer")
    fails("tokenizer_config.json", "{", "tokenizer_config.json", "JSON")
    fails("tokenizer_config.json", '{"eos_token": "<end>"}', "eos_token", "'<end>'")
    fails("generation_config.json", '{"eos_token_id": "2"}', "generation_config.json", "'2'")


@pytest.fixture(scope="module")
def characters(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("characters")
    make_character_tokenizer("ascii", folder)
    return Tokenizer.from_folder(folder)


def test_characters_come_back_as_they_went(characters) -> None:
    assert len(ASCII) == 96 and characters.vocab_size == 99
    draw = random.Random(0)
    for length in (0, 1, 2, 50, 500):
        text = "".join(draw.choices(ASCII, k=length))
        ids = characters.encode(text)
        assert len(ids) == length and characters.decode(ids) == text
    assert characters.decode(characters.encode("  a  .  b ,\n\n c ")) == "  a  .  b ,\n\n c "


def test_a_character_tokenizer_loads_in_transformers(tmp_path) -> None:
    from transformers import AutoTokenizer

    make_character_tokenizer("0123456789 ,你\n", tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = " 12 , 3 ,你,\n 4"
    assert theirs(text).input_ids == ours.encode(text) and theirs.decode(ours.encode(text)) == text
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert ours.decode([1, 3, 2]) == "0" and ours.decode([1, 3, 2], skip_special_tokens=False) == "<bos>0<eos>"


@pytest.mark.parametrize(("text", "named"), [("caf\u00e9", "'é' (U+00E9, at 3)"), ("a\tb", r"'\t' (U+0009, at 1)")])
def test_an_unknown_character_is_named_and_never_dropped(text, named, characters) -> None:
    with pytest.raises(UserError) as error:
        characters.encode(text)
    assert named in str(error.value)


def test_a_lone_surrogate_is_named(characters) -> None:
    with pytest.raises(UserError, match=r"lone surrogate \(U\+D83D, at 2\)"):
        characters.encode("ab\ud83d")


def test_other_threads_run_while_a_long_text_is_encoded(byte_level) -> None:
    tokenizer = Tokenizer.from_folder(byte_level)
    encoding = threading.Thread(target=tokenizer.encode, args=("x" * 400_000,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        turns += 1
        time.sleep(0.0001)
    assert turns > 3, "the thread held the interpreter"


def test_impossible_character_sets_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="'a' twice"):
        make_character_tokenizer("aba", tmp_path)
    with pytest.raises(UserError, match="empty"):
        make_character_tokenizer("", tmp_path)


@pytest.mark.parametrize("token", [99, -1])
def test_an_id_outside_the_vocabulary_is_refused(token, characters) -> None:
    with pytest.raises(UserError, match=f"token id {token} "):
        characters.decode([3, token])
