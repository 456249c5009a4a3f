"""Folders of models with heads that read hidden states, made of random weights."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.model.huggingface.model_folder import read_tensors

LAYERS = 2
"""Of the models of ``conftest``."""


def with_predictor(folder: Path, other: Path, into: Path, *, seed: int = 5, is_exact: bool = False) -> Path:
    """Writes the model of ``folder`` to ``into`` with a layer of multi-token prediction, the last layer of the model in ``other``. ``is_exact``: the layers
    of both add nothing to the residual stream, so that the head predicts what the model does."""
    shutil.copytree(folder, into)
    tensors = dict(read_tensors(folder))
    hidden = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)
    at, last = f"model.layers.{LAYERS}.", f"model.layers.{LAYERS - 1}."
    layer = {at + name.removeprefix(last): tensor for name, tensor in read_tensors(other) if name.startswith(last)}
    projection = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1) if is_exact else drawn(hidden, 2 * hidden) * 0.3
    norms = {name: torch.ones(hidden) if is_exact else 1 + 0.2 * drawn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    layer |= {f"{at}{name}.weight": norm for name, norm in norms.items()} | {f"{at}eh_proj.weight": projection}
    layer |= {f"{at}embed_tokens.weight": tensors["model.embed_tokens.weight"], f"{at}shared_head.head.weight": tensors["lm_head.weight"]}
    whole = tensors | layer
    if is_exact:
        whole = {name: _silent(name, tensor) for name, tensor in whole.items()}
    (into / "model.safetensors").unlink()
    save_file({name: tensor.contiguous().clone() for name, tensor in whole.items()}, into / "model.safetensors")
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    (into / "manifest.json").unlink()
    return into


def _silent(name: str, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if "o_proj." in name or "down_proj." in name else tensor
