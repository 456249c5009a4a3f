"""Folders without ``tokenizer.json`` are converted by transformers, or the command that does it is named."""

import base64
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
    with pytest.raises(UserError, match=r"transformers, which converts it, is not installed; install them with pip install 'tandem-rl\[sentencepiece\]'"):
        with_fast_tokenizer(slow)


def write_tokenizer(folder: Path, model: bytes, name: str, **tokens: str) -> Path:
    for path in ("vocab.json", "merges.txt"):
        (folder / path).unlink()
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **tokens}))
    return folder


@pytest.mark.parametrize(("name", "start", "end"), [("llama", "<s>", "</s>"), ("gemma", "<bos>", "<eos>")])
def test_a_model_of_sentencepiece_gives_the_ids_of_sentencepiece(slow: Path, name: str, start: str, end: str) -> None:
    models = Path(__file__).parent / "sentencepiece_models"
    (slow / "config.json").write_text(json.dumps({"model_type": name}))
    folder = write_tokenizer(slow, (models / f"{name}.model").read_bytes(), f"{name.title()}Tokenizer", bos_token=start, eos_token=end, unk_token="<unk>")
    ours, ids = Tokenizer.from_folder(with_fast_tokenizer(folder)), json.loads((models / "ids.json").read_text())
    # transformers' LlamaTokenizer puts no further space before a text that begins with one.
    texts = {text: row for text, row in zip(ids["texts"], ids[name], strict=True) if not text.startswith("</s>" if name == "gemma" else (" ", "</s>"))}
    assert {text: ours.encode(text) for text in texts} == texts and len(texts) > 3
    assert all(ours.decode(row) == text for text, row in texts.items())


def test_ranks_of_tiktoken_give_the_ids_of_tiktoken(slow: Path) -> None:
    import tiktoken
    from tiktoken._educational import bpe_train

    # The pattern of Llama 3, whose original folder has such a file.
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = bpe_train(" ".join(TEXTS * 5), 300, pattern, visualise=None)
    lines = b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())
    folder = write_tokenizer(slow, lines, "PreTrainedTokenizerFast", eos_token="<|end_of_text|>", bos_token="<|begin_of_text|>")
    theirs = tiktoken.Encoding("ranks", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer.from_folder(with_fast_tokenizer(folder))
    for text in (*TEXTS, "  two spaces\n\tand a tab", "数学 の 問題"):
        assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == text


def test_a_model_of_sentencepiece_without_that_package_is_refused_by_its_name(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.util import find_spec

    folder = write_tokenizer(slow, (Path(__file__).parent / "sentencepiece_models" / "llama.model").read_bytes(), "UnknownTokenizer")
    monkeypatch.setattr("tandem.text.fast_tokenizer.importlib.util.find_spec", lambda name: None if name == "sentencepiece" else find_spec(name))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: [][0])
    with pytest.raises(UserError, match=r"sentencepiece, which reads its tokenizer.model, is not installed; install them with pip install"):
        with_fast_tokenizer(folder)


def test_folders_with_a_tokenizer_or_without_any_stay_as_they_are(slow: Path) -> None:
    (slow / "tokenizer.json").write_text("{}")
    assert with_fast_tokenizer(slow) == slow
    for path in slow.iterdir():
        path.unlink()
    assert with_fast_tokenizer(slow) == slow
    shutil.rmtree(slow)
    assert with_fast_tokenizer(slow) == slow
