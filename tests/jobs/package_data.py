"""Datasets of one package of the standard library, with a tokenizer trained on it."""

import json
import shutil
from pathlib import Path

from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.data.tokenizing.train_tokenizer import train_tokenizer
from tandem.storage.files import open_storage


def make_datasets(folder: Path, *names: str, vocabulary: int = 300) -> Path:
    """Writes the datasets ``names``, all of the same text, to ``folder``, beside ``text`` and ``tokenizer``; returns ``folder``."""
    (folder / "text").mkdir()
    for path in sorted(Path(json.__file__).parent.glob("*.py")):
        shutil.copyfile(path, folder / "text" / path.name)
    form = DocumentFormat(suffixes=(".py",))
    train_tokenizer(open_storage(str(folder / "text")), form, vocabulary, folder / "tokenizer")
    for name in names:
        tokenize(TokenizeSettings(str(folder / "text"), str(folder / name), str(folder / "tokenizer"), form, workers=1))
    return folder
