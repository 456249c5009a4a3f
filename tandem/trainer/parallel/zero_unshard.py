"""Gathers (unshards) and frees (reshards) the layers' weights under ZeRO 3."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.model.layer_pass import LayerFunction
from tandem.trainer.parallel.before_backward import BeforeBackward
from tandem.trainer.parallel.flat_buffer import FlatBuffer, layer_of
from tandem.trainer.parallel.gradient_reducer import GradientReducer
from tandem.trainer.parallel.zero_shard import Shard


class ZeroUnshard:
    """ZeRO stage 3: installs hooks around the layers of ``model`` and before its forward pass that gather and free weights. ``sums``: the
    gradients' (``None``: the model has no backward pass)."""

    def __init__(self, shards: Sequence[Shard], model: Decoder, sums: GradientReducer | None = None) -> None:
        self._layers: dict[int, list[Shard]] = {}
        self._ends: list[Shard] = []
        for shard in shards:
            layer = layer_of(shard.bucket)
            (self._ends if layer is None else self._layers.setdefault(layer, [])).append(shard)
        self._shard_of = {id(shard.bucket): shard for shard in shards}
        self._in_backward: set[int] = set()
        self._waiting = dict.fromkeys(map(id, self._ends), 0)
        """Forward passes whose backward pass still needs the embedding or the head, by shard: a pipeline may have several."""
        if sums is not None:
            sums.after_sum = self._after_sum
        model.around_layer = self._around
        model.register_forward_pre_hook(lambda *_: self._before_all())

    def _before_all(self) -> None:
        self._in_backward.clear()
        for shard in self._ends:
            shard.gather()
            self._waiting[id(shard)] += torch.is_grad_enabled()
        self._start(min(self._layers, default=-1), 1)

    def _start(self, index: int, toward: int) -> None:
        """Starts to gather layer ``index`` and to read the own part of the following one."""
        for shard in self._layers.get(index, ()):
            shard.start_gather()
        for shard in self._layers.get(index + toward, ()):
            shard.start_read()

    def _around(self, index: int, layer: LayerFunction, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        is_again = index in self._in_backward
        self._gather(index, -1 if is_again else 1)
        x, residual = layer(x, residual)
        if is_again:
            return x, residual
        if torch.is_grad_enabled():
            x, residual = BeforeBackward.apply(self.before_backward, index, x, residual)
        for shard in self._layers[index]:
            shard.free()
        return x, residual

    def _gather(self, index: int, toward: int) -> None:
        for shard in self._layers[index]:
            shard.gather()
        # The next layer is gathered while this one computes.
        self._start(index + toward, toward)

    def before_backward(self, index: int) -> None:
        self._in_backward.add(index)
        self._gather(index, -1)

    def _after_sum(self, bucket: FlatBuffer) -> None:
        """Frees the weights of ``bucket``: all its gradients are complete, so this backward pass reads them no more."""
        shard = self._shard_of[id(bucket)]
        if id(shard) in self._waiting:
            self._waiting[id(shard)] -= 1
            if self._waiting[id(shard)] > 0:
                return
        shard.free()
