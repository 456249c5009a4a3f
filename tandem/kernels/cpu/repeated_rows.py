"""Rows of a batch of which several are the same, for backward passes that sum over all of them (``RepeatedRows`` of rows.h)."""

from torch import Tensor


class RepeatedRows:
    """Rows of a batch of which several are the same, each of which is computed once. ``saved[count]`` int64: for each of the rows the one of what the
    forward pass computed; ``grad[count]``: the one of the gradients, and ``first[G]``: the first row that has each of those (``None``: its own).
    ``saved_of_grad[G]``: the rows of the forward pass that gradients belong to."""

    def __init__(self, saved: Tensor, grad: Tensor | None, first: Tensor | None) -> None:
        self.saved, self.grad, self.first, self.count = saved, grad, first, len(saved)
        self.saved_of_grad = saved if first is None else saved[first]
        self.addresses = saved.data_ptr(), 0 if grad is None else grad.data_ptr(), 0 if first is None else first.data_ptr()

    def one_of_each(self, x: Tensor) -> Tensor:
        """Returns the rows of ``x[count, ...]`` that are the first of their gradient: [G, ...]."""
        return x if self.first is None else x.index_select(0, self.first)

    def all_of(self, grad: Tensor) -> Tensor:
        """Returns the gradients of all rows: [G, ...] -> [count, ...]."""
        return grad if self.grad is None else grad.index_select(0, self.grad)


def addresses_of(same: RepeatedRows | None, rows: int) -> tuple[int, tuple[int, int, int]]:
    """Returns the number of rows and the addresses of ``same``; ``None``: of ``rows`` that are their own."""
    return (rows, (0, 0, 0)) if same is None else (same.count, same.addresses)
