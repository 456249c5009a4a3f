"""Lone surrogates, which JSON can escape (``\\ud800``) and which are not characters: no file, tokenizer or digest can hold them."""

import json
from typing import Any


def has_lone_surrogate(line: str, row: Any) -> bool:
    """Returns whether ``row``, which was read from ``line`` of JSON, has a lone surrogate in any text."""
    # Decoded UTF-8 has none, so that only an escape can make one.
    if "\\ud" not in line and "\\uD" not in line:
        return False
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
