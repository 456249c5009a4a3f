"""What tensor-parallel ranks exchange: gloo between CPUs, NCCL between GPUs, and no global state.

Sums are taken in rank order, so that they do not depend on who arrives first.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.kernels.api import sum_in_order
from tandem.layout.sharding import Cut
from tandem.model.parallel import ALONE, Collectives


class RankGroup:
    """The ranks of one model, seen from ``cut.rank``. Each of its methods must be called by every rank, in the same
    order."""

    def __init__(self, cut: Cut, rendezvous: Path, device: torch.device, deadline_s: float) -> None:
        """Meet the other ranks over the file ``rendezvous``, which only they can read. A rank that is dead ends a call with
        ``RuntimeError`` at once, one that is silent after ``deadline_s``."""
        self.cut = cut
        self.deadline_s = deadline_s
        store = dist.FileStore(str(rendezvous), cut.size)
        limit = timedelta(seconds=deadline_s)
        if device.type == "cuda":
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = limit
            self._group: Any = dist.ProcessGroupNCCL(store, cut.rank, cut.size, settings)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = limit
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            self._group = gloo(store, cut.rank, cut.size, options)

    def columns(self, x: Tensor) -> Tensor:
        """Every rank's ``x[T, N]`` side by side: [T, size N]."""
        rows, width = x.shape
        return self._gathered(x).transpose(0, 1).reshape(rows, self.cut.size * width)

    def total(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in rank order."""
        return sum_in_order(self._gathered(x).unbind(0))

    def _gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.cut.size, *x.shape)
        self._group._allgather_base(out.flatten(0, 1), x.contiguous()).wait()
        return out

    def first_rank_columns(self, x: Tensor, part: int, width: int) -> Tensor:
        """On rank 0 every rank's ``x[T, n]`` side by side, [T, width], where all but the last have n = ``part``; elsewhere
        ``x``."""
        padded = x if x.shape[1] == part else torch.nn.functional.pad(x, (0, part - x.shape[1]))
        options = dist.GatherOptions()
        options.rootRank = 0
        out = [torch.empty_like(padded) for _ in range(self.cut.size)] if self.cut.rank == 0 else None
        self._group.gather([out] if out is not None else [], [padded.contiguous()], options).wait()
        return x if out is None else torch.cat(out, dim=1)[:, :width].contiguous()

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Send ``tensors`` to ``rank``, which must ``receive`` them."""
        for tensor in tensors:
            self._group.send([tensor.contiguous()], rank, 0).wait()

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fill contiguous ``tensors`` with what rank 0 sends."""
        for tensor in tensors:
            self._group.recv([tensor], 0, 0).wait()


def collectives(group: RankGroup | None) -> Collectives:
    """Deterministic: gather inputs, and the columns of outputs. Else: sum the partial products."""
    if group is None:
        return ALONE
    if group.cut.deterministic:
        return Collectives(before=group.columns, after=group.columns, embedded=group.total)
    return Collectives(after=group.total, embedded=group.total)
