"""Load balancing of experts during training: by a loss, or by a bias on the router's choice.

The loss is that of Switch Transformers (Fedus et al., 2021, equations 4 to 6), for each layer, with the shares of experts taken over all
tokens that the ranks compute at the same time (Qiu et al., 2025: shares of small batches penalise specialisation). It enters the backward
pass at the gates, so that it need not be passed through stages and recomputation.

The bias (Wang et al., 2024; DeepSeek-V3, section 2.1.2) is added to the probabilities only for the choice of experts. After each step it
changes by a fixed amount: up for experts with less than their share of the step's tokens, down for the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import Routing
from tandem.kernels.softmax import softmax
from tandem.model.routing import Route, routed_to
from tandem.runtime.collectives.communicator import Communicator

ALONE = Communicator("alone", 0, 1, None, 0.0)


class RouterBalance:
    """The load balancing of one decoder. ``loss``: the coefficient of the loss, ``bias_rate``: the step size of the bias; 0 turns either
    off. ``ranks``: those that hold the same router and see different tokens; ``copies``: ranks that compute the same tokens, and whose
    gradients of the router are summed; ``readers``: ranks of ``ranks`` that are given the same micro-batches; ``stages``: those that hold
    the model's other layers. ``device``: the model's."""

    def __init__(
        self, num_experts: int, layers: Sequence[int], loss: float = 0.0, bias_rate: float = 0.0, ranks: Communicator = ALONE, copies: int = 1,
        readers: int = 1, stages: Communicator = ALONE, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.loss, self.bias_rate, self.ranks, self._stages = loss, bias_rate, ranks, stages
        self._copies, self._readers = copies, readers
        self._device = torch.device(device)
        self.counts = {layer: torch.zeros(num_experts, dtype=torch.int64, device=device) for layer in layers}
        self.biases = {layer: torch.zeros(num_experts, dtype=torch.float64, device=device) for layer in layers}
        self._weight = 0.0

    def begin(self, tokens: int, scale: float = 1.0) -> None:
        """Starts a step in which this rank is given micro-batches of ``tokens`` in total. ``scale``: the loss scale."""
        if self.loss:
            every = int(self.ranks.all_reduce(torch.tensor([tokens], device=self._device), "tokens of the step")) // self._readers
            self._weight = self.loss * scale / max(every, 1) / self._copies
        for counts in self.counts.values():
            counts.zero_()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Is a context whose tokens are not counted as those of the step."""
        before = {layer: counts.clone() for layer, counts in self.counts.items()}
        try:
            yield
        finally:
            for layer, counts in before.items():
                self.counts[layer].copy_(counts)

    def end(self, updated: bool) -> dict[str, float]:
        """Ends the step: updates the biases if the weights were ``updated``. Returns the largest overload of an expert, relative to its
        even share, over all layers."""
        worst = 0.0
        for layer, own in self.counts.items():
            counts = self.ranks.all_reduce(own, "tokens of each expert")
            even = int(counts.sum()) / len(counts)
            if even:
                worst = max(worst, int(counts.max()) / even - 1.0)
            if updated and self.bias_rate:
                self.biases[layer] += self.bias_rate * torch.sign(even - counts.double())
        every = self._stages.all_gather(torch.tensor([worst], dtype=torch.float64, device=self._device), "the largest overload of an expert")
        return {"router/max_overload": every.max().item()}

    def route(self, choose: Route, layer: int, logits: Tensor, each: int, normalised: bool) -> Routing:
        """Runs ``choose`` (``Kernels.route``), or the choice with this layer's bias, counts the tokens of each expert and attaches the loss."""
        routing = biased_route(logits, self.biases[layer], each, normalised) if self.bias_rate else choose(logits, each, normalised)
        # In a backward pass the same tokens are routed again, for recomputation.
        if torch.is_grad_enabled():
            counts = routing.bounds.diff()
            if torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
                self.counts[layer] += counts
            if self.loss and logits.requires_grad:
                routing = routing._replace(gates=_Attach.apply(routing.gates, self._balance(logits, counts)))
        return routing

    def _balance(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Returns this rank's share of the loss of one layer: E times the sum over experts of (share of the tokens) times (sum of
        probabilities)."""
        probabilities = softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        every = torch.cat((counts, counts.new_tensor([len(logits)])))
        every = self.ranks.all_reduce(every, "tokens of each expert in a micro-batch")
        shares = every[:-1] / every[-1:].clamp_min(1)
        return self._weight * len(shares) * (shares.to(probabilities.dtype) * probabilities.sum(0)).sum()

    def state(self) -> dict[str, list[float]]:
        """Returns the biases by layer."""
        return {str(layer): bias.tolist() for layer, bias in self.biases.items()} if self.bias_rate else {}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Loads the biases of the layers that this decoder has."""
        for layer, bias in state.items():
            if int(layer) in self.biases:
                self.biases[int(layer)] = torch.tensor(bias, dtype=torch.float64, device=self._device)


def biased_route(logits: Tensor, bias: Tensor, each: int, normalised: bool) -> Routing:
    """Does ``Kernels.route`` with the experts of the largest probability plus ``bias[E]``; the gates are probabilities without the bias."""
    probabilities = softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    wanted = probabilities.detach() + bias.to(probabilities)
    return routed_to(logits, wanted.sort(dim=-1, descending=True, stable=True).indices[:, :each], normalised)


class _Attach(torch.autograd.Function):
    """Returns ``x``; its backward pass also starts that of the scalar ``loss`` (as in Megatron-Core)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones_like(ctx.like)
