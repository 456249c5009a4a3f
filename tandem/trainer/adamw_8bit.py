"""AdamW whose moments are kept in 8 bits: a quarter of the state's memory."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.blockwise import Codebook, Coded
from tandem.trainer.optimizer import OptimizerState, check_state, clip_gradients

FEWEST_CODED = 4096
"""Smaller matrices keep fp32 moments, as norms and biases do: they weigh nothing."""


class AdamW8bit:
    """AdamW (Loshchilov and Hutter, 2019) with block-wise 8-bit moments (Dettmers et al., 2022). Elementwise, in blocks.

    A step decodes one parameter's moments to fp32, updates as ``AdamW`` does, and codes them again. Parameters named in ``whole`` (the
    embedding: the paper keeps it so, since a rare token's row has moments far below its block's largest), those of one axis and those
    below ``FEWEST_CODED`` elements keep fp32 moments."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, whole: Iterable[str] = ()) -> None:
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        kept = set(whole)
        self._coded = {name for name, p in self.parameters.items() if p.ndim >= 2 and p.numel() >= FEWEST_CODED and name not in kept}
        self._config = config
        self._device = next(iter(self.parameters.values())).device
        self._books = {"exp_avg": Codebook(True, self._device), "exp_avg_sq": Codebook(False, self._device)}
        self._moments: dict[str, Tensor] = {}
        self.updates = 0

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, scale: float = 1.0) -> float:
        return clip_gradients(self.parameters.values(), self._config.max_grad_norm, scale)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter that has a gradient."""
        config, done = self._config, torch.tensor(float(self.updates + 1), device=self._device)
        if not self._moments:
            self._moments = self._blank()
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            first, second = (self._read(kind, name, parameter) for kind in self._books)
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
            torch._fused_adamw_(
                [parameter], [parameter.grad], [first], [second], [], [done], lr=learning_rate, beta1=config.beta1, beta2=config.beta2,
                weight_decay=decay, eps=config.epsilon, amsgrad=False, maximize=False,
            )  # fmt: skip
            for kind, moment in (("exp_avg", first), ("exp_avg_sq", second)):
                self._write(kind, name, moment)
        self.updates += 1

    def state(self) -> OptimizerState:
        return OptimizerState(dict(self._moments), self.updates)

    def load_state(self, state: OptimizerState) -> None:
        check_state(state, self._blank())
        self.updates = state.updates
        self._moments = {name: torch.empty_like(tensor, device=self._device).copy_(tensor) for name, tensor in state.moments.items()}

    def _blank(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for kind, book in self._books.items():
                if name not in self._coded:
                    found[f"{kind}/{name}"] = torch.zeros_like(parameter)
                else:
                    coded = book.encode(torch.zeros(parameter.numel(), device=parameter.device))
                    found[f"{kind}_codes/{name}"], found[f"{kind}_scales/{name}"] = coded
        return found

    def _read(self, kind: str, name: str, like: Tensor) -> Tensor:
        if name not in self._coded:
            return self._moments[f"{kind}/{name}"]
        return self._books[kind].decode(Coded(self._moments[f"{kind}_codes/{name}"], self._moments[f"{kind}_scales/{name}"])).view_as(like)

    def _write(self, kind: str, name: str, moment: Tensor) -> None:
        if name in self._coded:
            coded = self._books[kind].encode(moment.view(-1))
            self._moments[f"{kind}_codes/{name}"], self._moments[f"{kind}_scales/{name}"] = coded
