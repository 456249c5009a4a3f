"""What every optimizer offers, AdamW with a state that can be written down and read back bit for bit, and clipping by a fixed-order
global norm."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """``moments``: the live tensors by ``"KIND/NAME"`` of a parameter, with AdamW ``"exp_avg/NAME"`` and ``"exp_avg_sq/NAME"`` of
    every one; empty before the first step. ``updates``: how many were made."""

    moments: Mapping[str, Tensor]
    updates: int


class Optimizer(Protocol):
    """An optimizer of named parameters.

    How each may be cut: ``AdamW`` is elementwise, so any cut of the flat parameters has the same bits. ``AdamW8bit`` is elementwise
    but for its state, which is coded in blocks of ``blockwise.BLOCK`` elements of a flat parameter: cuts at multiples of that have the
    same bits. ``Muon`` needs whole matrices (of a stacked projection: whole parts), which ``matrices.Matrices`` puts together."""

    parameters: dict[str, nn.Parameter]

    @property
    def updates(self) -> int:
        """How many updates were made."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def clip(self, scale: float = 1.0) -> float:
        """Divide the gradients by ``scale`` and clip them by their global norm; returns the norm between the two."""
        ...

    def step(self, learning_rate: float) -> None:
        """One update of every parameter that has a gradient."""
        ...

    def state(self) -> OptimizerState:
        """What the next step depends on besides weights and gradients."""
        ...

    def load_state(self, state: OptimizerState) -> None:
        """Take over ``state``, copying its tensors. Raises ``ValueError`` where it is of another model or optimizer, and changes
        nothing then."""
        ...


class PieceOptimizer(Optimizer, Protocol):
    """An optimizer that works on pieces of parameters too. ``kinds``: of all tensors that its state may have."""

    kinds: tuple[str, ...]

    def form(self) -> dict[str, Tensor]:
        """The tensors that ``state`` has after an update, without their numbers, on the device ``meta``."""
        ...


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, scale: float = 1.0) -> float:
    """Divide all gradients by ``scale``, and scale them so that their global norm is at most ``max_norm`` (0: off; Pascanu et al., 2013);
    returns the norm before, NaN or infinity where a gradient is not finite. Each tensor's norm is taken in float64, and their squares
    are summed exactly."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if scale != 1.0:
        for gradient in gradients:
            gradient.mul_(1.0 / scale)
    total = global_norm(norms_of(gradients))
    if 0 < max_norm < total < math.inf:
        for gradient in gradients:
            gradient.mul_(max_norm / total)
    return total


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """The norm of each tensor, in float64; a device is waited for once."""
    return values_of([norm_of(tensor) for tensor in tensors])


def norm_of(tensor: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return found


def values_of(numbers: Sequence[Tensor]) -> list[float]:
    """``numbers``, each of no axis; a device is waited for once."""
    return torch.stack(list(numbers)).tolist() if numbers else []


def global_norm(norms: Sequence[float]) -> float:
    """The norm of tensors that have ``norms``; NaN or infinity where one of them is."""
    if not all(map(math.isfinite, norms)):
        return math.nan if any(map(math.isnan, norms)) else math.inf
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def check_state(state: OptimizerState, expected: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` where ``state`` is not empty and does not have exactly the tensors of ``expected``, by name, shape and
    dtype."""
    if state.moments or state.updates:
        for name in sorted(expected.keys() ^ state.moments.keys()):
            raise ValueError(f"the optimizer state {'has no' if name in expected else 'has an unknown'} tensor '{name}'")
    for name, tensor in state.moments.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise ValueError(
                f"the optimizer state's '{name}' is {tensor.dtype} {tuple(tensor.shape)}; the model has {wanted.dtype} {tuple(wanted.shape)}"
            )


class HeldGradients:
    """What optimizers share whose parameters and gradients all lie in memory."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig) -> None:
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._config = config
        self.updates = 0

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, scale: float = 1.0) -> float:
        return clip_gradients(self.parameters.values(), self._config.max_grad_norm, scale)


class AdamW(HeldGradients):
    """``torch.optim.AdamW`` (Loshchilov and Hutter, 2019) over a model's parameters. Elementwise.

    Matrices are decayed; norms and biases (fewer than two axes) are not. ``decayed``, where given, names those that are. torch's fused
    kernel gives the same bits on any number of threads on CPU."""

    kinds: tuple[str, ...] = MOMENTS

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, decayed: Collection[str] | None = None
    ) -> None:
        super().__init__(parameters, config)
        names = {name for name, p in self.parameters.items() if p.ndim >= 2} if decayed is None else set(decayed)
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for name, p in self.parameters.items() if name in names], "weight_decay": config.weight_decay},
                {"params": [p for name, p in self.parameters.items() if name not in names], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter that has a gradient."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.updates += 1

    def state(self) -> OptimizerState:
        """What the next step depends on besides weights and gradients."""
        moments = {}
        for name, parameter in self.parameters.items():
            held = self._adamw.state.get(parameter, {})
            for kind in MOMENTS:
                if kind in held:
                    moments[f"{kind}/{name}"] = held[kind]
        return OptimizerState(moments, self.updates)

    def form(self) -> dict[str, Tensor]:
        """The tensors that ``state`` has after an update, without their numbers."""
        return {f"{kind}/{name}": torch.empty_like(p, device="meta") for name, p in self.parameters.items() for kind in MOMENTS}

    def load_state(self, state: OptimizerState) -> None:
        """Take over ``state``, copying its tensors. Raises ``ValueError`` where it is of another model, and changes
        nothing then."""
        check_state(state, self.form())
        self.updates = state.updates
        self._adamw.state.clear()
        if not state.moments:
            return
        for name, parameter in self.parameters.items():
            # Where the parameter is: torch's fused update reads it there.
            held: dict[str, Tensor] = {"step": torch.tensor(float(state.updates), device=parameter.device)}
            for kind in MOMENTS:
                held[kind] = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(
                    state.moments[f"{kind}/{name}"]
                )
            self._adamw.state[parameter] = held
