"""Reads weights in fp8 of which a block of rows and columns shares a scale, as DeepSeek-V3 is published (DeepSeek-AI, 2024, section 3.3.2): the weight is its
code times its block's ``weight_scale_inv``. The last blocks of rows and columns may be smaller."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from tandem.types import UserError

SUFFIX = "_scale_inv"


def wanted_with_scales(is_wanted: Callable[[str], bool] | None) -> Callable[[str], bool] | None:
    """Returns ``is_wanted`` of a weight as a condition on it and on its scales."""
    return None if is_wanted is None else lambda name: is_wanted(name.removesuffix(SUFFIX))


def decoded(tensors: Iterable[tuple[str, Tensor]], block: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    """Yields ``tensors`` with those in fp8, [N, K], decoded to fp32; their scales, [ceil(N / rows), ceil(K / columns)], may come before or after them. Raises
    ``UserError`` naming a tensor without its scales or codes, of another shape, or with a value that is not finite."""
    halves: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if tensor.dtype != torch.float8_e4m3fn and not name.endswith(SUFFIX):
            yield name, tensor
            continue
        weight = name.removesuffix(SUFFIX)
        other = weight if name.endswith(SUFFIX) else weight + SUFFIX
        if other not in halves:
            halves[name] = tensor
            continue
        both = {name: tensor, other: halves.pop(other)}
        yield weight, decode(weight, both[weight], both[weight + SUFFIX], block)
    if halves:
        name = next(iter(halves))
        missing = name.removesuffix(SUFFIX) if name.endswith(SUFFIX) else name + SUFFIX
        raise UserError(f"tensor '{missing}' in fp8 is missing from the weights, which have '{name}'; download the folder again")


def decode(name: str, codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns the weight ``name`` in fp32, which has the product of a code and a scale as it is rounded once."""
    wanted = [-(-size // each) for size, each in zip(codes.shape, block, strict=False)]
    if codes.ndim != 2 or list(scales.shape) != wanted:
        raise UserError(
            f"tensor '{name}{SUFFIX}' has shape {list(scales.shape)}; '{name}' of shape {list(codes.shape)} in blocks of {list(block)} requires {wanted}: "
            "check weight_block_size in config.json, or download the folder again"
        )
    if not scales.is_floating_point():
        raise UserError(f"tensor '{name}{SUFFIX}' is {scales.dtype}; scales are floating-point numbers: download the folder again")
    rows, columns = block
    weight = codes.float()
    each = scales.float().repeat_interleave(rows, dim=0)[: len(weight)]
    for start, scale in zip(range(0, weight.shape[1], columns), each.unbind(1), strict=True):
        weight[:, start : start + columns] *= scale.unsqueeze(1)
    if not bool(weight.isfinite().all()):
        raise UserError(f"tensor '{name}' contains a value that is not finite; download the folder again")
    return weight
