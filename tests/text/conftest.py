"""Small tokenizers of the kinds found in checkpoints."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café, 你好世界 — 😀😃 and 1234"] * 20
SPECIAL = ["<pad>", "<bos>", "<eos>"]


def save(tokenizer: Tokenizer, folder: Path, **settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen: a character may take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return save(tokenizer, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BPE with a space marker and byte tokens for unknown characters, as in Llama 2."""
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz"))
    tokens = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *letters, "▁t", "he", "▁the"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(tokenizer, tmp_path_factory.mktemp("sentence_piece"))
