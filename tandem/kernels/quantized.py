"""Quantised weights as plain data, and their arithmetic in plain torch.

A weight of N output channels and K inputs is ``codes[N, K]``; runs of ``group_size`` columns share a scale (and a zero):

    weight[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g],  g = the group of column k

or, for nf4, ``NORMAL_FLOATS[codes[n, k]] * scales[n, g]``, and for mxfp4 the same with ``MXFP4_NUMBERS``.

``inputs`` says what happens to the other operand: nothing (weight-only, "W4A16"), or a rounding to 8 bits under a scale
of each row ("W8A8"; Dettmers et al., 2022, section 2.1: vector-wise scales). With int8 inputs, an int8 weight with one scale a channel and
an int4 weight ("W4A8") are multiplied in integers: exactly, the latter group by group; everything else is decoded to fp32 and multiplied as
``linear`` does. That includes fp8 inputs: no processor has an instruction for them, so theirs is an emulation in fp32.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

CodeKind = Literal["int4", "nf4", "mxfp4", "int8", "float8_e4m3", "bfloat16", "float16"]
InputKind = Literal["plain", "int8", "float8_e4m3"]

CODE_DTYPES = {
    "int4": torch.uint8, "nf4": torch.uint8, "mxfp4": torch.uint8, "int8": torch.int8, "float8_e4m3": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
INT8_MAX, FP8_MAX = 127.0, 448.0
NORMAL_FLOATS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 4-bit NormalFloat (Dettmers et al., 2023, "QLoRA", appendix E): quantiles of the normal distribution, with an exact 0."""
MXFP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1 (Open Compute Project, 2023, "OCP Microscaling Formats (MX)") by code: a sign, two bits of exponent and one of mantissa."""
_NUMBERS: dict[str, tuple[float, ...]] = {"nf4": NORMAL_FLOATS, "mxfp4": MXFP4_NUMBERS}
MOST_COLUMNS = 1 << 17
"""Inputs of an integer product: 127 * 127 times this number still fits an int32."""
PRODUCTS_AT_ONCE = 4
"""Adjacent inputs whose products a processor sums in one instruction, which a group of int4 does not divide."""


class QuantizedWeight(NamedTuple):
    """``codes[N, K]``: uint8 0..15 (int4, nf4, mxfp4), int8, e4m3, bf16 or fp16. ``scales[N, G]`` fp32, ``zeros[N, G]`` fp32 whole numbers or ``None``
    (both ``None`` for bf16 and fp16; those of mxfp4 are powers of two), G = ceil(K / ``group_size``).

    ``order[K]`` int64 (``None``: identity): column i of ``codes`` belongs to input ``order[i]``, so that the columns of groups chosen by
    importance (GPTQ's ``desc_act``) are adjacent. ``input_group``: columns of an input row that share a scale; 0: the whole row.
    """

    kind: CodeKind
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    group_size: int
    order: Tensor | None = None
    inputs: InputKind = "plain"
    input_group: int = 0

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1]


class PackedQuantized(NamedTuple):
    """A ``QuantizedWeight`` in its kernel's layout: ``data``, ``scales`` and ``zeros`` belong to the kernel set. Of several groups (``pack_quantized_groups``),
    each of ``rows`` x ``columns``, they have a first axis more, as has ``order``."""

    kind: CodeKind
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    group_size: int
    order: Tensor | None
    inputs: InputKind
    input_group: int
    rows: int
    columns: int

    @property
    def is_integer_product(self) -> bool:
        """Whether it is multiplied in integers."""
        if self.inputs != "int8" or self.input_group:
            return False
        one_group = self.group_size >= self.columns
        if self.kind == "int4":
            return one_group or self.group_size % PRODUCTS_AT_ONCE == 0
        return self.kind == "int8" and one_group and self.zeros is None and self.order is None


class PackedParts(NamedTuple):
    """A weight made of stacked row blocks that are stored in different formats or places; each is packed."""

    parts: tuple[Any, ...]


def keep_codes(weight: QuantizedWeight) -> PackedQuantized:
    """Returns the layout of the reference kernels, which is the plain one."""
    _check(weight)
    own = [None if x is None else x.detach().clone() for x in (weight.codes, weight.scales, weight.zeros, weight.order)]
    codes, scales, zeros, order = own
    assert codes is not None
    return PackedQuantized(
        weight.kind, codes, scales, zeros, weight.group_size, order, weight.inputs, weight.input_group, *codes.shape
    )


def of_groups(weights: Sequence[PackedQuantized]) -> PackedQuantized:
    """Returns the packed ``weights`` of as many groups, which are alike, as one."""
    if any(weight.order is not None for weight in weights):
        plain = torch.arange(weights[0].columns, device=weights[0].data.device)
        weights = [weight if weight.order is not None else weight._replace(order=plain) for weight in weights]

    def stacked(parts: list[Tensor | None]) -> Tensor | None:
        whole = [part for part in parts if part is not None]
        return torch.stack(whole) if whole else None

    return weights[0]._replace(
        data=torch.stack([weight.data for weight in weights]), scales=stacked([weight.scales for weight in weights]),
        zeros=stacked([weight.zeros for weight in weights]), order=stacked([weight.order for weight in weights]),
    )  # fmt: skip


def group_of(weight: PackedQuantized, group: int) -> PackedQuantized:
    """Returns one of several groups that are packed as one."""

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[group]

    return weight._replace(data=weight.data[group], scales=own(weight.scales), zeros=own(weight.zeros), order=own(weight.order))


def check_integer_columns(columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise ValueError(f"an integer product has {columns} inputs; it must have at most {MOST_COLUMNS} to avoid overflow")


def _check(weight: QuantizedWeight) -> None:
    if weight.codes.dtype != CODE_DTYPES[weight.kind]:
        raise TypeError(f"{weight.kind} codes are {weight.codes.dtype}; expected {CODE_DTYPES[weight.kind]}")
    groups = [weight.rows, -(-weight.columns // weight.group_size)]
    for name, x in (("scales", weight.scales), ("zeros", weight.zeros)):
        if x is not None and list(x.shape) != groups:
            raise ValueError(f"quantized weight {name} have shape {list(x.shape)}; expected {groups}")
    if (weight.scales is None) != (weight.kind in ("bfloat16", "float16")):
        raise ValueError(f"quantized weight of {weight.kind}: it must {'have' if weight.scales is None else 'not have'} scales")


def dequantize(weight: QuantizedWeight | PackedQuantized) -> Tensor:
    """Returns the dequantised weight [N, K] in fp32, of groups [G, N, K], with columns in the order of the codes. A packed weight must come
    from ``keep_codes``."""
    codes = weight.codes if isinstance(weight, QuantizedWeight) else weight.data
    numbers = _NUMBERS.get(weight.kind)
    wide = codes.float() if numbers is None else codes.new_tensor(numbers, dtype=torch.float32)[codes.long()]
    if weight.scales is None:
        return wide
    group = torch.arange(wide.shape[-1], device=wide.device) // weight.group_size
    if weight.zeros is not None:
        wide = wide - weight.zeros[..., group]
    return wide * weight.scales[..., group]


def plain_weight(weight: QuantizedWeight | PackedQuantized) -> Tensor:
    """Returns the weight [N, K] in fp32 with columns in the order of the inputs. A packed weight must come from ``keep_codes``."""
    wide = dequantize(weight)
    return wide if weight.order is None else torch.empty_like(wide).index_copy_(1, weight.order, wide)


def round_rows(x: Tensor, kind: InputKind, group: int = 0) -> tuple[Tensor, Tensor]:
    """Returns ``x[T, K]`` as (codes [T, K] fp32, scales [T, G]): whole numbers up to 127, or values of e4m3. The scale is the largest
    magnitude of the row's run of ``group`` columns (0: all) over 127 or 448. If that is not finite, the scale is NaN and the codes are
    0."""
    width = x.shape[1]
    group = group or width
    runs = torch.nn.functional.pad(x.float(), (0, -width % group)).view(len(x), -(-width // group), group)
    largest = runs.abs().amax(-1)
    scales = torch.where(largest.isfinite(), largest / (INT8_MAX if kind == "int8" else FP8_MAX), torch.nan)
    usable = (scales > 0).unsqueeze(-1)
    ratio = torch.where(usable, runs / scales.unsqueeze(-1), 0.0)
    if kind == "int8":
        codes = ratio.round().clamp(-INT8_MAX, INT8_MAX)
    else:
        codes = ratio.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return codes.flatten(1)[:, :width], scales


def in_order_of_codes(x: Tensor, weight: PackedQuantized, bounds: Tensor | None = None) -> Tensor:
    """Returns the inputs ``x[T, K]`` of the product in the order of the codes; ``bounds``: of the rows of each group, if ``weight`` has several."""
    if weight.order is None:
        return x
    if bounds is None:
        return x.index_select(1, weight.order)
    return x.gather(1, weight.order.repeat_interleave(bounds.diff(), 0, output_size=len(x)))


def round_inputs(x: Tensor, weight: PackedQuantized, bounds: Tensor | None = None) -> Tensor:
    """Returns the inputs of the product: in the order of the codes, and rounded if ``weight`` requires it. ``bounds``: see ``in_order_of_codes``."""
    x = in_order_of_codes(x, weight, bounds)
    if weight.inputs == "plain":
        return x
    codes, scales = round_rows(x, weight.inputs, weight.input_group)
    group = torch.arange(x.shape[1], device=x.device) // (weight.input_group or x.shape[1])
    return (codes * scales[:, group]).to(x.dtype)


def int8_linear(x: Tensor, weight: PackedQuantized, bias: Tensor | None) -> Tensor:
    """Computes ``x[T, K]`` times the weight in integers. float64 represents every sum of these products exactly, in any order."""
    assert weight.scales is not None
    check_integer_columns(weight.columns)
    codes, scales = round_rows(x, "int8")
    sums = (codes.double() @ weight.data.double().t()).float()
    out = (sums * (scales * weight.scales.t())).to(x.dtype)
    return out if bias is None else out + bias


def int4_linear(x: Tensor, weight: PackedQuantized, bias: Tensor | None) -> Tensor:
    """Computes ``x[T, K]`` times the weight: exact sums of integers in each group of columns, scaled and added in fp32 from the first group to the last."""
    assert weight.scales is not None
    check_integer_columns(weight.columns)
    codes, row_scales = round_rows(in_order_of_codes(x, weight), "int8")
    total: Tensor | None = None
    for group, first in enumerate(range(0, weight.columns, weight.group_size)):
        own = slice(first, first + weight.group_size)
        numbers = weight.data[:, own].double()
        if weight.zeros is not None:
            numbers -= weight.zeros[:, group : group + 1]
        part = (codes[:, own].double() @ numbers.t()).float() * weight.scales[:, group]
        total = part if total is None else total + part
    assert total is not None
    out = (total * row_scales).to(x.dtype)
    return out if bias is None else out + bias


def integer_linear(x: Tensor, weight: PackedQuantized, bias: Tensor | None) -> Tensor:
    """Computes a product in integers."""
    return (int4_linear if weight.kind == "int4" else int8_linear)(x, weight, bias)


def integer_groups(x: Tensor, weight: PackedQuantized, bounds: Tensor) -> Tensor:
    """Does ``integer_linear`` for the rows of each group."""
    ends = bounds.tolist()
    parts = [integer_linear(x[start:end], group_of(weight, group), None) for group, (start, end) in enumerate(itertools.pairwise(ends)) if end > start]
    return torch.cat(parts) if parts else x.new_empty(0, weight.rows)


def with_parts(
    linear: Callable[[Tensor, Any, Tensor | None], Tensor], x: Tensor, weight: PackedParts, bias: Tensor | None
) -> Tensor:
    """Returns the concatenated outputs of the parts."""
    if bias is not None and not any(isinstance(part, PackedQuantized) for part in weight.parts):
        # Added in the product, as to one that is not in parts.
        own = bias.split([part.rows for part in weight.parts])
        return torch.cat([linear(x, part, each) for part, each in zip(weight.parts, own, strict=True)], dim=1)
    out = torch.cat([linear(x, part, None) for part in weight.parts], dim=1)
    return out if bias is None else out + bias
