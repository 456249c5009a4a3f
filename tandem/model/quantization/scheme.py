"""Quantization schemes of a weight: options, rounding to nearest, and packing for inference."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.kernels.quantized import CODE_DTYPES, FP8_MAX, INT8_MAX, NORMAL_FLOATS, CodeKind, InputKind, PackedParts, QuantizedWeight
from tandem.types import UserError

Stored = QuantizedWeight | Tensor
"""A weight of a checkpoint: quantized, or plain."""

INT4_MAX = 15.0
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Scheme:
    """``group_size``: columns that share a scale (0: all of a row). ``symmetric``: no zeros (int4's is 8 then). ``inputs``,
    ``input_group``: see ``QuantizedWeight``. ``head``: includes the output head. ``half_scales``: scales are rounded to fp16, in which
    checkpoints store them, before they are used."""

    kind: CodeKind
    group_size: int = 0
    symmetric: bool = True
    inputs: InputKind = "plain"
    input_group: int = 0
    head: bool = False
    half_scales: bool = False


SCHEMES = {
    "int8": Scheme("int8", inputs="int8"),
    "fp8": Scheme("float8_e4m3", inputs="float8_e4m3"),
    "int4": Scheme("int4", 128, symmetric=False),
    "w4a8": Scheme("int4", 128, symmetric=False, inputs="int8"),
    "nf4": Scheme("nf4", 64),
    "bf16": Scheme("bfloat16"),
    "fp16": Scheme("float16"),
}


def scheme_named(name: str) -> Scheme:
    """Returns the scheme of ``LLM(quantization=...)``; ``name+head`` quantizes the output head as well. Raises ``UserError``."""
    base, plus, head = name.partition("+")
    if base not in SCHEMES or (plus and head != "head"):
        raise UserError(f"quantization is {name!r}; it must be one of {', '.join(SCHEMES)}, with '+head' for the output head too")
    return replace(SCHEMES[base], head=bool(plus))


def round_to_nearest(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Rounds ``weight[N, K]`` with scales from the largest magnitude (symmetric) or the range (asymmetric) of every group. A last, shorter
    group has its own width."""
    wide = weight.detach().float()
    columns = wide.shape[1]
    group = scheme.group_size or columns
    if scheme.kind in ("bfloat16", "float16"):
        return QuantizedWeight(scheme.kind, wide.to(CODE_DTYPES[scheme.kind]), None, None, group)
    runs = list(wide.split(group, dim=1))
    parameters = [group_scales(run, scheme) for run in runs]
    codes = torch.cat([codes_of(run, *own, scheme) for run, own in zip(runs, parameters, strict=True)], dim=1)
    scales = torch.stack([scale for scale, _ in parameters], dim=1)
    zeros = torch.stack([zero for _, zero in parameters], dim=1) if scheme.kind == "int4" else None
    return QuantizedWeight(scheme.kind, codes, scales, zeros, group, None, scheme.inputs, scheme.input_group)


def group_scales(run: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Returns the scale [N] and zero [N] of ``run[N, g]``. A scale is never 0."""
    if scheme.kind == "int4" and not scheme.symmetric:
        low, high = run.amin(1).clamp_max(0.0), run.amax(1).clamp_min(0.0)
        scale = _usable((high - low) / INT4_MAX, scheme)
        return scale, (-low / scale).round().clamp(0.0, INT4_MAX)
    most = {"int4": INT4_MAX / 2, "nf4": 1.0, "int8": INT8_MAX, "float8_e4m3": FP8_MAX}[scheme.kind]
    return _usable(run.abs().amax(1) / most, scheme), torch.full((len(run),), 8.0, device=run.device)


def _usable(scale: Tensor, scheme: Scheme) -> Tensor:
    if scheme.half_scales:
        # fp16 is limited to 65504 above and 2^-24 below.
        scale = scale.clamp(2.0**-24, 65504.0).half().float()
    return torch.where(scale > 0, scale, 1.0)


def codes_of(run: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    """Returns ``run[N, g]`` as codes under ``scale[N]`` and, for int4, ``zero[N]``."""
    ratio = run / scale.unsqueeze(1)
    if scheme.kind == "int4":
        return (ratio.round() + zero.unsqueeze(1)).clamp(0.0, INT4_MAX).to(torch.uint8)
    if scheme.kind == "nf4":
        numbers = ratio.new_tensor(NORMAL_FLOATS)
        return torch.bucketize(ratio, (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)
    if scheme.kind == "int8":
        return ratio.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return ratio.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def pack_weight(kernels: Kernels, weight: Tensor, scheme: Scheme | None) -> Any:
    """Packs a plain weight for inference: rounded under ``scheme``, or unchanged."""
    return kernels.pack(weight) if scheme is None else kernels.pack_quantized(round_to_nearest(weight, scheme))


def pack_groups(kernels: Kernels, weights: Tensor, scheme: Scheme | None) -> Any:
    """Does ``pack_weight`` for the plain ``weights[G, N, K]`` of experts."""
    return kernels.pack_groups(weights) if scheme is None else kernels.pack_quantized_groups([round_to_nearest(weight, scheme) for weight in weights])


def pack_stored(kernels: Kernels, stored: tuple[Stored, ...]) -> Any:
    """Packs the stored projections of a fused matrix: as one weight if they are stored alike, else as parts."""
    fused = joined_rows(stored)
    if fused is not None:
        return kernels.pack_quantized(fused)
    packed = [kernels.pack_quantized(p) if isinstance(p, QuantizedWeight) else kernels.pack(p) for p in stored]
    return packed[0] if len(packed) == 1 else PackedParts(tuple(packed))


def pack_stored_groups(kernels: Kernels, stored: Sequence[tuple[QuantizedWeight, ...]]) -> Any:
    """Packs the stored projections of a fused matrix of every expert: as one weight if those of each are stored alike, else as parts."""
    fused = [joined_rows(parts) for parts in stored]
    whole = [weight for weight in fused if weight is not None]
    if len(whole) == len(fused):
        return kernels.pack_quantized_groups(whole)
    return PackedParts(tuple(kernels.pack_quantized_groups(parts) for parts in zip(*stored, strict=True)))


def joined_rows(stored: Sequence[Stored]) -> QuantizedWeight | None:
    """Returns weights one below the other as one; ``None`` if they are not all quantized in the same way."""
    whole = [part for part in stored if isinstance(part, QuantizedWeight)]
    if len(whole) < len(stored) or not all(_is_alike(whole[0], part) for part in whole):
        return None
    first = whole[0]
    return first._replace(
        codes=torch.cat([part.codes.view(torch.uint8) for part in whole]).view(first.codes.dtype) if first.kind == "float8_e4m3"
        else torch.cat([part.codes for part in whole]),
        scales=None if first.scales is None else torch.cat([part.scales for part in whole if part.scales is not None]),
        zeros=None if first.zeros is None else torch.cat([part.zeros for part in whole if part.zeros is not None]),
    )  # fmt: skip


def split_rows(weight: QuantizedWeight, rows: Sequence[int]) -> list[QuantizedWeight]:
    """Returns the runs of ``rows`` of ``weight`` one by one."""
    ends = list(itertools.accumulate(rows))
    return [rows_of(weight, slice(end - count, end)) for count, end in zip(rows, ends, strict=True)]


def rows_of(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    """Returns some rows of ``weight``; they quantize and multiply as within the whole, because scales and zeros are per row."""
    return weight._replace(
        codes=weight.codes[rows],
        scales=None if weight.scales is None else weight.scales[rows],
        zeros=None if weight.zeros is None else weight.zeros[rows],
    )


def _is_alike(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    same = (one.kind, one.group_size, one.inputs, one.input_group, one.zeros is None) == (
        other.kind, other.group_size, other.inputs, other.input_group, other.zeros is None,
    )  # fmt: skip
    if not same or (one.order is None) != (other.order is None):
        return False
    return one.order is None or other.order is None or torch.equal(one.order, other.order)
