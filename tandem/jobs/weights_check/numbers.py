"""A Hugging Face folder whose every weight is a random number, and what the safetensors library reads in such a folder."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.model.drawn import generator_of
from tandem.model.huggingface.safetensors_file import write_file
from tandem.types import UserError

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def fill_folder(source: Path, target: Path, seed: int, dtype: torch.dtype) -> None:
    """Writes ``target``: the files of the model in ``source`` with random weights of ``dtype``, each drawn from ``seed`` and its name. No two tensors are
    equal, so that one in the place of another is seen; norms are not 1 and biases not 0. A head that is tied to the embedding stays so.

    Raises ``UserError`` if ``source`` has no plain floating-point weights.
    """
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UserError(f"'{source}' has no .safetensors file; name the folder of a model with weights in safetensors")
    # The digests of its manifest are those of other weights.
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "manifest.json", ".*"))
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps({**config, "dtype": name, "torch_dtype": name}), encoding="utf-8")
    is_tied = bool(config.get("tie_word_embeddings"))
    for path in files:
        # The library writes tensors of torch with numpy alone, which Tandem does not need.
        write_file(target / path.name, [(key, _drawn(key, like, seed, dtype, is_tied)) for key, like in _read(path).items()])


def read_folder(folder: Path, pattern: str = "*.safetensors") -> dict[str, Tensor]:
    """Returns every weight of a folder by its name, as the safetensors library reads it. A head that is tied is not listed."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob(pattern)):
        tensors |= _read(path)
    config = folder / "config.json"
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("tie_word_embeddings"):
        tensors.pop(HEAD, None)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("inv_freq")}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"'{path}' cannot be read: {error}; write or download it again") from None


def _drawn(name: str, like: Tensor, seed: int, dtype: torch.dtype, is_tied: bool) -> Tensor:
    if like.dtype not in _FLOATS:
        raise UserError(f"tensor '{name}' is {like.dtype}: weights are checked for plain floating-point models; name the folder that was quantized")
    if name.endswith("inv_freq"):
        return like
    values = torch.empty(like.shape).normal_(0.0, 0.05, generator=generator_of(seed, EMBEDDING if is_tied and name == HEAD else name))
    return (values + 1.0 if name.endswith("norm.weight") else values).to(dtype)
