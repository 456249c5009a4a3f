"""Trains a byte-level BPE tokenizer (Sennrich et al., 2016) on the documents of a storage."""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.data.tokenizing.documents import DocumentFormat, check_whole, divide, documents
from tandem.runtime.machine.available_memory import total_bytes
from tandem.storage.files import Storage
from tandem.types import RunError, UserError

END = "<|endoftext|>"
BYTES = 256
TOKEN_BYTES = 100
"""Memory of a token while it is learned: its text in a list and in a hash table, and its merge."""
GZIP_RATIO = 1032
"""Bytes of text for each byte of a compressed file, at most (deflate)."""


def train_tokenizer(
    source: Storage, form: DocumentFormat, vocabulary: int, folder: Path, most_bytes: int = 256 * 2**20, progress: bool = False
) -> int:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` to ``folder``: ``vocabulary`` tokens, of which 0 is the end of sequence,
    learned from the first ``most_bytes`` of ``source``. Any text can be encoded.

    Returns the number of tokens, which is smaller if the text does not yield more. ``progress``: shows the library's progress bars. Raises
    ``UserError``, and ``RunError`` if the disk fails."""
    if vocabulary < BYTES + 1:
        raise UserError(f"the new vocabulary has {vocabulary} tokens; it needs at least {BYTES + 1}, one for each byte and the end of sequence")
    if (folder / "tokenizer.json").exists():
        raise UserError(f"'{folder}' has a tokenizer already; leave out --new-vocabulary to use it, or name another folder")
    if vocabulary * TOKEN_BYTES > (total := total_bytes()):
        raise UserError(
            f"the new vocabulary has {vocabulary:,} tokens, which take {vocabulary * TOKEN_BYTES / 2**30:,.0f} GiB of memory while they are learned, and this "
            f"machine has {total / 2**30:,.0f} GiB; lower it"
        )
    files = source.files()
    check_whole(source, files, form)
    # The library allocates all of a vocabulary at once. Every merge shortens the text by a byte or more.
    most = BYTES + 1 + min(most_bytes, GZIP_RATIO * sum(file.size for file in files))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, most), special_tokens=[END], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=progress
    )
    backend.train_from_iterator(_texts(source, form, most_bytes), trainer)
    try:
        _write(backend, folder)
    except OSError as error:
        raise RunError(f"the tokenizer cannot be written to '{folder}': {error.strerror or error}; make room or name another folder") from None
    return backend.get_vocab_size()


def _write(backend: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    fresh = folder / ".tokenizer.json.tmp"
    fresh.write_text(backend.to_str(pretty=True), encoding="utf-8")
    fresh.replace(folder / "tokenizer.json")


def _texts(source: Storage, form: DocumentFormat, most_bytes: int) -> Iterator[str]:
    left = most_bytes
    for unit in divide(source.files(), form, 2**24):
        for part in unit:
            for document in documents(source, part, form):
                if document.text is not None:
                    yield document.text
                left -= document.size
                if left <= 0:
                    return
