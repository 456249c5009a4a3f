"""AdamW with moments in host memory and weights and gradients on a GPU (Ren et al., 2021, "ZeRO-Offload"; there the CPU updates, here the
GPU does and the moments are streamed through it)."""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.offload.host_memory import host_zeros, unpin
from tandem.trainer.offload.pages import Pages
from tandem.trainer.offload.streams import Streams, streams_of
from tandem.trainer.optimizers.adamw import MOMENTS, HeldGradients, OptimizerState, check_state, fused_adamw

PIECE = 1 << 22
"""Elements of a moment on the GPU at a time; 16 MiB, enough for the bus's full speed."""
SIDES = 3
"""Staging buffers of each moment on the GPU: one being filled, one being updated, one being copied back."""


class HostAdamW(HeldGradients):
    """``AdamW``, bit for bit, for parameters of one dtype.

    The moments of all parameters are stored contiguously in two tensors in host memory, page-locked if the parameters are on a GPU; a step
    streams them through the GPU piece by piece. ``decayed``: as in ``AdamW``. ``streams``: the streams for copies and updates."""

    kinds: tuple[str, ...] = MOMENTS

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, decayed: Collection[str] | None = None,
        streams: Streams | None = None, piece: int = PIECE,
    ) -> None:  # fmt: skip
        super().__init__(parameters, config, decayed)
        self._pages = Pages(list(self.parameters.items()), MOMENTS, 0)
        # Under ZeRO a rank may own no elements.
        like = next(iter(self.parameters.values()), torch.empty(0))
        self._piece = max(1, min(piece, self._pages.length))
        self._streams = streams or streams_of(like.device)
        self._held = {kind: host_zeros(self._pages.length, like.dtype, like.is_cuda) for kind in MOMENTS}
        # CUDA refuses to pin an address that freed memory has left pinned.
        weakref.finalize(self, _unpin_all, self._streams, list(self._held.values())).atexit = False
        self._sides = [[torch.empty(self._piece, dtype=like.dtype, device=like.device) for _ in MOMENTS] for _ in range(SIDES)]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates every parameter that has a gradient."""
        done, streams = torch.full((), float(self.updates + 1), device=self._device), self._streams
        length = self._pages.length
        pieces = [slice(start, min(start + self._piece, length)) for start in range(0, length, self._piece)]
        # The previous step's moments must be back in host memory before they are fetched again.
        streams.wait("host_to_device", streams.record_event("device_to_host"))
        arrived = [self._fetch(where, side, None) for side, where in enumerate(pieces[:SIDES])]
        for turn, where in enumerate(pieces):
            side = turn % SIDES
            streams.wait("compute", arrived[turn])
            streams.run("compute", self._update(where, side, done, learning_rate))
            streams.wait("device_to_host", streams.record_event("compute"))
            streams.run("device_to_host", self._copies(where, side, to_host=True))
            left = streams.record_event("device_to_host")
            if turn + SIDES < len(pieces):
                arrived.append(self._fetch(pieces[turn + SIDES], side, left))
        self.updates += 1

    def _fetch(self, where: slice, side: int, left: object) -> object:
        """Starts to copy a piece to the GPU once the event ``left`` of the buffer's previous content is complete; returns the event of its
        arrival."""
        self._streams.wait("host_to_device", left)
        self._streams.run("host_to_device", self._copies(where, side, to_host=False))
        return self._streams.record_event("host_to_device")

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
                rows: list[Sequence[Tensor]] = []
                for name, staged, own in self._pages.overlaps(where):
                    parameter = self.parameters[name]
                    if parameter.grad is not None and (name in self._decayed) is decays:
                        flat = parameter.detach().view(-1)[own], parameter.grad.contiguous().view(-1)[own]
                        rows.append((*flat, exp_avg[staged], exp_avg_sq[staged]))
                if rows:
                    weights, gradients, first, second = zip(*rows, strict=True)
                    fused_adamw(weights, gradients, first, second, done, config, learning_rate, config.weight_decay if decays else 0.0)

        return update

    def state(self) -> OptimizerState:
        """Returns the state; its moments are views of host memory."""
        self._streams.synchronize()
        return OptimizerState(self._views() if self.updates else {}, self.updates)

    def form(self) -> dict[str, Tensor]:
        """Returns the tensors that ``state`` has after an update, on the ``meta`` device."""
        return {name: view.to("meta") for name, view in self._views().items()}

    @torch.no_grad()
    def load_state(self, state: OptimizerState) -> None:
        views = self._views()
        check_state(state, views)
        self._streams.synchronize()
        for name, view in views.items():
            if state.moments:
                view.copy_(state.moments[name])
            else:
                view.zero_()
        self.updates = state.updates

    def _views(self) -> dict[str, Tensor]:
        return {f"{kind}/{name}": view for kind, held in self._held.items() for name, view in self._pages.views(held)}


def _unpin_all(streams: Streams, held: Sequence[Tensor]) -> None:
    streams.synchronize()
    for tensor in held:
        unpin(tensor)
