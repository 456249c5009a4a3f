"""``tokenizer.json`` for model folders that have none: a SentencePiece model, tiktoken's ranks or
``vocab.json`` with ``merges.txt`` are converted by transformers."""

import hashlib
import importlib.util
import shlex
import sys
from pathlib import Path

from tandem.runtime.process.temporary import temporary_folder
from tandem.types import UserError

SLOW_FILES = ("tokenizer.model", "vocab.json")
"""Files with a vocabulary, of which a tokenizer without ``tokenizer.json`` has one."""
CACHE = "~/.cache/tandem/tokenizers"


def with_fast_tokenizer(folder: Path) -> Path:
    """Returns ``folder`` if it has a ``tokenizer.json``, or no tokenizer at all; else a folder in the cache with links to its files and the converted
    tokenizer, written once. Raises ``UserError`` with the command that converts it where transformers cannot."""
    if (folder / "tokenizer.json").is_file() or not any((folder / name).is_file() for name in SLOW_FILES):
        return folder
    folder = folder.resolve()
    converted = Path(CACHE).expanduser() / _key(folder)
    if (converted / "tokenizer.json").is_file() and all((converted / path.name).exists() for path in _files(folder)):
        return converted
    if importlib.util.find_spec("transformers") is None:
        raise _by_hand(folder, "transformers, which converts it, is not installed")
    print(f"tandem: '{folder}' has no tokenizer.json; it is converted with transformers, once, to '{converted}'", file=sys.stderr, flush=True)
    try:
        _write(folder, converted)
    except OSError as error:
        raise UserError(f"the tokenizer of '{folder}' cannot be written to '{converted}': {error.strerror or error}; make room there") from None
    return converted


def original_folder(folder: Path) -> Path:
    """Returns the folder to which ``with_fast_tokenizer`` linked, and every other folder itself."""
    if folder.parent != Path(CACHE).expanduser():
        return folder
    return next((path.readlink().parent for path in sorted(folder.iterdir()) if path.is_symlink()), folder)


def _write(folder: Path, converted: Path) -> None:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    # Its warnings would be printed beside the one line of an error.
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Of many classes, among them that of a missing package.
        if _is_sentencepiece(folder) and importlib.util.find_spec("sentencepiece") is None:
            raise _by_hand(folder, "sentencepiece, which reads its tokenizer.model, is not installed") from None
        raise _by_hand(folder, f"transformers cannot convert it here ({_first_line(error)})") from None
    if not tokenizer.is_fast:
        raise _by_hand(folder, "transformers has no fast form of it")
    converted.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(converted.parent, f".{converted.name}") as scratch:
        fresh = scratch / converted.name
        fresh.mkdir()
        tokenizer.save_pretrained(str(fresh))
        for path in _files(folder):
            # What the folder says of its tokenizer stays as it is.
            (fresh / path.name).unlink(missing_ok=True)
            (fresh / path.name).symlink_to(path)
        try:
            fresh.rename(converted)
        except OSError:
            # Another process was faster.
            if not (converted / "tokenizer.json").is_file():
                raise


def _is_sentencepiece(folder: Path) -> bool:
    """Returns whether ``tokenizer.model`` begins as a model of SentencePiece does, with the tag of its pieces; tiktoken's (Llama 3) has lines of base64."""
    path = folder / "tokenizer.model"
    return path.is_file() and path.read_bytes()[:1] == b"\n"


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]


def _key(folder: Path) -> str:
    """Returns a name that changes with the folder's place and with every file of its tokenizer."""
    digest = hashlib.blake2b(str(folder).encode(), digest_size=8)
    for name in (*SLOW_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return f"{folder.name}-{digest.hexdigest()}"


def _by_hand(folder: Path, reason: str) -> UserError:
    code = f"from transformers import AutoTokenizer; AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    return UserError(
        f"'{folder}' has no tokenizer.json and {reason}; "
        f"install them with pip install 'tandem-rl[sentencepiece]', or run, where they are: python -c {shlex.quote(code)}"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
