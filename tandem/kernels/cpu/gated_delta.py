"""Bindings of the C++ passes of the gated delta rule."""

from torch import Tensor, empty_like, int64
from torch import bool as boolean

from tandem.kernels.api import DeltaStates
from tandem.kernels.cpu.calls import address, dense, indices
from tandem.kernels.cpu.library import Library
from tandem.kernels.gated_delta import Gradients


class CpuPasses:
    """fp32, with the bits of ``ReferencePasses.forward``; gradients have other sums over Dv."""

    def __init__(self, library: Library) -> None:
        self._c = library

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None) -> Tensor:
        v = dense(v)
        out, starts = empty_like(v), indices(bounds, int64)
        inputs = [dense(each) for each in (q, k, v, decay, beta)]
        rows, fresh = (None, None) if states is None else (indices(states.rows, int64), indices(states.fresh, boolean))
        kept = None if states is None or states.kept is None else indices(states.kept, int64)
        self._c.gated_delta(
            *(each.data_ptr() for each in inputs), starts.data_ptr(), len(starts) - 1, q.shape[1], v.shape[1], q.shape[2], v.shape[2],
            address(None if states is None else states.matrices), 0 if rows is None else rows.data_ptr(), 0 if fresh is None else fresh.data_ptr(),
            0 if kept is None else kept.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor) -> Gradients:
        inputs, starts = [dense(each) for each in (grad, q, k, v, decay, beta)], indices(bounds, int64)
        of_heads = lambda: q.new_empty(len(q), v.shape[1], q.shape[2])
        own = Gradients(of_heads(), of_heads(), *(empty_like(each) for each in inputs[3:]))
        self._c.gated_delta_backward(
            *(each.data_ptr() for each in inputs), starts.data_ptr(), len(starts) - 1, q.shape[1], v.shape[1], q.shape[2], v.shape[2],
            *(each.data_ptr() for each in own),
        )  # fmt: skip
        return own
