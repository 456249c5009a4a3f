"""AdamW with 8-bit moments, a quarter of the state's memory."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.optimizers.adamw import MOMENTS, HeldGradients, OptimizerState, check_state, fused_adamw
from tandem.trainer.optimizers.blockwise import BLOCK, CODES, SCALES, Coded, codebook

FEWEST_CODED = 4096
"""Smaller matrices keep fp32 moments, as norms and biases do, because their memory is negligible."""


class AdamW8bit(HeldGradients):
    """AdamW (Loshchilov and Hutter, 2019) with block-wise 8-bit moments (Dettmers et al., 2022). Elementwise, in blocks.

    A step decodes one parameter's moments to its dtype, updates as ``AdamW`` does, and encodes them again from fp32. Parameters named in ``whole`` (the
    embedding: as in the paper, since a rare token's row has moments far below its block's largest), those of one axis and those below
    ``FEWEST_CODED`` elements keep fp32 moments.

    If ``parameters`` are pieces, each beginning at a multiple of ``blockwise.BLOCK`` of its parameter, ``decayed`` names the pieces of
    matrices and ``coded`` those with 8-bit moments, because a piece's shape does not tell."""

    kinds: tuple[str, ...] = (*MOMENTS, *(moment + ending for moment in MOMENTS for ending in (CODES, SCALES)))

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, whole: Iterable[str] = (),
        decayed: Collection[str] | None = None, coded: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, config, decayed)
        large = coded if coded is not None else {name for name in self._decayed if self.parameters[name].numel() >= FEWEST_CODED}
        self._coded = set(large) - set(whole)
        self._books = {moment: codebook(moment, self._device) for moment in MOMENTS}
        self._moments: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates every parameter that has a gradient."""
        config, done = self._config, torch.full((), float(self.updates + 1), device=self._device)
        if not self._moments:
            self._moments = self._blank()
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            first, second = (self._read(kind, name, parameter) for kind in self._books)
            decay = config.weight_decay if name in self._decayed else 0.0
            fused_adamw([parameter], [parameter.grad], [first], [second], done, config, learning_rate, decay)
            for kind, moment in (("exp_avg", first), ("exp_avg_sq", second)):
                self._write(kind, name, moment)
        self.updates += 1

    def state(self) -> OptimizerState:
        return OptimizerState(dict(self._moments), self.updates)

    def load_state(self, state: OptimizerState) -> None:
        check_state(state, self.form())
        self.updates = state.updates
        self._moments = {name: torch.empty_like(tensor, device=self._device).copy_(tensor) for name, tensor in state.moments.items()}

    def form(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            for kind in self._books:
                if name not in self._coded:
                    tensors[f"{kind}/{name}"] = torch.empty_like(p, device="meta")
                    continue
                tensors[f"{kind}{CODES}/{name}"] = torch.empty(p.numel(), dtype=torch.uint8, device="meta")
                tensors[f"{kind}{SCALES}/{name}"] = torch.empty(-(-p.numel() // BLOCK), device="meta")
        return tensors

    def _blank(self) -> dict[str, Tensor]:
        moments: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for kind, book in self._books.items():
                if name not in self._coded:
                    moments[f"{kind}/{name}"] = torch.zeros_like(parameter)
                else:
                    coded = book.encode(torch.zeros(parameter.numel(), device=parameter.device))
                    moments[f"{kind}{CODES}/{name}"], moments[f"{kind}{SCALES}/{name}"] = coded
        return moments

    def _read(self, kind: str, name: str, like: Tensor) -> Tensor:
        if name not in self._coded:
            return self._moments[f"{kind}/{name}"]
        decoded = self._books[kind].decode(Coded(self._moments[f"{kind}{CODES}/{name}"], self._moments[f"{kind}{SCALES}/{name}"]))
        return decoded.to(like.dtype).view_as(like)

    def _write(self, kind: str, name: str, moment: Tensor) -> None:
        if name in self._coded:
            coded = self._books[kind].encode(moment.view(-1).float())
            self._moments[f"{kind}{CODES}/{name}"], self._moments[f"{kind}{SCALES}/{name}"] = coded
