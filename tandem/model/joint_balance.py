"""The load-balancing loss of a mixture of experts as transformers computes it (``load_balancing_loss_func``): that of Switch Transformers (Fedus et al., 2021,
equations 4 to 6), with the shares of experts and their mean probabilities taken over all layers together."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tandem.kernels.softmax import softmax
from tandem.model.router_balance import ALONE, RouterBalance
from tandem.runtime.collectives.communicator import Communicator


class JointBalance(RouterBalance):
    """The loss of one decoder, with coefficient ``loss``. ``mixtures``: their number; ``each``: the experts of the largest probabilities that count as a
    token's. ``ranks``: those that see different tokens. ``device``: the model's."""

    def __init__(
        self, num_experts: int, mixtures: int, each: int, loss: float, ranks: Communicator = ALONE, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(num_experts, range(mixtures), loss, ranks=ranks, device=device)
        self._each = each

    def new_pass(self) -> "BalancedPass":
        """Returns the loss of a forward pass that begins."""
        return BalancedPass(self, len(self.counts), self._each)

    def slope(self, chosen: Tensor, tokens: int) -> Tensor:
        """Returns the derivative of this rank's share of the loss by the sum of an expert's probabilities over tokens and layers [E], fp64, given that
        ``chosen[E]`` of the choices in all layers for this rank's ``tokens`` fell on each."""
        every = self.ranks.all_reduce(torch.cat((chosen, chosen.new_tensor([tokens]))), "tokens of each expert in a micro-batch").double()
        shares = every[:-1] / (every[-1:] * len(self.counts)).clamp_min(1.0)
        return shares * (self._weight * len(shares) / len(self.counts))


class BalancedPass:
    """The loss of one forward pass through all mixtures, whose backward pass begins when it is complete."""

    def __init__(self, balance: JointBalance, mixtures: int, each: int) -> None:
        self._balance, self._each = balance, each
        self._chosen: list[Tensor | None] = [None] * mixtures
        self._tokens = 0
        self.slope: Tensor | None = None

    def attach(self, gates: Tensor, mixture: int, logits: Tensor) -> Tensor:
        """Returns ``gates``, with the loss of ``logits[T, E]`` of the router of ``mixture`` in its backward pass."""
        if not torch.is_grad_enabled():
            return gates
        logits = logits.reshape(-1, logits.shape[-1])
        probabilities = softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        # In a backward pass the same tokens are routed again, for recomputation.
        if torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
            experts = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self._each]
            counts = torch.bincount(experts.reshape(-1), minlength=logits.shape[1])
            self._balance.counts[mixture] += counts
            self._chosen[mixture], self._tokens = counts, len(logits)
        return cast(Tensor, _AttachSum.apply(gates, probabilities.sum(0), self)) if logits.requires_grad else gates

    def end(self) -> None:
        """Ends the forward pass: the ranks add up which experts its tokens were sent to."""
        chosen: Sequence[Tensor] = [counts for counts in self._chosen if counts is not None]
        if torch.is_grad_enabled() and len(chosen) == len(self._chosen):
            self.slope = self._balance.slope(torch.stack(tuple(chosen)).sum(0), self._tokens)


class _AttachSum(torch.autograd.Function):
    """Returns ``gates``; the backward pass gives ``sums[E]`` the slope of ``balanced``."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, sums: Tensor, balanced: BalancedPass) -> Tensor:
        ctx.balanced, ctx.dtype = balanced, sums.dtype
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        assert ctx.balanced.slope is not None, "the backward pass began before all layers were computed"
        return grad, ctx.balanced.slope.to(ctx.dtype), None
