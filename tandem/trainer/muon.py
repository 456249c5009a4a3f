"""Muon: the momentum of a hidden matrix, orthogonalised, is its update. Everything else goes by AdamW."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.optimizer import AdamW, OptimizerState, check_state, clip_gradients

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
Stacked = Mapping[str, Sequence[int]]
"""The rows of each part, by the name of a parameter whose second-last axis stacks several matrices."""


def newton_schulz(matrices: Tensor, iterations: int = 5) -> Tensor:
    """An approximation of the orthogonal polar factor ``U V^T`` of each of ``matrices[..., M, N]`` = ``U S V^T``: the singular values
    of the result lie near 1 (0.68 to 1.13 after 5 iterations where those of the input lie within 1 : 100), its singular vectors
    are those of the input.

    The quintic iteration of Jordan et al. (2024, "Muon"): ``X <- a X + (b X X^T + c (X X^T)^2) X``, begun with norm 1. bf16 on a GPU, as its
    authors do it; on a CPU the matrices' own dtype."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST_NORM)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = (x.mT if is_tall else x).to(matrices.dtype)
    return found


class Muon:
    """Muon (Jordan et al., 2024) for the parameters named in ``hidden``, each a matrix [M, N] or a stack [E, M, N]; ``AdamW`` for the rest.
    Not elementwise: a matrix must be whole.

    Momentum is Nesterov's. An update is scaled by ``0.2 sqrt(max(M, N))``, which gives it AdamW's usual size, so that one
    learning rate and one weight decay serve both (Liu et al., 2025, "Muon is scalable for LLM training", equation 4). ``stacked`` names
    parameters that hold several matrices above each other; each of those is orthogonalised by itself."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, hidden: Iterable[str], stacked: Stacked | None = None
    ) -> None:
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        chosen = set(hidden)
        self._config, self._stacked = config, stacked or {}
        self._hidden = {name: p for name, p in self.parameters.items() if name in chosen}
        self._adamw = AdamW([(name, p) for name, p in self.parameters.items() if name not in chosen], config)
        self._momentum: dict[str, Tensor] = {}
        self.updates = 0

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, scale: float = 1.0) -> float:
        return clip_gradients(self.parameters.values(), self._config.max_grad_norm, scale)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter that has a gradient."""
        self._adamw.step(learning_rate)
        beta = self._config.muon_momentum
        for name, parameter in self._hidden.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            if name not in self._momentum:
                self._momentum[name] = torch.zeros_like(parameter)
            momentum = self._momentum[name]
            momentum.lerp_(gradient, 1 - beta)
            direction = gradient.lerp(momentum, beta)
            parameter.mul_(1 - learning_rate * self._config.weight_decay)
            for part, along in zip(self._parts(name, parameter), self._parts(name, direction), strict=True):
                size = 0.2 * math.sqrt(max(part.shape[-2:]))
                part.add_(newton_schulz(along, self._config.muon_iterations), alpha=-learning_rate * size)
        self.updates += 1

    def _parts(self, name: str, x: Tensor) -> Sequence[Tensor]:
        return x.split(list(self._stacked[name]), dim=-2) if name in self._stacked else (x,)

    def state(self) -> OptimizerState:
        held = {f"momentum/{name}": tensor for name, tensor in self._momentum.items()}
        return OptimizerState({**self._adamw.state().moments, **held}, self.updates)

    def load_state(self, state: OptimizerState) -> None:
        expected = {f"momentum/{name}": p for name, p in self._hidden.items()}
        expected |= {f"{kind}/{name}": p for name, p in self._adamw.parameters.items() for kind in ("exp_avg", "exp_avg_sq")}
        check_state(state, expected)
        rest = {name: tensor for name, tensor in state.moments.items() if not name.startswith("momentum/")}
        self._adamw.load_state(OptimizerState(rest, state.updates))
        self.updates = state.updates
        self._momentum = {
            name: torch.empty_like(p).copy_(state.moments[f"momentum/{name}"]) for name, p in self._hidden.items() if state.moments
        }
