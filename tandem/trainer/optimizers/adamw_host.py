"""AdamW whose moments lie in the host's memory while weights and gradients are on a GPU (Ren et al., 2021, "ZeRO-Offload"; there the CPU
updates, here the GPU does, and moments pass through it)."""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.offload.pages import Pages
from tandem.trainer.offload.streams import Streams, streams_of
from tandem.trainer.optimizers.adamw import MOMENTS, HeldGradients, OptimizerState, check_state
from tandem.types import RunError

PIECE = 1 << 22
"""Numbers of a moment on the GPU at a time; 16 MiB, which a bus takes at its full speed."""
SIDES = 3
"""Pieces of each moment on the GPU: one that comes, one that is worked on, one that goes back."""


class HostAdamW(HeldGradients):
    """``AdamW`` with its bits, for parameters of one dtype. The moments of all parameters lie end to end in two tensors of the host's
    memory, pinned where the parameters are on a GPU; a step brings them there piece by piece and takes them back. ``decayed``: as in ``AdamW``.
    ``lanes``: how copies and updates stand side by side."""

    kinds: tuple[str, ...] = MOMENTS

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, decayed: Collection[str] | None = None,
        lanes: Streams | None = None, piece: int = PIECE,
    ) -> None:  # fmt: skip
        super().__init__(parameters, config)
        self._decayed = {name for name, p in self.parameters.items() if p.ndim >= 2} if decayed is None else set(decayed)
        self._pages = Pages(list(self.parameters.items()), MOMENTS, 0)
        # ZeRO may leave a rank nothing.
        like = next(iter(self.parameters.values()), torch.empty(0))
        self._device, self._piece = like.device, max(1, min(piece, self._pages.length))
        self._lanes = lanes or streams_of(like.device)
        self._held = {kind: host_zeros(self._pages.length, like.dtype, like.is_cuda) for kind in MOMENTS}
        self._sides = [[torch.empty(self._piece, dtype=like.dtype, device=like.device) for _ in MOMENTS] for _ in range(SIDES)]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter that has a gradient."""
        done, lanes = torch.tensor(float(self.updates + 1), device=self._device), self._lanes
        length = self._pages.length
        pieces = [slice(start, min(start + self._piece, length)) for start in range(0, length, self._piece)]
        # What the step before brought back is there before it is fetched again.
        lanes.wait("fetch", lanes.mark("bring back"))
        arrived = [self._fetch(where, side, None) for side, where in enumerate(pieces[:SIDES])]
        for turn, where in enumerate(pieces):
            side = turn % SIDES
            lanes.wait("compute", arrived[turn])
            lanes.run("compute", self._update(where, side, done, learning_rate))
            lanes.wait("bring back", lanes.mark("compute"))
            lanes.run("bring back", self._copies(where, side, to_host=True))
            left = lanes.mark("bring back")
            if turn + SIDES < len(pieces):
                arrived.append(self._fetch(pieces[turn + SIDES], side, left))
        self.updates += 1

    def _fetch(self, where: slice, side: int, left: object) -> object:
        """Begin to bring a piece to the GPU when what was there has ``left``; the mark of its arrival."""
        self._lanes.wait("fetch", left)
        self._lanes.run("fetch", self._copies(where, side, to_host=False))
        return self._lanes.mark("fetch")

    def _copies(self, where: slice, side: int, *, to_host: bool) -> Callable[[], None]:
        pairs = [(held[where], there[: where.stop - where.start]) for held, there in zip(self._held.values(), self._sides[side], strict=True)]

        def copy() -> None:
            for host, there in pairs:
                (host if to_host else there).copy_(there if to_host else host, non_blocking=True)

        return copy

    def _update(self, where: slice, side: int, done: Tensor, learning_rate: float) -> Callable[[], None]:
        config, (exp_avg, exp_avg_sq) = self._config, self._sides[side]

        @torch.no_grad()
        def update() -> None:
            for decays in (True, False):
                found: list[Sequence[Tensor]] = []
                for name, staged, own in self._pages.overlaps(where):
                    parameter = self.parameters[name]
                    if parameter.grad is not None and (name in self._decayed) is decays:
                        flat = parameter.detach().view(-1)[own], parameter.grad.contiguous().view(-1)[own]
                        found.append((*flat, exp_avg[staged], exp_avg_sq[staged]))
                if found:
                    weights, gradients, first, second = (list(column) for column in zip(*found, strict=True))
                    torch._fused_adamw_(
                        weights, gradients, first, second, [], [done] * len(weights), lr=learning_rate, beta1=config.beta1, beta2=config.beta2,
                        weight_decay=config.weight_decay if decays else 0.0, eps=config.epsilon, amsgrad=False, maximize=False,
                    )  # fmt: skip

        return update

    def state(self) -> OptimizerState:
        """The moments are views of the host's memory."""
        self._lanes.finish()
        return OptimizerState(self._views() if self.updates else {}, self.updates)

    def form(self) -> dict[str, Tensor]:
        """The tensors that ``state`` has after an update, without their numbers."""
        return {name: view.to("meta") for name, view in self._views().items()}

    @torch.no_grad()
    def load_state(self, state: OptimizerState) -> None:
        views = self._views()
        check_state(state, views)
        self._lanes.finish()
        for name, view in views.items():
            if state.moments:
                view.copy_(state.moments[name])
            else:
                view.zero_()
        self.updates = state.updates

    def _views(self) -> dict[str, Tensor]:
        return {f"{kind}/{name}": view for kind, held in self._held.items() for name, view in self._pages.views(held)}


def host_zeros(numbers: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Zeros in the host's memory. ``pinned``: a GPU copies to and from them beside its work. Registered and not taken from torch's allocator of
    pinned memory, which rounds up to a power of two."""
    found = torch.zeros(numbers, dtype=dtype, device="cpu")
    if pinned and found.nbytes:
        runtime = torch.cuda.cudart()
        failed = int(runtime.cudaHostRegister(found.data_ptr(), found.nbytes, 0))
        if failed:
            raise RunError(f"{found.nbytes / 2**30:.2f} GiB of the host's memory cannot be pinned for a GPU (CUDA error {failed}); raise 'ulimit -l', or set "
                           "trainer.offload to none")  # fmt: skip
    return found
