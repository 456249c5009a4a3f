"""The parameters of a linear layer."""

from collections.abc import Sequence

import torch
from torch import nn

from tandem.kernels.quantized import PackedQuantized
from tandem.model.quantization.scheme import Stored
from tandem.model.trained_adapter import TrainedAdapter


class Linear(nn.Module):
    """The parameters of a linear layer, ``weight[N, K]`` and optionally ``bias[N]``; kernels do the arithmetic. ``stored``: until the
    decoder is packed, the weights as a quantized checkpoint stores them, one for each stacked projection. ``adapter``: what is trained beside the
    weights (``None``: nothing). ``frozen``: the packed weights in the place of ``weight`` if they are quantized and never trained (``None``: they are
    plain)."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    adapter: TrainedAdapter | None

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self.stored: tuple[Stored, ...] = ()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if bias else None
        self.adapter = None
        self.frozen: PackedQuantized | None = None

    def adapt(self, rows: tuple[int, ...], ranks: Sequence[int], scale: float) -> None:
        """Adds an uninitialised adapter to those of the stacked matrices of ``rows`` whose rank in ``ranks`` is not 0."""
        assert self.weight is not None
        if any(ranks):
            self.adapter = TrainedAdapter(rows, [rank > 0 for rank in ranks], self.columns, max(ranks), scale, self.weight.detach())
