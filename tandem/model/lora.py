"""Low-rank adapters (Hu et al., 2021): PEFT folders, and batches with several adapters.

Adapters are loaded into *slots*. Each adapted matrix has two stacks of small matrices, one for each slot, padded with zeros to the maximum
rank: the rows of a batch are sorted by slot and multiplied with both stacks (Punica; Chen et al., 2023). A row's bits depend on its own
adapter only, and rows without one are not changed.
"""

import hashlib
import json
import math
import re
import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Kernels, PackedGroups
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import WHOLE, ShardSpec, shard_slices
from tandem.model.huggingface.model_config import read_json
from tandem.model.huggingface.safetensors_file import read_file
from tandem.runtime.machine.available_memory import total_bytes
from tandem.types import UserError
from tandem.types.input_file import read_input

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight")
_PLAIN: dict[str, object] = {
    "bias": "none", "use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {}, "trainable_token_indices": None,
}  # fmt: skip
"""The values of a plain adapter for these configuration keys; other values change what it computes."""
_FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "output": ("o_proj",), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Adapter:
    """``matrices[layer, "q_proj"]``: (A [r, K], B [N, r] times the scale alpha / r, or alpha / sqrt(r) if it is rank-stabilised).
    ``digest`` covers every byte of the folder's two files."""

    rank: int
    matrices: dict[tuple[int, str], tuple[Tensor, Tensor]]
    digest: str


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
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise UserError(f"adapter '{folder}' has lora_alpha {reprlib.repr(alpha)}; it must be a finite number")
    if rank > max_rank:
        raise UserError(f"adapter '{folder}' has rank {rank}; this engine allows at most {max_rank}; raise max_lora_rank")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in read_file(Path(folder) / WEIGHTS):
        match = _NAME.fullmatch(name)
        if match is None:
            raise UserError(f"adapter '{folder}' has the tensor '{name}'; supported are q, k, v, o, gate, up and down projections")
        pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    if not pairs:
        raise UserError(f"adapter '{folder}' has no matrices; train it with target_modules")
    matrices = {}
    for (layer, module), pair in pairs.items():
        rows, columns = _shape_of(shapes, layer, module, folder)
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            if side not in pair or tuple(pair[side].shape) != shape:
                given = list(pair[side].shape) if side in pair else "missing"
                where = f"lora_{side} of '{module}' in layer {layer}"
                raise UserError(f"adapter '{folder}': {where} is {given}; this model requires {list(shape)}")
        matrices[layer, module] = (pair["A"], pair["B"].to(torch.promote_types(pair["B"].dtype, torch.float32)) * scale)
    return Adapter(rank, matrices, digest)


def _shape_of(shapes: ModelShapes, layer: int, module: str, folder: str | Path) -> tuple[int, int]:
    """Returns (rows, columns) of the adapted matrix."""
    hidden, inner = shapes.hidden_size, shapes.intermediate_size
    known = {
        "q_proj": (shapes.query_size, hidden), "k_proj": (shapes.key_value_size, hidden), "v_proj": (shapes.key_value_size, hidden),
        "o_proj": (hidden, shapes.query_size), "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
    if module not in known or layer >= shapes.num_hidden_layers:
        raise UserError(f"adapter '{folder}' changes '{module}' of layer {layer}; this model has no such matrix to adapt")
    if module in ("gate_proj", "up_proj", "down_proj") and shapes.experts_of(layer) is not None:
        raise UserError(
            f"adapter '{folder}' changes '{module}' of layer {layer}, a mixture of experts; adapt its q, k, v and o projections only"
        )
    return known[module]


class LowRank(NamedTuple):
    """The two stacks of one matrix: ``first`` [S, P, K] and ``second`` [S, N, P], packed, for S slots. A fused matrix has a share of P for
    each of its parts, and ``second`` is zero where a part meets another part's share."""

    first: PackedGroups
    second: PackedGroups


class LoraLayer(NamedTuple):
    """The adapters' updates in one layer; ``None`` if no slot adapts the matrix."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


class LoraBatch(NamedTuple):
    """The rows [R] int64 of a flat batch that have an adapter, sorted by slot: slot s has ``rows[bounds[s]:bounds[s + 1]]`` (int64 [S +
    1])."""

    layers: list[LoraLayer]
    rows: Tensor
    bounds: Tensor


def lora_batch(layers: list[LoraLayer], slots: Tensor, count: int) -> LoraBatch | None:
    """Returns the batch for the slot of every token (``slots[T]`` int64, -1: no adapter), of ``count`` slots; ``None`` if no token has an
    adapter."""
    order = slots.argsort(stable=True)
    bounds = torch.searchsorted(slots[order], torch.arange(count + 1))
    if bounds[0] == len(slots):
        return None
    return LoraBatch(layers, order[bounds[0] :], bounds - bounds[0])


def stack(
    adapters: Sequence[Adapter | None], shapes: ModelShapes, kernels: Kernels, max_rank: int, like: Tensor, shard_spec: ShardSpec = WHOLE
) -> list[LoraLayer]:
    """Returns the layers' stacks for ``adapters`` in their slots (``None``: a free slot), in the dtype and on the device of ``like``.
    ``shard_spec``: returns what the rank with this shard spec needs."""
    layers = []
    for layer in range(shapes.num_hidden_layers):
        fused = {}
        for name, parts in _FUSED.items():
            if any(adapter is not None and (layer, part) in adapter.matrices for adapter in adapters for part in parts):
                fused[name] = _low_rank(adapters, layer, parts, shapes, kernels, max_rank, like, shard_spec)
        layers.append(LoraLayer(**fused))
    return layers


def _low_rank(
    adapters: Sequence[Adapter | None], layer: int, parts: Sequence[str], shapes: ModelShapes, kernels: Kernels,
    max_rank: int, like: Tensor, shard_spec: ShardSpec,
) -> LowRank:
    held = [_held(shapes, layer, part, shard_spec) for part in parts]
    sizes = [rows.stop - rows.start for rows, _ in held]
    first = like.new_zeros(len(adapters), len(parts) * max_rank, held[0][1].stop - held[0][1].start)
    second = like.new_zeros(len(adapters), sum(sizes), len(parts) * max_rank)
    for slot, adapter in enumerate(adapters):
        row = 0
        for i, part in enumerate(parts):
            if adapter is not None and (layer, part) in adapter.matrices:
                a, b = adapter.matrices[layer, part]
                share = slice(i * max_rank, i * max_rank + adapter.rank)
                first[slot, share] = a[:, held[i][1]].to(like)
                second[slot, row : row + sizes[i], share] = b[held[i][0]].to(like)
            row += sizes[i]
    return LowRank(kernels.pack_groups(first), kernels.pack_groups(second))


def _held(shapes: ModelShapes, layer: int, part: str, shard_spec: ShardSpec) -> tuple[slice, slice]:
    """Returns the rows and the columns of an adapted matrix that a rank holds."""
    name = f"model.layers.{layer}.{'self_attn' if part in ('q_proj', 'k_proj', 'v_proj', 'o_proj') else 'mlp'}.{part}.weight"
    rows, columns = shard_slices(shapes, name, _shape_of(shapes, layer, part, ""), shard_spec)
    return rows, columns


def add_lora(kernels: Kernels, out: Tensor, x: Tensor, low_rank: LowRank | None, batch: LoraBatch) -> Tensor:
    """Adds ``x A^T B^T`` to ``out[T, N]`` in place, for the rows that have an adapter; ``x[T, K]``. No gradient."""
    if low_rank is None:
        return out
    multiply: Any = kernels.grouped_linear_packed
    inner = multiply(x.index_select(0, batch.rows), low_rank.first, batch.bounds)
    return out.index_add_(0, batch.rows, multiply(inner, low_rank.second, batch.bounds))
