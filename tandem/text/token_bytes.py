"""How many bytes of text one token can stand for: the limit above which a text cannot fit a context, known without encoding it."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

_SHRINK = {"ByteLevel": 1.0, "Prepend": 1.0, "NFC": 4.0, "NFD": 3.0, "NFKC": 4.0, "NFKD": 4.0, "Lowercase": 3.0}
"""The most bytes of text that each normalizer turns into one byte, over all of Unicode. Composition: U+1FBE U+0308 U+0301, of 7 bytes, is U+0390,
of 2. Lower case and canonical decomposition: the Kelvin sign, of 3 bytes, is ``k``. Compatibility decomposition: U+1D400, of 4 bytes, is ``A``."""

_KEEPS_TEXT = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
"""Pre-tokenizers that remove no character."""

_LONGEST_CHARACTER_BYTES = 4


def max_bytes_per_token(backend: tokenizers.Tokenizer) -> float | None:
    """Returns the most bytes (UTF-8) of text that one token can stand for: a text of B bytes has at least B divided by it tokens.

    Returns ``None`` if there is no such number, because the tokenizer can remove text or let one token stand for text of any length: normalizers that
    strip, collapse or replace by pattern (BERT's, SentencePiece's ``Precompiled``), pre-tokenizers that remove white space, unknown tokens
    that stand for whole words (WordPiece) or runs of characters (``fuse_unk``), and added tokens that take the white space beside them.
    """
    shrink = _normalizer_shrink(_state(backend.normalizer))
    added = backend.get_added_tokens_decoder().values()
    if shrink is None or not _keeps_text(_state(backend.pre_tokenizer)) or any(token.lstrip or token.rstrip for token in added):
        return None
    is_byte_level = "ByteLevel" in (_names(_state(backend.normalizer)) | _names(_state(backend.pre_tokenizer)))
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not _covers_every_character(backend.model, vocabulary, is_byte_level):
        return None
    # A byte-level token has one character for each byte of text.
    longest = max((len(token) if is_byte_level else len(token.encode()) for token in vocabulary), default=0)
    longest = max(longest, _LONGEST_CHARACTER_BYTES, *(len(token.content.encode()) for token in added), 1)
    return shrink * longest


def _state(component: Any) -> dict[str, Any]:
    """Returns a component of a tokenizer as in ``tokenizer.json``; empty if there is none."""
    state: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return state


def _parts(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(state.get("normalizers", state.get("pretokenizers", ())))


def _names(state: Mapping[str, Any]) -> set[str]:
    return {str(state.get("type"))}.union(*map(_names, _parts(state)))


def _normalizer_shrink(state: Mapping[str, Any]) -> float | None:
    """Returns the most bytes of text that become one byte of normalized text; ``None`` if text can vanish."""
    kind = state.get("type")
    if kind is None:
        return 1.0
    if kind == "Sequence":
        product = 1.0
        for part in _parts(state):
            factor = _normalizer_shrink(part)
            if factor is None:
                return None
            product *= factor
        return product
    if kind == "Replace":
        pattern, content = state["pattern"].get("String"), state["content"]
        return max(1.0, len(pattern.encode()) / len(content.encode())) if pattern and content else None
    return _SHRINK.get(kind)


def _keeps_text(state: Mapping[str, Any]) -> bool:
    kind = state.get("type")
    if kind == "Sequence":
        return all(map(_keeps_text, _parts(state)))
    if kind in ("Split", "Punctuation"):
        return bool(state["behavior"] != "Removed")
    return kind is None or kind in _KEEPS_TEXT


def _covers_every_character(model: Any, vocabulary: Mapping[str, int], is_byte_level: bool) -> bool:
    """Returns whether every character gets tokens of its own, or none can be encoded without an error."""
    if is_byte_level and isinstance(model, tokenizers.models.BPE) and all(character in vocabulary for character in ByteLevel.alphabet()):
        return True
    has_all_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if isinstance(model, tokenizers.models.BPE):
        return (model.byte_fallback and has_all_bytes) or (model.unk_token is not None and not model.fuse_unk)
    if isinstance(model, tokenizers.models.Unigram):
        return has_all_bytes and bool(_state(model).get("byte_fallback"))
    if isinstance(model, tokenizers.models.WordLevel):
        return model.unk_token not in vocabulary
    return False
