"""AdamW whose moments live in a file: the optimizer's state takes no memory but two staging buffers (Rajbhandari et al., 2021,
"ZeRO-Infinity", section 5)."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.optimizer import OptimizerState, check_state, clip_gradients
from tandem.trainer.pager import Pager

KINDS = ("exp_avg", "exp_avg_sq")


class PagedAdamW:
    """``AdamW`` with its bits, for dense parameters of one dtype on a CPU. Elementwise: moments come from ``folder`` piece by piece, the next
    while the present one is updated, and go back behind it."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, folder: Path) -> None:
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._config = config
        sizes = [p.numel() for p in self.parameters.values() for _ in KINDS]
        self._pager = Pager(folder, sizes, next(iter(self.parameters.values())).dtype, at_once=len(KINDS))
        self.updates = 0

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, scale: float = 1.0) -> float:
        return clip_gradients(self.parameters.values(), self._config.max_grad_norm, scale)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter that has a gradient."""
        config, done = self._config, torch.tensor(float(self.updates + 1))
        chosen = [(i, p, p.grad.contiguous().view(-1)) for i, p in enumerate(self.parameters.values()) if p.grad is not None]

        def update(place: int, where: slice, moments: list[Tensor]) -> None:
            _, parameter, gradient = chosen[place]
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
            torch._fused_adamw_(
                [parameter.view(-1)[where]], [gradient[where]], [moments[0]], [moments[1]], [], [done], lr=learning_rate, beta1=config.beta1,
                beta2=config.beta2, weight_decay=decay, eps=config.epsilon, amsgrad=False, maximize=False,
            )  # fmt: skip

        self._pager.visit([(2 * i, 2 * i + 1) for i, _, _ in chosen], update)
        self.updates += 1

    def state(self) -> OptimizerState:
        """The moments are views of the file."""
        if not self.updates:
            return OptimizerState({}, 0)
        names = [f"{kind}/{name}" for name in self.parameters for kind in KINDS]
        return OptimizerState({name: self._pager.mapped(i).view(self._shape(name)) for i, name in enumerate(names)}, self.updates)

    def load_state(self, state: OptimizerState) -> None:
        check_state(state, {f"{kind}/{name}": p for name, p in self.parameters.items() for kind in KINDS})
        for i, name in enumerate(f"{kind}/{name}" for name in self.parameters for kind in KINDS):
            self._pager.write(i, state.moments[name] if state.moments else torch.zeros(self._shape(name), dtype=self._dtype(name)))
        self.updates = state.updates

    def _shape(self, key: str) -> torch.Size:
        return self.parameters[key.partition("/")[2]].shape

    def _dtype(self, key: str) -> torch.dtype:
        return self.parameters[key.partition("/")[2]].dtype
