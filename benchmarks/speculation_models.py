"""The models of ``speculation.py``, and an EAGLE-3 head that ``tandem train`` has trained on what the model draws.

A model that has learned a language takes longer to train than all that is measured here, so one is made: its first layer decides nearly everything, and the
others change what passes through them by little, as the later layers of a trained model do. The head is trained by the recipe ``algorithm.name: draft``, which
takes a few minutes, and kept in the work folder under a name that changes with what it is made of.
"""

import functools
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tandem.data.shards import ShardWriter, token_dtype
from tandem.data.tokenizing.tokenize import DATASET, TokenizedDataset, shard_name
from tandem.engine.engine import Engine
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.jobs.start import train
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors, save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.model.multi_token import MultiTokenPredictor, layer_shapes

SHAPES = ModelShapes(
    architecture="qwen3", vocab_size=256, hidden_size=256, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=768, max_position_embeddings=1024, tie_word_embeddings=True, qk_norm=True,
)
DRAFT_LAYERS = 1
SHARPNESS = 1.5
"""The scale of the last norm, by which a drawn token has a log-probability of about -2 on average, as in text, and not all tokens are nearly as likely."""
DRAWN, LENGTH = 128, 128
"""Sequences that the head learns from, and their tokens."""
HEAD = {
    "algorithm": {"name": "draft", "draft_steps": 3},
    "data": {"sequence_length": LENGTH, "global_batch_size": 4},
    "trainer": {"learning_rate": 2.0e-3, "warmup_steps": 5, "weight_decay": 0.0, "schedule": "cosine", "micro_batch_tokens": 4 * LENGTH},
    "run": {"max_steps": 100, "seed": 0, "name": "head"},
    "checkpoint": {"every_steps": 100, "keep": 1},
}


@functools.cache
def pair(strength: float) -> tuple[Decoder, Decoder]:
    """The model and its draft, which is its first layer. ``strength``: the scale of the outputs of the others."""
    model = Decoder(SHAPES, select("auto"))
    initialise(model, 0)
    with torch.no_grad():
        for name, tensor in to_huggingface(model):
            if "layers." in name and int(name.split(".")[2]) >= DRAFT_LAYERS and ("o_proj" in name or "down_proj" in name):
                tensor.mul_(strength)
            elif "proj" in name or "embed" in name:
                tensor.mul_(3)
            elif name == "model.norm.weight":
                tensor.mul_(SHARPNESS)
    draft = Decoder(replace(SHAPES, num_hidden_layers=DRAFT_LAYERS), select("auto"))
    kept = {name for name, _ in to_huggingface(draft)}
    load_tensors(draft, [(name, tensor) for name, tensor in to_huggingface(model) if name in kept])
    return model, draft


def predictor(model: Decoder) -> MultiTokenPredictor:
    """A layer of multi-token prediction for a packed ``model``, made of its first layer over the embedding of the token alone."""
    whole, _ = pair(1.0)
    weights = dict(to_huggingface(whole))
    layer = Decoder(layer_shapes(SHAPES, shares_vocabulary=True), select("auto"))
    tensors = {name: weights[name] for name, _ in to_huggingface(layer) if name.startswith("model.layers.0.")}
    tensors |= {"model.embed_tokens.weight": torch.zeros(1, SHAPES.hidden_size), "model.norm.weight": weights["model.norm.weight"]}
    load_tensors(layer, tensors.items(), pack=True)
    ones, size = torch.ones(SHAPES.hidden_size), float(weights["model.embed_tokens.weight"].pow(2).mean().sqrt())
    projection = torch.cat((size * torch.eye(SHAPES.hidden_size), torch.zeros(SHAPES.hidden_size, SHAPES.hidden_size)), dim=1)
    return MultiTokenPredictor(layer, model, ones, ones, projection)


def trained_head(work: Path, strength: float, threads: int) -> tuple[Path, Path]:
    """The folders of the model and of the head that is trained on what it draws at temperature 1, made where they are missing."""
    digest = hashlib.sha256(json.dumps([asdict(SHAPES), SHARPNESS, strength, DRAWN, LENGTH, HEAD]).encode()).hexdigest()[:12]
    folder = (work / f"speculation-{digest}").absolute()
    model, text, head = folder / "model", folder / "text", folder / "head" / "model"
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_model(pair(strength)[0], model)
    if not text.exists():
        write_text(text, strength)
    if not head.exists():
        given = {**HEAD, "model": {"path": str(model)}, "data": {**HEAD["data"], "train": [{"path": str(text)}]}}
        train({**given, "run": {**HEAD["run"], "directory": str(folder)}, "machine": {"threads": threads}}, progress=False)
    return model, head


def write_text(folder: Path, strength: float) -> None:
    """Writes a dataset of what the model draws."""
    engine = Engine(pair(strength)[0], EngineSettings(SHAPES.max_position_embeddings, 1024, max_num_seqs=64, max_num_batched_tokens=1024))
    for i in range(DRAWN):
        engine.add_request(str(i), [i % SHAPES.vocab_size, 7 * i % SHAPES.vocab_size], SamplingParams(max_tokens=LENGTH - 2, temperature=1.0, seed=9), key=i)
    drawn: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        drawn.update((output.request_id, [*output.prompt_token_ids, *output.outputs[0].token_ids]) for output in engine.step() if output.finished)
    made = folder.with_name("being written")
    made.mkdir(exist_ok=True)
    dtype = token_dtype(SHAPES.vocab_size)
    writer = ShardWriter(made, shard_name(0), dtype)
    for tokens in drawn.values():
        writer.add(tokens)
    (made / DATASET).write_bytes(TokenizedDataset("", SHAPES.vocab_size, None, dtype, (writer.close(),)).to_json())
    made.rename(folder)
