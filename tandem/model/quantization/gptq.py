"""GPTQ: rounds one column after another and corrects the remaining columns for the error (Frantar et al., 2022)."""

import torch
from torch import Tensor

from tandem.kernels.quantized import QuantizedWeight, plain_weight
from tandem.model.quantization.scheme import Scheme, codes_of, group_scales
from tandem.types import UserError

BLOCK_COLUMNS = 128
"""Columns whose corrections are applied to the rest of the matrix in one product (section 3.3, "lazy batch updates")."""


class Hessian:
    """Accumulates ``2 / T * sum x x^T`` of a layer's inputs (equation 1), batch by batch."""

    def __init__(self, columns: int) -> None:
        self._sum = torch.zeros(columns, columns)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Adds the inputs ``x[T, K]``."""
        self._sum.addmm_(x.t(), x)
        self.tokens += len(x)

    def mean(self) -> Tensor:
        return self._sum * (2.0 / max(1, self.tokens))


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme, *, damping: float = 0.01, act_order: bool = False) -> QuantizedWeight:
    """Quantizes ``weight[N, K]`` so that the layer's outputs are preserved, given ``hessian[K, K]``.

    ``damping``: share of the mean diagonal that is added to the diagonal. ``act_order``: columns with large inputs first, and groups of
    columns in that order. Scales are computed from the corrected columns when their group begins. Raises ``UserError`` if the damped
    Hessian is not positive definite."""
    rest, hessian = weight.detach().float().clone(), hessian.float().clone()
    columns = rest.shape[1]
    group = scheme.group_size or columns
    diagonal = hessian.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1.0
    rest[:, unused] = 0.0
    order = diagonal.argsort(descending=True, stable=True) if act_order else None
    if order is not None:
        rest, hessian = rest[:, order], hessian[order][:, order]
    inverse = _inverse_factor(hessian, damping)
    codes = torch.empty_like(rest, dtype=torch.uint8)
    scales, zeros = [], []
    for block in _blocks(columns, group):
        own, errors = rest[:, block].clone(), torch.empty_like(rest[:, block])
        if block.start % group == 0:
            group_scale, group_zero = group_scales(rest[:, block.start : block.start + group], scheme)
            scales.append(group_scale)
            zeros.append(group_zero)
        scale, zero = scales[-1], zeros[-1]
        factor = inverse[block, block]
        for i in range(own.shape[1]):
            column = own[:, i : i + 1]
            code = codes_of(column, scale, zero, scheme)
            codes[:, block.start + i] = code[:, 0]
            error = (column - (code.float() - zero.unsqueeze(1)) * scale.unsqueeze(1)) / factor[i, i]
            own[:, i:] -= error * factor[i, i:]
            errors[:, i] = error[:, 0]
        rest[:, block.stop :] -= errors @ inverse[block, block.stop :]
    return QuantizedWeight(scheme.kind, codes, torch.stack(scales, 1), torch.stack(zeros, 1), group, order)


def _blocks(columns: int, group: int) -> list[slice]:
    """Returns runs of at most ``BLOCK_COLUMNS`` columns that do not cross group boundaries."""
    blocks, start = [], 0
    while start < columns:
        stop = min(columns, start + BLOCK_COLUMNS, (start // group + 1) * group)
        blocks.append(slice(start, stop))
        start = stop
    return blocks


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Returns the upper Cholesky factor of the damped Hessian's inverse: row i contains the corrections of later columns for column i
    (section 3.3, "Cholesky reformulation")."""
    damped = hessian + torch.eye(len(hessian)) * (damping * hessian.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        raise UserError(f"GPTQ's Hessian is not positive definite at damping {damping}; raise --damping or give more calibration text")
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor


def reconstruction_error(weight: Tensor, quantised: QuantizedWeight, hessian: Tensor) -> float:
    """Returns ``tr((W - Q) H (W - Q)^T)``: twice the mean squared error of the outputs, summed over the output channels."""
    difference = weight.detach().double() - plain_weight(quantised).double()
    return float(((difference @ hessian.double()) * difference).sum())
