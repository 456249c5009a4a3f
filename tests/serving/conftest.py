"""A small model with a chat template, and one server that most tests share."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent))

from server_process import Server, server

from tandem.engine.llm import LLM
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model, to_huggingface
from tandem.model.initialise import initialise

torch.set_num_threads(1)

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café, 你好世界 — 😀😃 and 1234"] * 20
SPECIAL = ["<pad>", "<bos>", "<eos>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
VOCABULARY = 300


def make_model(folder: Path, tokenizer: Path, seed: int) -> Path:
    """Writes a model with large random weights, so that greedy tokens differ, and returns its folder."""
    shapes = ModelShapes(
        architecture="qwen3", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48, max_position_embeddings=512, tie_word_embeddings=True, qk_norm=True,
    )  # fmt: skip
    decoder = Decoder(shapes, select("reference"))
    initialise(decoder, seed)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            if not name.endswith("norm.weight"):
                tensor.mul_(10 if "proj" in name else 3)
    save_model(decoder, folder, tokenizer, eos_token_id=2)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE: any text can be encoded, and a character may take several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "first", tokenizer_folder, 0)


@pytest.fixture(scope="session")
def other_model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shapes with other weights."""
    return make_model(tmp_path_factory.mktemp("models") / "other", tokenizer_folder, 1)


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    return LLM(model, max_num_seqs=16)


@pytest.fixture(scope="session")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that do not change its state."""
    with server(model, tmp_path_factory.mktemp("serve"), "--served-model-name", "tiny", "also-tiny", "--max-num-seqs", "32") as running:
        yield running
        assert running.process.poll() is None, running.log.read_text()
        assert "Traceback" not in running.log.read_text(), running.log.read_text()
