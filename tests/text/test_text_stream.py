"""Streamed text: never part of a character, the whole text at the end, stop strings across any chunk boundary."""

import random

import pytest

from tandem.text.detokenize import REPLACEMENT, IncrementalDetokenizer
from tandem.text.stop import StopMatcher
from tandem.text.tokenizer import Tokenizer

TEXTS = ["the lazy dog", "  spaces \n and lines ", "naïve café 你好世界", "😀😃 é 😀", "x<eos>the<eos> fox", "你", ""]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_pieces_join_to_the_text_and_hold_no_half_character(kind, skip, request) -> None:
    tokenizer = Tokenizer.from_folder(request.getfixturevalue(kind))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        pieces = [stream.push(token) for token in ids]
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert stream.finish() == ""
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_shows_when_its_last_byte_is_there(byte_level) -> None:
    tokenizer = Tokenizer.from_folder(byte_level)
    ids = tokenizer.encode("a") + bytes_of(tokenizer, "語") + tokenizer.encode("b")
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push(token) for token in ids] == ["a", "", "", "語", "b"]


def bytes_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns one token per byte, whatever merges the vocabulary has."""
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()), "the character must not be in the training text"
    return ids


def test_bytes_that_never_become_a_character_are_shown_at_the_end(byte_level) -> None:
    tokenizer = Tokenizer.from_folder(byte_level)
    ids = [*tokenizer.encode("a"), *bytes_of(tokenizer, "語")[:2]]
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert pieces == ["a", "", ""] and stream.finish() == tokenizer.decode(ids)[1:] != ""


def test_random_tokens_stream_to_the_text_of_them_all(byte_level) -> None:
    tokenizer = Tokenizer.from_folder(byte_level)
    draw = random.Random(1)
    for _ in range(200):
        ids = draw.choices(range(3, tokenizer.vocab_size), k=draw.randint(1, 40))
        stream = IncrementalDetokenizer(tokenizer)
        pieces = [stream.push(token) for token in ids] + [stream.finish()]
        assert "".join(pieces) == tokenizer.decode(ids)


def run(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop)
    shown = [matcher.push(piece) for piece in pieces]
    return "".join(shown) + matcher.finish(), matcher.stopped


@pytest.mark.parametrize(
    ("stops", "text", "expected", "stopped"),
    [
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["END"], "theENDs", "the", "END"),
        (["END"], "theENd", "theENd", None),
        (["aab"], "aaaab", "aa", "aab"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["c", "abc"], "xabc", "x", "abc"),
        ([], "anything", "anything", None),
        (["x"], "", "", None),
        (["<|im_end|>", "<|"], "a<|im_end|>", "a", "<|"),
    ],
)
def test_stop_strings_are_found_however_the_text_is_cut(stops, text, expected, stopped) -> None:
    draw = random.Random(0)
    cuts = [[text], list(text)]
    for _ in range(20):
        at = sorted(draw.sample(range(len(text) + 1), k=min(3, len(text))))
        cuts.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    assert {run(stops, pieces) for pieces in cuts} == {(expected, stopped)}
    with_stop = expected + (stopped or "")
    assert {run(stops, pieces, include_stop=True) for pieces in cuts} == {(with_stop, stopped)}


def test_text_that_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    matcher = StopMatcher(["STOP", "\nUser:"])
    assert [matcher.push(p) for p in ("Hello", "\n", "Use", "d", " STO")] == ["Hello", "", "", "\nUsed", " "]
    assert matcher.push("P and more") == "" and matcher.stopped == "STOP"
    assert matcher.push("after") == "" and matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize(
    ("stops", "before", "after", "expected", "stopped"),
    [
        (["ab"], "xab", "yab", "xaby", "ab"),
        (["ab"], "xa", "bc", "x", "ab"),
        (["ab", "xabc"], "xab", "d", "xabd", None),
        (["ab", "xabc"], "xab", "c", "", "xabc"),
        (["aa"], "aa", "a", "a", "aa"),
        (["b"], "bbb", "ab", "bbba", "b"),
        (["ab"], "ab", "", "ab", None),
    ],
)
def test_a_stop_string_counts_where_it_ends_and_not_where_it_begins(stops, before, after, expected, stopped) -> None:
    draw = random.Random(0)
    for _ in range(20):
        matcher, cut = StopMatcher(stops), draw.randint(0, len(before))
        shown = [matcher.push(piece, may_stop=False) for piece in (before[:cut], before[cut:])]
        shown += [matcher.push(piece) for piece in after]
        assert ("".join(shown) + matcher.finish(), matcher.stopped) == (expected, stopped)
