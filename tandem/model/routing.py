"""The routing of tokens to experts that are chosen elsewhere than by the router's largest probabilities."""

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


def replayed_route(experts: Tensor, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
    """Does ``Kernels.route`` with the recorded ``experts[T, k]`` of any integer dtype in place of its choice (router replay; Ma et al., 2025)."""
    assert experts.shape == (len(logits), experts_per_token), "the recorded routing is of other tokens, or of another model"
    return routed_to(logits, experts.long(), normalised)
