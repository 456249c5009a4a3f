"""Reads and writes low-rank adapters: folders of PEFT, and models with an adapter merged into the weights."""

import hashlib
import json
import re
import reprlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tandem.config.lora import MLP_MODULES, LoraConfig
from tandem.kernels.quantized import plain_weight
from tandem.layout.latent_attention import WITHIN_HEADS
from tandem.layout.linear_attention import PROJECTIONS
from tandem.layout.parameters import linear_matrices, matrix_name, parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_json
from tandem.model.huggingface.safetensors_file import read_file, write_file
from tandem.model.lora import ANY_LAYER, Adapter
from tandem.model.quantization.scheme import round_to_nearest, scheme_named
from tandem.runtime.machine.available_memory import total_bytes
from tandem.runtime.process.temporary import whole_folder
from tandem.types import RunError, UserError
from tandem.types.input_file import read_input

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the name that a parameter has in transformers."""
_NAME = re.compile(r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(?:self_attn|linear_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight")
_NAME_IN_MODULE = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_ADAPTED = tuple(f"{name}.weight" for name in ("_proj", "_proj_with_mqa", *PROJECTIONS))
"""What the names of matrices end with that an adapter can change."""
_PLAIN: dict[str, object] = {
    "bias": "none", "use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {}, "trainable_token_indices": None,
}  # fmt: skip
"""The values of a plain adapter for these configuration keys; other values change what it computes."""


def digest_of(folder: str | Path) -> str:
    """Returns the digest of an adapter's content, hexadecimal. Raises ``UserError`` if a file is missing."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        try:
            content = read_input(Path(folder) / name, total_bytes() // 2, "the adapter has to fit in memory")
        except OSError:
            raise UserError(f"adapter '{folder}' has no readable {name}; it must be a folder saved by PEFT") from None
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def rank_of(folder: str | Path) -> int:
    """Returns the rank in an adapter's configuration. Raises ``UserError`` if there is none."""
    rank = read_json(Path(folder) / CONFIG).get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank < 2**31:
        raise UserError(f"adapter '{folder}' has r {reprlib.repr(rank)}; it must be a whole number from 1 to 2^31 - 1")
    return rank


def load_adapter(folder: str | Path, shapes: ModelShapes, max_rank: int) -> Adapter:
    """Returns the adapter in a PEFT folder, for a model of ``shapes``. Raises ``UserError`` if it is missing, is broken, adapts unsupported
    modules, does not fit the model or has a rank above ``max_rank``."""
    digest = digest_of(folder)
    rank, config = rank_of(folder), read_json(Path(folder) / CONFIG)
    if config.get("peft_type") != "LORA":
        raise UserError(f"adapter '{folder}' has peft_type {reprlib.repr(config.get('peft_type'))}; only 'LORA' is supported")
    for key, plain in _PLAIN.items():
        if config.get(key) and config[key] != plain:
            raise UserError(f"adapter '{folder}' has {key} {reprlib.repr(config[key])}; only {json.dumps(plain)} is supported")
    if config.get("target_parameters"):
        raise UserError(
            f"adapter '{folder}' has target_parameters {reprlib.repr(config['target_parameters'])}, and the stacked matrices of experts have none for each "
            "request; merge it into the model (PEFT's merge_and_unload), or train it with target_modules alone"
        )
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise UserError(f"adapter '{folder}' has lora_alpha {reprlib.repr(alpha)}; it must be a finite number")
    if rank > max_rank:
        raise UserError(f"adapter '{folder}' has rank {rank}; this engine allows at most {max_rank}; raise max_lora_rank")
    scale = LoraConfig(rank, alpha, use_rslora=bool(config.get("use_rslora"))).scale
    names = _names_in_module if shapes.transformers is not None else _names
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in read_file(Path(folder) / WEIGHTS):
        matrix, side = names(shapes, name, folder)
        pairs.setdefault(matrix, {})[side] = tensor
    if not pairs:
        raise UserError(f"adapter '{folder}' has no matrices; train it with target_modules")
    matrices, whole = {}, {name: shape for name, shape in parameters(shapes) if name.endswith(_ADAPTED)}
    for (layer, module), pair in pairs.items():
        if module == WITHIN_HEADS:
            raise UserError(f"adapter '{folder}' changes '{module}', which is multiplied head by head, for all requests at once; merge it into the model")
        in_module = shapes.transformers
        rows, columns = _shape_of(shapes, whole, layer, module, folder) if in_module is None else in_module.shape_of(f"{module}.weight")
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            if side not in pair or tuple(pair[side].shape) != shape:
                given = list(pair[side].shape) if side in pair else "missing"
                where = f"lora_{side} of '{module}'" + ("" if layer == ANY_LAYER else f" in layer {layer}")
                raise UserError(f"adapter '{folder}': {where} is {given}; this model requires {list(shape)}")
        matrices[layer, module] = (pair["A"], pair["B"].to(torch.promote_types(pair["B"].dtype, torch.float32)) * scale)
    return Adapter(rank, matrices, digest)


def _names(_: ModelShapes, name: str, folder: str | Path) -> tuple[tuple[int, str], str]:
    """Returns the key in ``Adapter.matrices`` of the tensor ``name`` of an adapter, and its side (A or B). Raises ``UserError`` for another name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"adapter '{folder}' has the tensor '{name}'; supported are q, k, v, o, gate, up, down and linear_attn's projections")
    return (int(match[1]), match[2]), match[3]


def _names_in_module(shapes: ModelShapes, name: str, folder: str | Path) -> tuple[tuple[int, str], str]:
    """Does ``_names`` for a module of transformers."""
    assert shapes.transformers is not None
    match = _NAME_IN_MODULE.fullmatch(name)
    if match is None or match[1] not in shapes.transformers.linears:
        adaptable = ", ".join(shapes.transformers.adaptable) or "none"
        raise UserError(f"adapter '{folder}' has the tensor '{name}'; linear layers of this model that an adapter can change are {adaptable}")
    return (ANY_LAYER, match[1]), match[2]


def _shape_of(shapes: ModelShapes, whole: dict[str, tuple[int, ...]], layer: int, module: str, folder: str | Path) -> tuple[int, ...]:
    """Returns the shape in ``whole`` of the adapted matrix. Raises ``UserError`` if there is none."""
    shape = whole.get(f"{matrix_name(layer, module)}.weight")
    if shape is not None:
        return shape
    if module in MLP_MODULES and layer < shapes.num_hidden_layers and shapes.experts_of(layer) is not None:
        raise UserError(
            f"adapter '{folder}' changes '{module}' of layer {layer}, a mixture of experts; adapt its q, k, v and o projections only"
        )
    raise UserError(f"adapter '{folder}' changes '{module}' of layer {layer}; this model has no such matrix to adapt")


def save_adapter(adapter: Mapping[str, Tensor], shapes: ModelShapes, folder: Path, base: Path) -> None:
    """Writes the ``adapter`` of a model of ``shapes``, by the names of ``layout.shapes``, as a folder that PEFT and ``enable_lora`` read, whole or not at
    all; ``base``: the folder of the model that it was trained for. Raises ``RunError`` if it cannot be written."""
    lora = shapes.lora
    assert lora is not None
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": lora.rank, "lora_alpha": lora.alpha,
        "target_modules": list(lora.target_modules), "use_rslora": lora.use_rslora, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "modules_to_save": None, "init_lora_weights": True, "inference_mode": True,
    }  # fmt: skip
    try:
        with whole_folder(folder) as written:
            write_file(written / WEIGHTS, [(PREFIX + name, tensor.contiguous()) for name, tensor in adapter.items()])
            (written / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"the adapter cannot be saved to '{folder}': {error}") from None


def read_adapter(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a folder of ``save_adapter`` by their names in ``layout.shapes``. Raises ``UserError`` if they cannot be read."""
    for name, tensor in read_file(folder / WEIGHTS):
        yield name.removeprefix(PREFIX), tensor


@torch.no_grad()
def merged_tensors(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], shapes: ModelShapes) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight of the ``base`` of ``shapes``, by its Hugging Face name and in their order, with the ``adapter`` added, W + scale B A, to the
    quantized matrix where it was trained beside one; one merged matrix is in memory at a time."""
    lora = shapes.lora
    assert lora is not None
    matrices = linear_matrices(shapes)
    for name, _ in parameters(shapes.exported):
        weight, matrix = base[name], name.removesuffix(".weight")
        if lora.quantization != "none" and matrix in matrices:
            weight = plain_weight(round_to_nearest(weight, scheme_named(lora.quantization))).to(weight.dtype)
        if f"{matrix}.lora_A.weight" in adapter:
            # Rounded once, from fp32 at least.
            a, b = (adapter[f"{matrix}.lora_{side}.weight"].to(weight.device, torch.float32) for side in "AB")
            weight = (weight.float() + lora.scale * (b @ a)).to(weight.dtype)
        yield name, weight
