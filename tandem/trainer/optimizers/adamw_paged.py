"""AdamW with moments in a file and, optionally, the layers' weights and gradients too (Rajbhandari et al., 2021, "ZeRO-Infinity", section
5): only staging buffers of them are in memory."""

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.trainer.offload.pager import Pager
from tandem.trainer.offload.pages import GRADIENTS, WEIGHTS, Pages
from tandem.trainer.offload.parameters import ParameterOffload
from tandem.trainer.optimizers.adamw import MOMENTS, OptimizerState, check_state, fused_adamw, global_norm, names_to_decay, norms_of
from tandem.trainer.parallel.flat_buffer import layer_number


class PagedAdamW:
    """``AdamW``, bit for bit, for dense parameters of one dtype. Elementwise: pieces of the moments are read from ``folder`` ahead of their
    update and written back behind it; for parameters on a GPU each piece passes through the GPU.

    ``layers_of`` (CPU only): the decoder whose layers' weights and gradients are in the file too and in memory only while the layer
    computes (``ParameterOffload``); ``is_filled``: it has its weights. ``paged``: groups of names whose weights and gradients are in the
    file and which the caller reads there; the caller writes a gradient of each before a step, and sets in ``factors`` what the update
    multiplies them by. ``decayed``: the names that weight decay applies to (default: matrices)."""

    kinds: tuple[str, ...] = MOMENTS

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, folder: Path, layers_of: Decoder | None = None,
        is_filled: bool = True, *, paged: Sequence[Sequence[str]] = (), decayed: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._config, self.folder = config, folder
        self._shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self._decayed = names_to_decay(self.parameters, decayed)
        by_layer = {} if layers_of is None else self._by_layer()
        groups = [*by_layer.values()] if layers_of is not None else [list(names) for names in paged]
        grouped = {name for names in groups for name in names}
        self._pages: list[Pages] = []
        for name, parameter in self.parameters.items():
            if name not in grouped:
                self._pages.append(Pages([(name, parameter)], MOMENTS, len(MOMENTS) * len(self._pages)))
        kinds, first = (WEIGHTS, GRADIENTS, *MOMENTS), len(MOMENTS) * len(self._pages)
        self.groups = [
            Pages([(name, self.parameters[name]) for name in names], kinds, first + len(kinds) * place) for place, names in enumerate(groups)
        ]
        self._pages += self.groups
        self._place_of = {name: pages for pages in self._pages for name in pages.parameters}
        self._dtype = next((parameter.dtype for parameter in self.parameters.values()), torch.float32)
        # Parameters in the file have no device of their own.
        is_on_gpu = any(parameter.is_cuda for parameter in self.parameters.values())
        self._device = next(p.device for p in self.parameters.values() if p.is_cuda) if is_on_gpu else torch.device("cpu")
        sizes = [pages.length for pages in self._pages for _ in pages.kinds]
        self.pager = Pager(folder, sizes, self._dtype, at_once=len(kinds if groups else MOMENTS), pinned=is_on_gpu)
        self.layers = None
        if layers_of is not None:
            self.layers = ParameterOffload(layers_of, dict(zip(by_layer, self.groups, strict=True)), self.pager, is_filled)
        self.factors: list[float] = []
        self.updates = 0

    def _by_layer(self) -> dict[int, list[str]]:
        names_by_layer: dict[int, list[str]] = {}
        for name in self.parameters:
            layer = layer_number(name)
            if layer is not None:
                names_by_layer.setdefault(layer, []).append(name)
        return dict(sorted(names_by_layer.items()))

    def zero_grad(self) -> None:
        self.factors = []
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.layers is not None:
            self.layers.zero_grad()

    def clip(self, scale: float = 1.0) -> float:
        """Divides and clips gradients: those in memory now, those in the file during the update. Returns the norm before clipping."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        self.factors = [] if scale == 1.0 else [1.0 / scale]
        for gradient in gradients if self.factors else ():
            gradient.mul_(self.factors[0])
        norms = norms_of(gradients)
        if self.layers is not None:
            norms += self.layers.norms(1.0 / scale)
        total, most = global_norm(norms), self._config.max_grad_norm
        if 0 < most < total < math.inf:
            self.factors.append(most / total)
            for gradient in gradients:
                gradient.mul_(self.factors[-1])
        return total

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates every parameter that has a gradient."""
        config, done = self._config, torch.full((), float(self.updates + 1), device=self._device)
        if self.layers is not None:
            self.layers.release()
        chosen = [pages for pages in self._pages if any(self._has_gradient(name) for name in pages.parameters)]

        def update(place: int, where: slice, pieces: list[Tensor]) -> None:
            pages = chosen[place]
            exp_avg, exp_avg_sq = there = [piece.to(self._device, non_blocking=True) for piece in pieces[-2:]]
            for name, staged, own in pages.overlaps(where):
                if not self._has_gradient(name):
                    continue
                parameter = self.parameters[name]
                if WEIGHTS in pages.kinds:
                    weight, gradient = pieces[0][staged], pieces[1][staged]
                    for factor in self.factors:
                        gradient.mul_(factor)
                else:
                    assert parameter.grad is not None
                    weight, gradient = parameter.view(-1)[own], parameter.grad.contiguous().view(-1)[own]
                decay = config.weight_decay if name in self._decayed else 0.0
                fused_adamw([weight], [gradient], [exp_avg[staged]], [exp_avg_sq[staged]], done, config, learning_rate, decay)

            if self._device.type == "cuda":
                for piece, updated in zip(pieces[-2:], there, strict=True):
                    piece.copy_(updated)

        kept = {pages.tensor(GRADIENTS) for pages in chosen if GRADIENTS in pages.kinds}
        self.pager.visit([pages.tensors for pages in chosen], update, kept)
        self.updates += 1

    def _has_gradient(self, name: str) -> bool:
        if WEIGHTS in self._place_of[name].kinds:
            return self.layers is None or name in self.layers.with_gradient
        return self.parameters[name].grad is not None

    def weights(self) -> dict[str, Tensor]:
        """Returns every parameter, those in the file as views of it."""
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        for pages in self._pages:
            if WEIGHTS in pages.kinds:
                weights |= pages.mapped(self.pager, WEIGHTS)
        return weights

    def weight(self, name: str) -> Tensor:
        """Returns one parameter, in memory or as a view of the file that is released with the view."""
        pages = self._place_of[name]
        return pages.mapped(self.pager, WEIGHTS)[name] if WEIGHTS in pages.kinds else self.parameters[name].detach()

    @torch.no_grad()
    def put(self, kind: str, name: str, values: Tensor, first: int = 0) -> None:
        """Writes ``values`` as the elements of ``kind`` of the parameter ``name`` from ``first`` on."""
        pages = self._place_of[name]
        if kind in pages.kinds:
            if kind == WEIGHTS and self.layers is not None:
                self.layers.release()
            self.pager.write(pages.tensor(kind), values, pages.starts[name] + first)
        else:
            self.parameters[name].view(-1)[first : first + values.numel()].copy_(values.reshape(-1))

    def state(self) -> OptimizerState:
        """Returns the state; its moments are views of the file."""
        if not self.updates:
            return OptimizerState({}, 0)
        held = {f"{kind}/{name}": view for pages in self._pages for kind in MOMENTS for name, view in pages.mapped(self.pager, kind).items()}
        return OptimizerState({name: held[name] for name in self.form()}, self.updates)

    def load_state(self, state: OptimizerState) -> None:
        check_state(state, self.form())
        for kind in MOMENTS:
            for name, shape in self._shapes.items():
                self.put(kind, name, state.moments[f"{kind}/{name}"] if state.moments else torch.zeros(shape, dtype=self._dtype))
        self.updates = state.updates

    def form(self) -> dict[str, Tensor]:
        """Returns the tensors that ``state`` has after an update, on the ``meta`` device."""
        return {
            f"{kind}/{name}": torch.empty(shape, dtype=self._dtype, device="meta")
            for name, shape in self._shapes.items() for kind in MOMENTS
        }  # fmt: skip
