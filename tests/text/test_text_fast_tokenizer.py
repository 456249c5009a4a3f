"""Folders without ``tokenizer.json`` are converted by transformers, or the command that does it is named."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.model.model_source import find_model
from tandem.text.fast_tokenizer import original_folder, with_fast_tokenizer
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

TEXTS = ("the quick brown fox", "naïve café 😀 1234", "<|im_end|> and <eos>", "")


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of GPT-2's kind: ``vocab.json`` and ``merges.txt``."""
    monkeypatch.setattr("tandem.text.fast_tokenizer.CACHE", str(tmp_path / "cache"))
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"], show_progress=False)
    backend.train_from_iterator([*TEXTS] * 20, trainer)
    folder = tmp_path / "slow"
    folder.mkdir()
    backend.model.save(str(folder))
    tokens = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "bos_token": "<eos>", "unk_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": "{{ messages }}"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 0}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_vocabulary_and_merges_are_converted_once_to_what_transformers_encodes(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    converted = find_model(slow)
    assert "has no tokenizer.json; it is converted with transformers, once" in capsys.readouterr().err
    ours, theirs = Tokenizer.from_folder(converted), AutoTokenizer.from_pretrained(slow)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert (converted / "model.safetensors").read_bytes() == b"weights" and not (slow / "tokenizer.json").exists()
    assert json.loads((converted / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert original_folder(converted) == slow.resolve() and original_folder(slow) == slow
    assert find_model(slow) == converted and capsys.readouterr().err == ""
    (slow / "merges.txt").write_text("#version: 0.2\n")
    assert find_model(slow) != converted, "another tokenizer is converted anew"


def test_a_tokenizer_that_cannot_be_converted_is_named_with_the_command(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slow / "vocab.json").unlink()
    (slow / "tokenizer.model").write_bytes(b"not a model of sentencepiece")
    with pytest.raises(UserError) as refused:
        with_fast_tokenizer(slow)
    message = str(refused.value)
    assert "has no tokenizer.json and transformers cannot convert it here (" in message and "\n" not in message
    assert "python -c 'from transformers import AutoTokenizer; AutoTokenizer.from_pretrained(" in message
    monkeypatch.setattr("tandem.text.fast_tokenizer.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"transformers, which converts it, is not installed; run, where transformers and sentencepiece are installed"):
        with_fast_tokenizer(slow)


def test_folders_with_a_tokenizer_or_without_any_stay_as_they_are(slow: Path) -> None:
    (slow / "tokenizer.json").write_text("{}")
    assert with_fast_tokenizer(slow) == slow
    for path in slow.iterdir():
        path.unlink()
    assert with_fast_tokenizer(slow) == slow
    shutil.rmtree(slow)
    assert with_fast_tokenizer(slow) == slow
