"""Muon: updates hidden matrices by their orthogonalized momentum, and everything else by AdamW."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.optimizers.adamw import MOMENTS, AdamW, HeldGradients, OptimizerState, check_state
from tandem.trainer.optimizers.matrices import Matrices, Stack

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
Stacked = Mapping[str, Sequence[int]]
"""The rows of each part, by the name of a parameter whose second-last axis stacks several matrices."""


def newton_schulz(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Approximates the orthogonal polar factor ``U V^T`` of each of ``matrices[..., M, N]`` = ``U S V^T``: the result has the same singular
    vectors, and singular values near 1 (0.68 to 1.13 after 5 iterations if those of the input are within 1 : 100).

    The quintic iteration of Jordan et al. (2024, "Muon"): ``X <- a X + (b X X^T + c (X X^T)^2) X``, starting from norm 1. In bf16 on a GPU,
    as in the original; on a CPU in the matrices' own dtype."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST_NORM)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    polar: Tensor = (x.mT if is_tall else x).to(matrices.dtype)
    return polar


class Muon(HeldGradients):
    """Muon (Jordan et al., 2024) for the parameters named in ``hidden``, each a matrix [M, N] or a stack [E, M, N]; ``AdamW`` for the rest.
    Not elementwise: a matrix must be whole.

    Momentum is Nesterov's. An update is scaled by ``0.2 sqrt(max(M, N))``, which gives it AdamW's usual size, so that one learning rate and
    one weight decay serve both (Liu et al., 2025, "Muon is scalable for LLM training", equation 4). ``stacked`` names parameters that stack
    several matrices, each of which is orthogonalized separately.

    If ranks shard the parameters, ``matrices`` describes how (``None``: not sharded), and ``parameters`` are this rank's pieces, of which
    those in ``decayed`` are pieces of matrices. Momentum stays sharded; the directions of matrices are gathered, every rank orthogonalizes
    them, and each takes its own part of the result."""

    kinds: tuple[str, ...] = (*MOMENTS, "momentum")

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, hidden: Iterable[str], stacked: Stacked | None = None,
        matrices: Matrices | None = None, decayed: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, config)
        chosen, rows = set(hidden), stacked or {}
        self._hidden = {name: p for name, p in self.parameters.items() if name in chosen}
        whole = {name: Stack(p.shape, tuple(rows.get(name, p.shape[-2:-1]))) for name, p in self._hidden.items()}
        self.matrices = Matrices(whole) if matrices is None else matrices
        self._adamw = AdamW([(name, p) for name, p in self.parameters.items() if name not in chosen], config, decayed)
        self._momentum: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates every parameter that has a gradient. All ranks that hold pieces of its matrices call it together."""
        self._adamw.step(learning_rate)
        for name, held in self.matrices.held(self._direction):
            directions = self.matrices.whole(name, held)
            updates = [newton_schulz(direction, self._config.muon_iterations) for direction in directions]
            if name not in self._hidden:
                continue
            parameter = self._hidden[name].view(-1)
            parameter.mul_(1 - learning_rate * self._config.weight_decay)
            for where, update, matrix in self.matrices.own(name, updates):
                parameter[where].add_(update, alpha=-learning_rate * (0.2 * math.sqrt(max(matrix.shape[-2:]))))
        self.updates += 1

    def _direction(self, name: str) -> Tensor | None:
        """Adds the gradient to the momentum of this rank's piece and returns the piece's update direction."""
        parameter, beta = self._hidden[name], self._config.muon_momentum
        if parameter.grad is None:
            return None
        if name not in self._momentum:
            self._momentum[name] = torch.zeros_like(parameter)
        return parameter.grad.lerp(self._momentum[name].lerp_(parameter.grad, 1 - beta), beta)

    def state(self) -> OptimizerState:
        held = {f"momentum/{name}": tensor for name, tensor in self._momentum.items()}
        return OptimizerState({**self._adamw.state().moments, **held}, self.updates)

    def form(self) -> dict[str, Tensor]:
        momentum = {f"momentum/{name}": torch.empty_like(p, device="meta") for name, p in self._hidden.items()}
        return {**self._adamw.form(), **momentum}

    def load_state(self, state: OptimizerState) -> None:
        check_state(state, self.form())
        rest = {name: tensor for name, tensor in state.moments.items() if not name.startswith("momentum/")}
        self._adamw.load_state(OptimizerState(rest, state.updates))
        self.updates = state.updates
        self._momentum = {
            name: torch.empty_like(p).copy_(state.moments[f"momentum/{name}"]) for name, p in self._hidden.items() if state.moments
        }
