"""The routing of tokens to experts that are chosen otherwise than by the router's largest probabilities."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Routing, sum_in_order
from tandem.kernels.softmax import softmax
from tandem.layout.expert_shapes import SigmoidRouting, SoftmaxRouting

Route = Callable[[Tensor, int, bool], Routing]
"""``Kernels.route``, or what replaces it."""
SMALLEST_SUM = 1e-20
"""Added to the sum that gates of sigmoid scores are divided by, as in transformers."""


class Selection(NamedTuple):
    """Routing by sigmoid scores with its ``bias[E]`` on the choice, or by probabilities without one."""

    routing: SigmoidRouting | SoftmaxRouting
    bias: Tensor | None

    def scores(self, logits: Tensor) -> Tensor:
        """Returns the scores [T, E] of ``logits[T, E]``, in at least fp32."""
        if isinstance(self.routing, SoftmaxRouting):
            return softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        # torch's sigmoid gives the last elements of a tensor other bits than the others; below -80 its value is 0 and its slope too.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous().clamp_min(-80.0)
        return 1.0 / (1.0 + torch.exp(-wide))

    @torch.no_grad()
    def choose(self, scores: Tensor, each: int) -> Tensor:
        """Returns the experts [T, each] int64 of each token; ties go to the lowest groups and ids."""
        wanted = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        groups = self.routing.groups
        if groups > 1:
            by_group = wanted.view(len(wanted), groups, wanted.shape[1] // groups)
            best = by_group.sort(dim=-1, descending=True, stable=True).values
            of_groups = best[..., 0] if isinstance(self.routing, SoftmaxRouting) else best[..., 0] + best[..., 1]
            kept = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : self.routing.groups_per_tok]
            is_left_out = torch.ones(len(wanted), groups, dtype=torch.bool, device=wanted.device).scatter_(1, kept, False)
            wanted = by_group.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(1)
        return wanted.sort(dim=-1, descending=True, stable=True).indices[:, :each]

    def route(self, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
        """Does ``Kernels.route`` with the experts of the largest scores."""
        return routed_to(logits, self.choose(self.scores(logits.detach()), experts_per_token), normalised, self)


class WithoutGradient(torch.autograd.Function):
    """Returns ``gates``; ``bias`` gets a gradient of 0, as a parameter that no optimizer changes."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.zeros_like(ctx.bias)


def routed_to(logits: Tensor, experts: Tensor, normalised: bool, selection: Selection | None = None) -> Routing:
    """Routes T tokens to ``experts[T, k]`` int64, with the gates that ``Kernels.route`` gives them: their probabilities under ``softmax(logits[T, E])``, in at
    least fp32, or their scores of ``selection``, divided by their sum if ``normalised``. Gradients go to all logits, as they do for the largest."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = softmax(logits.to(wide)) if selection is None else selection.scores(logits)
    gates = probabilities.gather(1, experts)
    if normalised:
        total = sum_in_order(gates.unbind(1)).unsqueeze(1)
        gates = gates / (total if selection is None or selection.bias is None else total + SMALLEST_SUM)
    if selection is not None:
        gates = gates if selection.routing.scaling == 1.0 else gates * selection.routing.scaling
        if selection.bias is not None and selection.bias.requires_grad and torch.is_grad_enabled():
            gates = WithoutGradient.apply(gates, selection.bias)
    order, inverse, bounds = sorted_by_expert(experts, logits.shape[1])
    return Routing(gates, experts, bounds, order, inverse)


def sorted_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``order``, ``inverse`` and ``bounds`` of a ``Routing`` to ``experts[T, k]`` int64."""
    ordered, order = experts.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    # A search instead of ``bincount``, for which torch would synchronize with a GPU.
    return order, inverse, torch.searchsorted(ordered, torch.arange(num_experts + 1, device=order.device))


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

    def route(self, layer: int, selection: Selection | None, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
        """Does ``Kernels.route``, or that of ``selection``, with the experts recorded for ``layer``."""
        experts = self.experts[:, layer].long()
        assert experts.shape == (len(logits), experts_per_token), "the recorded routing is of other tokens, or of another model"
        with torch.no_grad():
            largest = logits.sort(dim=-1, descending=True, stable=True).indices[:, :experts_per_token]
            own = largest if selection is None else selection.choose(selection.scores(logits), experts_per_token)
            self.counts.add(experts, own)
        return routed_to(logits, experts, normalised, selection)
