"""Models that embed or score texts, made of the small model."""

import json
import shutil
from pathlib import Path

import torch


def sentence_transformer(model: Path, folder: Path) -> Path:
    """Writes ``model`` as one of Sentence Transformers, with links to its files."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    names = ["Transformer", "Pooling", "Normalize"]
    modules = [{"path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return folder


def reward_model(model: Path, folder: Path, labels: dict[int, str] | None = None) -> Path:
    """Writes a model with one score, or one for each of ``labels``, from the weights of ``model``."""
    import transformers

    torch.manual_seed(0)
    scoring = transformers.AutoModelForSequenceClassification.from_pretrained(model, id2label=labels or {0: "good"})
    scoring.score.weight.data.mul_(20)
    scoring.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, folder / name)
    return folder
