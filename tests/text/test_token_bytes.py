"""The bytes that a token can stand for bound every text that fits a context, for tokenizers of every kind that has such a bound."""

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tandem.text.characters import make_character_tokenizer
from tandem.text.token_bytes import max_bytes_per_token

CORPUS = ["the quick brown fox jumps over the lazy dog " * 3, "naïve café, 你好世界 — 😀😃 and 1234   \n\n\n\n", " " * 60, "========" * 8] * 20
SPLIT = Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")


def byte_level(normalizer: object, *, split: bool = False) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(SPLIT, "isolated"), last]) if split else last
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken("<|a special token|>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    return backend


def byte_fallback(kind: str) -> Tokenizer:
    """Returns a tokenizer of Llama 2's kind (BPE) or of Gemma's normalizer with Unigram."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdefghij") + ["▁▁", "▁▁▁▁", "ab", "abab"]
    if kind == "bpe":
        merges = [("▁", "▁"), ("▁▁", "▁▁"), ("a", "b"), ("ab", "ab")]
        vocabulary = {token: number for number, token in enumerate(["<unk>", *tokens])}
        backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    else:
        backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((token, -1.0 - len(token)) for token in tokens)], unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def characters(folder: Path) -> Tokenizer:
    make_character_tokenizer("ascii", folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


BOUNDED = {
    "gpt2": lambda: byte_level(None),
    "qwen": lambda: byte_level(normalizers.NFC(), split=True),
    "nfkc": lambda: byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "llama2": lambda: byte_fallback("bpe"),
    "unigram": lambda: byte_fallback("unigram"),
}
REPEATED = [" ", "=", "ab", "\n", "\u1fbe\u0308\u0301", "\u212a", "\U0001d400", "あ", "😀", "e\u0302\u0301"]
MIXED = [" ", "<|a special token|>", "\u1100\u1161\u11a8", "the quick", "\x00", "\u0390"]
TEXTS = st.one_of(
    st.text(max_size=300),
    st.builds(lambda part, count: part * count, st.sampled_from(REPEATED), st.integers(1, 400)),
    st.builds("".join, st.lists(st.sampled_from(MIXED), max_size=60)),
)


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_more_bytes_than_its_tokens_can_stand_for(kind: str) -> None:
    backend = BOUNDED[kind]()
    bound = max_bytes_per_token(backend)
    assert bound is not None

    @settings(max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    @example("\u1fbe\u0308\u0301" * 200)
    @example(" " * 2000)
    def check(text: str) -> None:
        assert len(text.encode()) <= bound * len(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    check()


def test_the_bound_of_a_byte_level_tokenizer_without_normalizer_is_reached() -> None:
    backend = byte_level(None)
    longest = max((token for token in backend.get_vocab() if not token.startswith("<")), key=len)
    text = backend.decoder.decode([longest])
    special = "<|a special token|>"
    assert max_bytes_per_token(backend) == max(len(text.encode()), len(special))
    assert len(backend.encode(special, add_special_tokens=False).ids) == 1


def test_a_character_tokenizer_has_at_most_a_characters_bytes_or_a_special_tokens(tmp_path: Path) -> None:
    assert max_bytes_per_token(characters(tmp_path)) == len("<pad>")


def strip() -> Tokenizer:
    return byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]))


def collapse() -> Tokenizer:
    return byte_level(normalizers.Replace(Regex(" +"), " "))


def words() -> Tokenizer:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def one_unknown_word() -> Tokenizer:
    return Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))


def fused() -> Tokenizer:
    return Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True))


def dropping() -> Tokenizer:
    return Tokenizer(models.BPE({"a": 0}, []))


def taking_white_space() -> Tokenizer:
    backend = byte_level(None)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return backend


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (strip, "a" + " " * 9999), (collapse, " " * 9999), (words, "x" * 9999), (one_unknown_word, "x" * 9999), (fused, "x" * 9999),
        (dropping, "x" * 9999), (taking_white_space, " " * 9999 + "<mask>"), (word_piece, "x" * 9999),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_tokenizer_that_removes_text_has_no_bound(make: object, text: str) -> None:
    assert callable(make)
    backend = make()
    assert max_bytes_per_token(backend) is None
    assert len(backend.encode(text).ids) <= 3, "a text of any length has few tokens"


@pytest.mark.full
def test_no_normalizer_shrinks_text_by_more_than_its_factor() -> None:
    """The worst case over all of Unicode. A text in normal form C consists of characters that stand for their canonical decompositions, whose
    parts can each have been written as the longest character that decomposes to it."""
    everything = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    size = {character: len(character.encode()) for character in everything}
    for composed, decomposed in (("NFC", "NFD"), ("NFKC", "NFKD")):
        longest = dict(size)
        several = []
        for character in everything:
            parts = unicodedata.normalize(decomposed, character)
            if len(parts) == 1:
                longest[parts] = max(longest[parts], size[character])
            else:
                several.append((character, parts))
        assert all(size[character] <= sum(longest[part] for part in parts) for character, parts in several)
        assert max(longest[c] / size[c] for c in everything) <= shrink(decomposed)
        stable = (c for c in everything if unicodedata.is_normalized(composed, c))
        assert max(sum(longest[part] for part in unicodedata.normalize("NFD", c)) / size[c] for c in stable) <= shrink(composed)
    assert max(size[c] / len(c.lower().encode()) for c in everything) <= shrink("Lowercase")


def shrink(name: str) -> float:
    """Returns the factor of a normalizer, read from the bound of a tokenizer whose longest token has four bytes."""
    backend = Tokenizer(models.BPE({character: number for number, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.normalizer = getattr(normalizers, name)()
    bound = max_bytes_per_token(backend)
    assert bound is not None and json.loads(backend.to_str())["normalizer"]["type"] == name
    return bound / 4
