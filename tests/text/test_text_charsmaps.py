"""Normalizers of SentencePiece's tokenizers that are broken, for which the tokenizers library panics."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError


def written(folder: Path, normalizer: Any) -> Path:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]], "byte_fallback": False}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}))
    return folder


TRIE = (1024).to_bytes(4, "little") + bytes(1024)
"""One block of a double array without an entry, after its size."""
OF_BYTES = {"no trie": b"\0\0", "a long trie": b"\xff\0\0\0abcd", "half a block": b"\x04\0\0\0" + bytes(4), "no UTF-8": TRIE + b"\xff\xfe"}
BROKEN = {"not base64": "?", "empty": "", "a number": 5, "a list": [1]} | {name: base64.b64encode(table).decode() for name, table in OF_BYTES.items()}


@pytest.mark.parametrize("table", BROKEN)
def test_a_broken_table_of_characters_is_named_in_one_line(table: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": BROKEN[table]}
    for normalizer in (broken, {"type": "Sequence", "normalizers": [{"type": "NFC"}, broken]}):
        with pytest.raises(UserError, match=r"tokenizer\.json' is not a tokenizer: its normalizer has a precompiled_charsmap that is broken; save the"):
            Tokenizer.from_folder(written(tmp_path, normalizer))
    assert capfd.readouterr().err == ""


def test_a_table_that_replaces_nothing_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(TRIE).decode()})
    assert Tokenizer.from_folder(folder).encode("ab") == [1, 2]
