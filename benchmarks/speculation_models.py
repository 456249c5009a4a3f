"""The models of ``speculation.py``: a small model that has learned the text of this package, and an EAGLE-3 head that ``tandem train`` trained beside it.

Both are made by recipes, in a few minutes, and kept in the work folder under a name that changes with what the recipes say.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from machine import ROOT

from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.data.tokenizing.train_tokenizer import train_tokenizer
from tandem.jobs.start import train
from tandem.storage.files import open_storage

VOCABULARY, CONTEXT, STEPS, HEAD_STEPS = 512, 512, 80, 60
MODEL = {
    "architecture": "qwen3", "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 768, "max_position_embeddings": CONTEXT,
}  # fmt: skip
DATA = {"sequence_length": 256, "global_batch_size": 8}
TRAINER = {"learning_rate": 3.0e-3, "warmup_steps": 10, "schedule": "cosine", "micro_batch_tokens": 2048}
DRAFT = {"name": "draft", "draft_steps": 3}


def trained_models(work: Path, threads: int) -> tuple[Path, Path, Path]:
    """The folders of the model, of its head and of the text that they have learned, made where they are missing."""
    digest = hashlib.sha256(json.dumps([VOCABULARY, STEPS, HEAD_STEPS, MODEL, DATA, TRAINER, DRAFT]).encode()).hexdigest()[:12]
    folder = work / f"speculation-{digest}"
    text = folder / "text"
    if not text.exists():
        form, source = DocumentFormat(suffixes=(".py",)), str(ROOT / "tandem")
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer(open_storage(source), form, VOCABULARY, folder / "tokenizer")
        tokenize(TokenizeSettings(source, str(text), str(folder / "tokenizer"), form, workers=1))
    model = run(folder, "pretrain", {"name": "pretrain"}, {"create": {**MODEL, "tokenizer": str(folder / "tokenizer")}}, STEPS, threads)
    return model, run(folder, "draft", DRAFT, {"path": str(model)}, HEAD_STEPS, threads), text


def run(folder: Path, name: str, algorithm: dict[str, Any], model: dict[str, Any], steps: int, threads: int) -> Path:
    """The folder of what a run has trained, which is made if it has not ended."""
    made = folder / name / "model"
    if not made.exists():
        sections = {
            "algorithm": algorithm, "model": model, "data": {"train": [{"path": str(folder / "text")}], **DATA}, "trainer": TRAINER,
            "checkpoint": {"every_steps": steps, "keep": 1}, "run": {"max_steps": steps, "seed": 0, "directory": str(folder), "name": name},
            "machine": {"threads": threads},
        }  # fmt: skip
        train(sections, progress=False)
    return made
