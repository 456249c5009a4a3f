"""A Hugging Face tokenizer folder: text to token ids and back."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from tandem.config.arguments import NotHere
from tandem.config.vllm_names import TOKENIZER
from tandem.text.charsmaps import check_charsmaps
from tandem.types import UserError
from tandem.types.input_file import MOST_JSON_BYTES, MOST_TOKENIZER_BYTES, read_input

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "tokenizer.model",
)
"""The files of a folder that belong to its tokenizer."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """``backend`` does the work. ``vocab_size`` is the highest id plus one. ``eos_token_ids`` end a completion; there
    can be several, and there is none where the folder names none."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None

    if not TYPE_CHECKING:
        # A type checker that saw it would accept every name.
        def __getattr__(self, name: str) -> Any:
            if name in TOKENIZER:
                raise NotHere(f"this tokenizer is not one of transformers and has no '{name}': {TOKENIZER[name]}")
            raise AttributeError(f"'Tokenizer' object has no attribute {name!r}")

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and ``tokenizer_config.json``. The end-of-sequence ids are those of
        ``generation_config.json``, else of ``config.json``, else the tokenizer's own token. Raises ``UserError`` for
        a folder that is not a tokenizer."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not folder.is_dir():
            raise UserError(f"'{folder}' is not a folder here; name a Hugging Face folder, or OWNER/NAME of a model of the Hub")
        if not file.is_file():
            raise UserError(f"'{folder}' has no tokenizer.json; save the tokenizer in its fast form first")
        content = read_input(file, MOST_TOKENIZER_BYTES, "save the tokenizer again")
        if b'"precompiled_charsmap"' in content:
            check_charsmaps(content, file)
        try:
            backend = tokenizers.Tokenizer.from_buffer(content)
        except BaseException as error:  # The library raises the bare class, and for some files what is no ``Exception``.
            _check_own(error)
            raise UserError(f"'{file}' is not a tokenizer: {error}") from None
        # Padding and cutting are the caller's business: a token id must never appear or vanish unasked.
        backend.no_padding()
        backend.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        own = {name: _token_id(backend, settings, name, folder) for name in ("eos_token", "bos_token", "pad_token")}
        own_eos = own["eos_token"]
        eos: tuple[int, ...] = () if own_eos is None else (own_eos,)
        for name in ("config.json", "generation_config.json"):
            eos = _id_list(_read_json(folder / name).get("eos_token_id"), folder / name) or eos
        return cls(backend, max(backend.get_vocab().values(), default=-1) + 1, eos, own["bos_token"], own["pad_token"])

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of ``text``, in which special tokens that are spelled out are read as such. Other threads run meanwhile. Raises
        ``UserError`` for a lone surrogate, and for a character that the vocabulary lacks if there is no token for unknown ones."""
        try:
            # Unlike ``encode`` it releases the GIL, so that other threads run meanwhile, and keeps no offsets (a third of the memory).
            ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:  # As in ``from_folder``.
            _check_own(error)
            at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if at is not None:
                raise UserError(f"the text has a lone surrogate (U+{ord(text[at]):04X}, at {at}), which is no character; remove it") from None
            unknown = next((c for c in text if self.backend.token_to_id(c) is None), None)
            if unknown is None:
                raise UserError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from None
            at = text.index(unknown)
            raise UserError(
                f"character {unknown!r} (U+{ord(unknown):04X}, at {at}) is not in the tokenizer's vocabulary; "
                "remove it from the text or add it to the characters"
            ) from None
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Raises ``UserError`` for an id outside the vocabulary."""
        if len(ids) and (min(ids) < 0 or max(ids) >= self.vocab_size):
            token = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise UserError(f"token id {token} is not in the tokenizer's vocabulary of {self.vocab_size}")
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def _check_own(error: BaseException) -> None:
    """Raises ``error`` again unless it is one of the library, whose panics are no ``Exception``."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_input(path, MOST_JSON_BYTES, "download the folder again"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"'{path}' contains a JSON {type(content).__name__}; it must contain an object")
    return content


def _token_id(backend: tokenizers.Tokenizer, settings: dict[str, Any], name: str, folder: Path) -> int | None:
    token = settings.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    token_id: int | None = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise UserError(
            f"'{folder / 'tokenizer_config.json'}' has {name} {token!r}, which tokenizer.json does not know"
        )
    return token_id


def _id_list(value: Any, path: Path) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"'{path}' has eos_token_id {value!r}; it must be a token id or a list of them")
    return tuple(ids)
