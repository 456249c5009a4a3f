"""The routing of tokens to experts that are chosen elsewhere than by the router's largest probabilities."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Routing, sum_in_order


def routed_to(logits: Tensor, experts: Tensor, normalised: bool) -> Routing:
    """Routes T tokens to ``experts[T, k]`` int64, with the gates that ``Kernels.route`` gives them: their probabilities under ``softmax(logits[T, E])``, in at
    least fp32, divided by their sum if ``normalised``. Gradients go to all logits, as they do for the largest."""
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    gates = probabilities.gather(1, experts)
    if normalised:
        gates = gates / sum_in_order(gates.unbind(1)).unsqueeze(1)
    ordered, order = experts.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    # A search instead of ``bincount``, for which torch would synchronize with a GPU.
    bounds = torch.searchsorted(ordered, torch.arange(logits.shape[1] + 1, device=order.device))
    return Routing(gates, experts, bounds, order, inverse)


class ReplayCount:
    """Counts, for tokens and layers whose experts were replayed, those whose router would have chosen others. What a backward pass computes again is counted
    once."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, replayed: Tensor, own: Tensor) -> None:
        """Counts the ``own[T, k]`` choices of a layer's router beside those ``replayed[T, k]``; their order has no meaning."""
        if torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            return
        differing = (own.sort(-1).values != replayed.sort(-1).values).any(-1).sum()
        sums = torch.stack((differing, torch.full_like(differing, len(own))))
        self._sums = sums if self._sums is None else self._sums + sums

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Is a context whose choices are not counted."""
        before = self._sums
        try:
            yield
        finally:
            self._sums = before

    def take(self, device: torch.device) -> Tensor:
        """Returns the choices that differed and all of them, int64 [2], since the last call."""
        sums, self._sums = self._sums, None
        return torch.zeros(2, dtype=torch.int64, device=device) if sums is None else sums


class Replay(NamedTuple):
    """The recorded ``experts[T, layers, k]``, of any integer dtype, that tokens are sent to in place of their routers' choice (router replay; Ma et al.,
    2025)."""

    experts: Tensor
    counts: ReplayCount

    def route(self, layer: int, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
        """Does ``Kernels.route`` with the experts recorded for ``layer``."""
        experts = self.experts[:, layer].long()
        assert experts.shape == (len(logits), experts_per_token), "the recorded routing is of other tokens, or of another model"
        with torch.no_grad():
            self.counts.add(experts, logits.sort(dim=-1, descending=True, stable=True).indices[:, :experts_per_token])
        return routed_to(logits, experts, normalised)
