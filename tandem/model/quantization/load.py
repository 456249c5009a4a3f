"""Loads a quantized Hugging Face folder into a packed decoder."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.kernels.quantized import QuantizedWeight, plain_weight
from tandem.layout.parameters import linear_name, parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import is_held, shard_slices
from tandem.model.decoder import Decoder, Linear
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import part_of, read_tensors, to_huggingface, wanted_of
from tandem.model.huggingface.stacked_experts import stacks_of_folder
from tandem.model.huggingface.weight_files import check_weights
from tandem.model.parallel.tensor_parallel import RankGroup
from tandem.model.quantization import bitsandbytes
from tandem.model.quantization.bits import AWQ_ORDER, unpack_words
from tandem.model.quantization.checkpoint_tensors import Tensors, take
from tandem.model.quantization.experts import expert_modules, store_experts
from tandem.model.quantization.formats import CheckpointFormat
from tandem.model.quantization.scheme import Scheme, Stored, rows_of, split_rows
from tandem.types import UserError

_PARTS = ("qweight", "qzeros", "scales", "g_idx", "SCB")
"""What the names of tensors end with that only a quantized module has, beside "weight_" and more, and of bitsandbytes "weight." and more."""


def scheme_of(stored: CheckpointFormat) -> Scheme:
    """Returns how plain weights are rounded when they replace those of a checkpoint in this format."""
    if stored.layout == "nf4":
        return Scheme("nf4", 64)
    if stored.layout in ("int-quantized", "llm-int8"):
        return Scheme("int8", stored.group_size, inputs="int8" if stored.rounds_inputs else "plain")
    if stored.layout == "float-quantized":
        columns = 0 if stored.block is None else stored.block[1]
        return Scheme("float8_e4m3", columns, inputs="float8_e4m3" if stored.rounds_inputs else "plain", input_group=columns)
    return Scheme("int4", stored.group_size, symmetric=stored.symmetric, inputs="int8" if stored.rounds_inputs else "plain")


@torch.no_grad()
def load_quantized(
    folder: str | Path, stored: CheckpointFormat, kernels: Kernels, *, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", group: RankGroup | None = None,
) -> Decoder:
    """Returns the model of a quantized folder, or one rank's rows of it, packed. Raises ``UserError`` naming the tensor that is missing or
    wrong."""
    shapes = read_shapes(folder)
    check_weights(Path(folder), shapes)
    decoder = Decoder(shapes, kernels, dtype=dtype, device=device, group=group)
    decoder.quantization = scheme_of(stored)
    try:
        tensors: Tensors = {}
        is_wanted = wanted_of(folder, decoder)
        for name, tensor in read_tensors(folder, lambda name: is_wanted(name) and is_held(shapes, name, decoder.shard_spec), stacked=False):
            if name in tensors:
                raise UserError(f"tensor '{name}' is given twice; a checkpoint must contain each tensor once")
            tensors[name] = tensor.to(decoder.device)
        _fill(decoder, stored, tensors)
    except UserError as error:
        raise UserError(f"model '{folder}': {error}") from None
    decoder.pack()
    return decoder


def projections(decoder: Decoder) -> list[tuple[Linear, tuple[str, ...]]]:
    """Returns every linear layer with the names of the modules whose rows it stacks."""
    return [each for index in decoder.layer_numbers for each in projections_of(decoder, index)]


def projections_of(decoder: Decoder, index: int) -> list[tuple[Linear, tuple[str, ...]]]:
    """Does ``projections`` for layer ``index``, in the order of the forward pass."""
    layer = decoder._layers()[decoder.layer_numbers.index(index)]
    return [
        (linear, tuple(linear_name(decoder.shapes, index, module) for module in stacked))
        for linear, stacked in zip(layer.linears(), layer.stacks(), strict=True)
    ]


def _fill(decoder: Decoder, stored: CheckpointFormat, tensors: Tensors) -> None:
    wanted, stacks = dict(parameters(decoder.shapes)), stacks_of_folder(decoder.shapes)
    own = dict(to_huggingface(decoder))
    modules = [module for _, each in projections(decoder) for module in each]
    modules += [module for index in decoder.layer_numbers for each in expert_modules(decoder, index) for module in each]
    in_folder = {name.removesuffix(".weight"): parts for name, parts in stacks.grouped((f"{module}.weight", module) for module in modules)}
    quantized = quantized_modules(stored, tensors)
    read: dict[str, QuantizedWeight] = {}
    for module in in_folder.keys() & quantized:
        names = [f"{part}.weight" for part in in_folder[module]]
        rows = [wanted[name][0] for name in names]
        whole = read_weight(module, stored, tensors, (sum(rows), wanted[names[0]][1]))
        for part, name, weight in zip(in_folder[module], names, split_rows(whole, rows), strict=True):
            read[part] = rows_of(weight, shard_slices(decoder.shapes, name, tuple(wanted[name]), decoder.shard_spec)[0])
    tensors = dict(stacks.split(tensors.items()))
    for name, parameter in own.items():
        if name.removesuffix(".weight") not in read:
            parameter.copy_(part_of(decoder, name, _plain(name, tensors, tuple(wanted[name]))))
    _check_rest(decoder.shapes, tensors)
    by_head = {id(layer.latent.kv_b_proj) for layer in decoder._layers() if layer.latent is not None}
    for linear, each in projections(decoder):
        assert linear.weight is not None
        if not any(module in read for module in each):
            if id(linear) not in by_head:
                linear.stored, linear.weight = (linear.weight.detach(),), None
        elif id(linear) in by_head:
            # It is multiplied head by head, which no kernel does with codes.
            linear.weight.copy_(plain_weight(read[each[0]]))
        else:
            parts: list[Stored] = [read[module] if module in read else own[f"{module}.weight"].clone() for module in each]
            linear.stored, linear.weight = tuple(parts), None
    store_experts(decoder, read)


def quantized_modules(stored: CheckpointFormat, tensors: Tensors) -> set[str]:
    """Returns the modules that have other tensors than a plain weight and a bias, but those that the format ignores."""
    plain, modules = (torch.float32, torch.float16, torch.bfloat16, torch.float64), set[str]()
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if ".weight." in name:
            modules.add(name.partition(".weight.")[0])
        elif kind in _PARTS or kind.startswith("weight_") or (kind == "weight" and tensor.dtype not in plain):
            modules.add(module)
    return {module for module in modules if not stored.ignores(module)}


def _plain(name: str, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
    tensor = take(name, tensors, shape)
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise UserError(f"tensor '{name}' is {tensor.dtype}, which is not the format in config.json; download the folder again")
    return tensor


def _check_rest(shapes: ModelShapes, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        known = name.endswith(("rotary_emb.inv_freq", ".bias")) and not tensor.any()
        if not known and not name.endswith("rotary_emb.inv_freq") and not (name == "lm_head.weight" and shapes.tie_word_embeddings):
            raise UserError(f"tensor '{name}' is not a parameter of this {shapes.architecture} model; check config.json")


def read_weight(module: str, stored: CheckpointFormat, tensors: Tensors, shape: tuple[int, int] | tuple[int, ...]) -> QuantizedWeight:
    """Returns the weight [N, K] of ``module`` from ``tensors``, removing what it reads. Raises ``UserError``."""
    rows, columns = shape
    group = stored.group_size or columns
    readers: dict[str, Callable[..., QuantizedWeight]] = {
        "awq": _awq, "gptq": _gptq, "pack-quantized": _pack_quantized, "int-quantized": _int_quantized,
        "float-quantized": _float8, "nf4": bitsandbytes.read_four_bits, "llm-int8": bitsandbytes.read_int8,
    }  # fmt: skip
    weight = readers[stored.layout](module, stored, tensors, rows, columns, group)
    for name, x in (("scales", weight.scales), ("weight", weight.codes.float() if weight.kind == "float8_e4m3" else None)):
        if x is not None and not bool(x.isfinite().all()):
            raise UserError(f"tensor '{module}.{name}' contains a value that is not finite; download the folder again")
    return weight._replace(inputs="int8") if weight.kind == "int4" and stored.rounds_inputs else weight


def _scales(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _awq(module: str, stored: CheckpointFormat, tensors: Tensors, rows: int, columns: int, group: int) -> QuantizedWeight:
    groups, words = math.ceil(columns / group), math.ceil(rows / 8)
    codes = unpack_words(take(f"{module}.qweight", tensors, (columns, words)), rows, AWQ_ORDER)
    zeros = unpack_words(take(f"{module}.qzeros", tensors, (groups, words)), rows, AWQ_ORDER)
    scales = take(f"{module}.scales", tensors, (groups, rows))
    return QuantizedWeight("int4", codes.t().contiguous(), _scales(scales.t()), zeros.t().float().contiguous(), group)


def _gptq(module: str, stored: CheckpointFormat, tensors: Tensors, rows: int, columns: int, group: int) -> QuantizedWeight:
    groups = math.ceil(columns / group)
    words = take(f"{module}.qweight", tensors, (math.ceil(columns / 8), rows))
    codes = unpack_words(words.t().contiguous(), columns)
    zeros = unpack_words(take(f"{module}.qzeros", tensors, (groups, math.ceil(rows / 8))), rows)
    if stored.stored_zeros_are_one_less:
        zeros = (zeros + 1) & 15
    scales = take(f"{module}.scales", tensors, (groups, rows))
    index = tensors.pop(f"{module}.g_idx", None)
    codes, order = _by_group(module, codes, index, group)
    return QuantizedWeight("int4", codes, _scales(scales.t()), zeros.t().float().contiguous(), group, order)


def _by_group(module: str, codes: Tensor, index: Tensor | None, group: int) -> tuple[Tensor, Tensor | None]:
    """Returns codes with the columns of a group adjacent, and the input index of each column (``None``: in order)."""
    plain = torch.arange(codes.shape[1]) // group
    if index is None or torch.equal(index.long(), plain):
        return codes, None
    if index.shape != plain.shape or not torch.equal(index.long().sort().values, plain):
        raise UserError(f"tensor '{module}.g_idx' does not divide the columns into groups of {group}; download the folder again")
    order = index.long().argsort(stable=True)
    return codes.index_select(1, order), order


def _pack_quantized(module: str, stored: CheckpointFormat, tensors: Tensors, rows: int, columns: int, group: int) -> QuantizedWeight:
    groups = math.ceil(columns / group)
    tensors.pop(f"{module}.weight_shape", None)
    codes = unpack_words(take(f"{module}.weight_packed", tensors, (rows, math.ceil(columns / 8))), columns)
    scales = _scales(take(f"{module}.weight_scale", tensors, (rows, groups)))
    zeros = torch.full((rows, groups), 8.0)
    if not stored.symmetric:
        words = take(f"{module}.weight_zero_point", tensors, (math.ceil(rows / 8), groups))
        zeros = unpack_words(words.t().contiguous(), rows).t().float().contiguous()
    codes, order = _by_group(module, codes, tensors.pop(f"{module}.weight_g_idx", None), group)
    return QuantizedWeight("int4", codes, scales, zeros, group, order)


def _int_quantized(module: str, stored: CheckpointFormat, tensors: Tensors, rows: int, columns: int, group: int) -> QuantizedWeight:
    codes = take(f"{module}.weight", tensors, (rows, columns))
    if codes.dtype != torch.int8:
        raise UserError(f"tensor '{module}.weight' is {codes.dtype}; config.json says int8")
    scales = _each_row(module, "weight_scale", tensors, rows, math.ceil(columns / group))
    return QuantizedWeight("int8", codes, scales, None, group, None, "int8" if stored.rounds_inputs else "plain")


def _float8(module: str, stored: CheckpointFormat, tensors: Tensors, rows: int, columns: int, group: int) -> QuantizedWeight:
    codes = take(f"{module}.weight", tensors, (rows, columns))
    if codes.dtype != torch.float8_e4m3fn:
        raise UserError(f"tensor '{module}.weight' is {codes.dtype}; config.json says float8_e4m3fn")
    inputs, name = "float8_e4m3" if stored.rounds_inputs else "plain", "weight_scale"
    input_group = 0
    if stored.block is not None:
        high, group = stored.block
        held = take(f"{module}.{name}", tensors, (math.ceil(rows / high), math.ceil(columns / group)))
        scales, input_group = held.float().repeat_interleave(high, 0)[:rows].contiguous(), group
    else:
        scales = _each_row(module, name, tensors, rows, math.ceil(columns / group))
    return QuantizedWeight("float8_e4m3", codes, scales, None, group, None, inputs, input_group)  # type: ignore[arg-type]


def _each_row(module: str, name: str, tensors: Tensors, rows: int, groups: int) -> Tensor:
    """Returns scales [rows, groups]; a single scale of the whole tensor is expanded to every row."""
    held = tensors.get(f"{module}.{name}")
    if held is not None and held.numel() == 1 and (rows, groups) != (1, 1):
        return tensors.pop(f"{module}.{name}").float().reshape(1, 1).expand(rows, groups).contiguous()
    if held is not None and held.shape == (rows,) and groups == 1:
        return tensors.pop(f"{module}.{name}").float().unsqueeze(1)
    return _scales(take(f"{module}.{name}", tensors, (rows, groups)))


def held_bytes(decoder: Decoder) -> int:
    """Returns the bytes of all weights that a decoder holds, packed ones in the kernels' layout."""
    packed = [list(matrices.values()) for matrices in decoder.packed_matrices()]
    held = {t.data_ptr(): t.nbytes for t in (*decoder.parameters(), *_tensors_in(packed))}
    return sum(held.values())


def _tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors_in(part)] if isinstance(value, list | tuple) else []
