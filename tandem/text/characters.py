"""A tokenizer with one token a character, for models that a run makes itself."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tandem.types import UserError

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ASCII = "".join(sorted(set(string.printable) - set("\t\r\x0b\x0c")))
"""The 95 printable ASCII characters and the line break."""


def make_character_tokenizer(characters: str, folder: str | Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` to ``folder``, as transformers reads them.

    Ids: 0 ``<pad>``, 1 ``<bos>``, 2 ``<eos>``, then ``characters`` in their order; ``ascii`` means ``ASCII``.
    There is no token for unknown characters: encoding one is an error. Raises ``UserError`` for a character given
    twice, or none.
    """
    if characters == "ascii":
        characters = ASCII
    twice = next((c for i, c in enumerate(characters) if c in characters[:i]), None)
    if twice is not None:
        raise UserError(f"the tokenizer's characters contain {twice!r} twice; list each once")
    if not characters:
        raise UserError("the tokenizer's characters are empty; give at least one, or 'ascii'")
    vocabulary = {token: number for number, token in enumerate((PAD, BOS, EOS, *characters))}
    # The model names an unknown token that the vocabulary lacks, so an unknown character raises and is never dropped.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Not Tokenizer.save, which raises the bare class Exception on a full disk.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
