"""The tables of characters that SentencePiece's tokenizers are normalized with. The tokenizers library ends in a panic for one that is broken."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.types import UserError

BLOCK_BYTES = 4 * 256
"""A trie is a double array (Darts) of blocks of 256 words, so that the place of a byte is always within it."""


def check_charsmaps(content: bytes, file: Path) -> None:
    """Raises ``UserError`` if a normalizer in ``content``, a ``tokenizer.json``, has a ``precompiled_charsmap`` that is none: the number of bytes of a trie of
    32-bit words, the trie, and the characters in UTF-8 (SentencePiece, ``normalizer.cc``)."""
    try:
        read = json.loads(content)
    except (ValueError, RecursionError):
        # The library says what is wrong with it.
        return
    for normalizer in _normalizers(read.get("normalizer") if isinstance(read, dict) else None):
        if "precompiled_charsmap" in normalizer and not _is_charsmap(normalizer["precompiled_charsmap"]):
            raise UserError(f"'{file}' is not a tokenizer: its normalizer has a precompiled_charsmap that is broken; save the tokenizer again")


def _normalizers(normalizer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(normalizer, dict):
        yield normalizer
        inner = normalizer.get("normalizers")
        for each in inner if isinstance(inner, list) else ():
            yield from _normalizers(each)


def _is_charsmap(given: Any) -> bool:
    try:
        table = base64.b64decode(given, validate=True)
        trie = int.from_bytes(table[:4], "little")
        if not 0 < trie <= len(table) - 4 or trie % BLOCK_BYTES:
            return False
        table[4 + trie :].decode("utf-8")
    except (ValueError, TypeError):
        return False
    return True
