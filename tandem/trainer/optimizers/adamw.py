"""The optimizer interface, AdamW with a state that can be saved and restored bit for bit, and clipping by a global norm in a fixed
order."""

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
    """``moments``: live tensors by ``"KIND/NAME"`` of a parameter, for AdamW ``"exp_avg/NAME"`` and ``"exp_avg_sq/NAME"``; empty before the
    first step. ``updates``: the number of updates made."""

    moments: Mapping[str, Tensor]
    updates: int


class Optimizer(Protocol):
    """An optimizer of named parameters.

    How each may be sharded: ``AdamW`` is elementwise, so any partition of the flat parameters gives the same bits. ``AdamW8bit`` is
    elementwise except for its state, which is coded in blocks of ``blockwise.BLOCK`` elements of a flat parameter: partitions at multiples
    of it give the same bits. ``Muon`` needs whole matrices (of a stacked projection: whole parts), which ``matrices.Matrices``
    assembles."""

    parameters: dict[str, nn.Parameter]

    @property
    def updates(self) -> int:
        """The number of updates made."""
        ...

    def zero_grad(self) -> None:
        """Drops all gradients."""
        ...

    def clip(self, scale: float = 1.0) -> float:
        """Divides the gradients by ``scale`` and clips them by their global norm; returns the norm before clipping."""
        ...

    def step(self, learning_rate: float) -> None:
        """Updates every parameter that has a gradient."""
        ...

    def state(self) -> OptimizerState:
        """Returns the state that the next step depends on, besides weights and gradients."""
        ...

    def load_state(self, state: OptimizerState) -> None:
        """Copies the tensors of ``state``. Raises ``ValueError`` if it is of another model or optimizer; nothing is changed then."""
        ...


class PieceOptimizer(Optimizer, Protocol):
    """An optimizer that also works on pieces of parameters. ``kinds``: of all tensors that its state may have."""

    kinds: tuple[str, ...]

    def form(self) -> dict[str, Tensor]:
        """Returns the tensors that ``state`` has after an update, on the ``meta`` device."""
        ...


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, scale: float = 1.0) -> float:
    """Divides all gradients by ``scale`` and scales them so that their global norm is at most ``max_norm`` (0: off; Pascanu et al., 2013).

    Returns the norm before clipping; NaN or infinity if a gradient is not finite. Each tensor's norm is computed in float64, and the sum of
    their squares is correctly rounded."""
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
    """Returns the norm of each tensor, computed in float64, with one device synchronization."""
    return values_of([norm_of(tensor) for tensor in tensors])


def norm_of(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm


def values_of(numbers: Sequence[Tensor]) -> list[float]:
    """Returns ``numbers``, each a scalar tensor, with one device synchronization."""
    return torch.stack(list(numbers)).tolist() if numbers else []


def global_norm(norms: Sequence[float]) -> float:
    """Returns the norm of the concatenation of tensors with the given ``norms``; NaN or infinity if one of them is."""
    if not all(map(math.isfinite, norms)):
        return math.nan if any(map(math.isnan, norms)) else math.inf
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def check_state(state: OptimizerState, expected: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` if ``state`` is not empty and its tensors differ from ``expected`` in name, shape or dtype."""
    if state.moments or state.updates:
        for name in sorted(expected.keys() ^ state.moments.keys()):
            raise ValueError(f"the optimizer state {'has no' if name in expected else 'has an unknown'} tensor '{name}'")
    for name, tensor in state.moments.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise ValueError(
                f"the optimizer state's '{name}' is {tensor.dtype} {tuple(tensor.shape)}; the model has {wanted.dtype} {tuple(wanted.shape)}"
            )


def names_to_decay(parameters: Mapping[str, nn.Parameter], decayed: Collection[str] | None = None) -> set[str]:
    """Returns the names that weight decay applies to: ``decayed``, or by default those of matrices."""
    return matrices_among(parameters) if decayed is None else set(decayed)


def matrices_among(parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Returns the names of matrices: not of biases, which have one axis or with experts one for these too, nor of norms, which may have one for each head
    too."""
    return {name for name, parameter in parameters.items() if parameter.ndim >= 2 and not name.endswith(("norm.weight", "_bias"))}


class HeldGradients:
    """The base of optimizers whose parameters and gradients are all in memory. ``decayed``: as in ``names_to_decay``."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, decayed: Collection[str] | None = None
    ) -> None:
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._config, self._decayed = config, names_to_decay(self.parameters, decayed)
        # Under ZeRO a rank may own no elements.
        self._device = next((parameter.device for parameter in self.parameters.values()), torch.device("cpu"))
        self.updates = 0

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, scale: float = 1.0) -> float:
        return clip_gradients(self.parameters.values(), self._config.max_grad_norm, scale)


@torch.no_grad()
def fused_adamw(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], updates: Tensor,
    config: TrainerConfig, learning_rate: float, weight_decay: float,
) -> None:  # fmt: skip
    """Updates ``weights`` and their moments in place by torch's fused kernel, which on a CPU gives the same bits for any number of threads.

    ``updates``: the number of updates with this one, fp32, on the weights' device. The class ``torch.optim.AdamW`` calls the same kernel; its
    first call imports ``torch._dynamo``, which takes more than a second."""
    torch._fused_adamw_(
        list(weights), list(gradients), list(exp_avgs), list(exp_avg_sqs), [], [updates] * len(weights), lr=learning_rate, beta1=config.beta1,
        beta2=config.beta2, weight_decay=weight_decay, eps=config.epsilon, amsgrad=False, maximize=False,
    )  # fmt: skip


class AdamW(HeldGradients):
    """AdamW (Loshchilov and Hutter, 2019) over a model's parameters, with the bits of ``torch.optim.AdamW(fused=True)`` where every
    parameter has a gradient in every step: updates are counted for all parameters together, as they are saved. Elementwise.

    ``decayed``: as in ``names_to_decay``. All parameters have one dtype and device."""

    kinds: tuple[str, ...] = MOMENTS

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, decayed: Collection[str] | None = None
    ) -> None:
        super().__init__(parameters, config, decayed)
        self._moments: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates every parameter that has a gradient."""
        self.updates += 1
        updates = torch.full((), float(self.updates), device=self._device)
        for decays in (True, False):
            chosen = {name: p for name, p in self.parameters.items() if p.grad is not None and (name in self._decayed) is decays}
            if not chosen:
                continue
            weights, gradients = list(chosen.values()), [p.grad for p in chosen.values() if p.grad is not None]
            first, second = ([self._moment(kind, name) for name in chosen] for kind in MOMENTS)
            fused_adamw(weights, gradients, first, second, updates, self._config, learning_rate, self._config.weight_decay if decays else 0.0)

    def _moment(self, kind: str, name: str) -> Tensor:
        key = f"{kind}/{name}"
        if key not in self._moments:
            self._moments[key] = torch.zeros_like(self.parameters[name], memory_format=torch.preserve_format)
        return self._moments[key]

    def state(self) -> OptimizerState:
        """Returns the state that the next step depends on, besides weights and gradients."""
        keys = (f"{kind}/{name}" for name in self.parameters for kind in MOMENTS)
        return OptimizerState({key: self._moments[key] for key in keys if key in self._moments}, self.updates)

    def form(self) -> dict[str, Tensor]:
        """Returns the tensors that ``state`` has after an update, on the ``meta`` device."""
        return {f"{kind}/{name}": torch.empty_like(p, device="meta") for name, p in self.parameters.items() for kind in MOMENTS}

    def load_state(self, state: OptimizerState) -> None:
        """Copies the tensors of ``state``. Raises ``ValueError`` if it is of another model; nothing is changed then."""
        check_state(state, self.form())
        self.updates = state.updates
        self._moments.clear()
        for key, saved in state.moments.items():
            kind, _, name = key.partition("/")
            self._moment(kind, name).copy_(saved)
