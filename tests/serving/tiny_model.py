"""A small model with random weights, and its tokenizer with a chat template."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model, to_huggingface
from tandem.model.initialise import initialise

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


def make_tokenizer(folder: Path) -> Path:
    """Writes a byte-level BPE, which encodes any text and may take several tokens for a character, and returns its folder."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder
