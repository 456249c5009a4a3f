"""Locates where a step becomes non-finite: the first layer, sequence and token in the forward pass, the first layer in the backward pass,
and the parameters with non-finite gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.model.head_outputs import HeadOutputs
from tandem.model.layer_pass import LayerFunction
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import ForwardBackwardOutput, Loss, LossShare, OnPhase, Progress, no_pipelining


@dataclass(frozen=True, slots=True)
class Place:
    """The first non-finite element of ``what`` in micro-batch ``micro_batch`` (from 0), at token ``position`` of ``sequence``. ``layer``:
    -1 for the embedding, the number of layers for what follows the last one."""

    what: str
    layer: int
    micro_batch: int
    sequence: str
    position: int
    value: float


@dataclass(frozen=True, slots=True)
class BadGradient:
    """The gradient of a parameter became non-finite in the backward pass of ``micro_batch``: ``count`` of its ``total`` elements."""

    micro_batch: int
    count: int
    total: int


@dataclass
class Findings:
    """What the detector observed. ``losses``: each micro-batch's share. ``forward``, ``backward``: non-finite outputs in order of
    appearance, each with its first place in the first micro-batch concerned. ``gradients``: by parameter."""

    losses: list[float] = field(default_factory=list)
    forward: list[Place] = field(default_factory=list)
    backward: list[Place] = field(default_factory=list)
    gradients: dict[str, BadGradient] = field(default_factory=dict)


class NanDetector:
    """Passes micro-batches one by one through a whole ``model`` and inspects the output of every layer and every gradient. Does not change
    any result."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.findings = model, Findings()
        self._micro_batches: Sequence[MicroBatch] = ()
        self._number = 0
        self._in_backward = False

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float = 1.0, on_progress: Progress | None = None,
        tracer: Tracer = NO_TRACE, scale: float = 1.0, after_backward: Callable[[], None] | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> ForwardBackwardOutput:  # fmt: skip
        """Does ``trainer.step.no_pipelining`` while inspecting every output."""
        self._micro_batches, self._number, self._in_backward = micro_batches, 0, False

        def watched(outputs: HeadOutputs, micro_batch: MicroBatch) -> LossShare:
            if outputs.of_language is not None:
                self._look(self.findings.forward, "log-probabilities", len(self.model.layers), outputs.of_language.raw, micro_batch.rows)
            if outputs.of_value is not None:
                self._look(self.findings.forward, "values", len(self.model.layers), outputs.of_value, micro_batch.rows)
            share = loss(outputs, micro_batch)
            self.findings.losses.append(share.loss.item())
            self._in_backward = True
            return share

        def passed() -> None:
            if after_backward is not None:
                after_backward()
            self._look_at_gradients()
            self._number, self._in_backward = self._number + 1, False

        before = self.model.around_layer
        self.model.around_layer = self._around
        try:
            return no_pipelining(self.model)(micro_batches, watched, temperature, on_progress, tracer, scale, passed, on_phase)
        finally:
            self.model.around_layer = before

    def _around(self, index: int, layer: LayerFunction, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        # A layer recomputed in the backward pass was already inspected in the forward pass.
        if self._in_backward:
            return layer(x, residual)
        if x is None:
            self._look(self.findings.forward, "the embedding", -1, residual)
        x, residual = layer(x, residual)
        # The residual stream contains the attention's output, but not yet the MLP's.
        for what, output in ((f"layer {index}, attention", residual), (f"layer {index}, MLP", x)):
            self._look(self.findings.forward, what, index, output)
            if output.requires_grad:
                output.register_hook(lambda gradient, what=what: self._look(self.findings.backward, what, index, gradient))  # type: ignore[misc]
        return x, residual

    def _look(self, places: list[Place], what: str, layer: int, x: Tensor, rows: Tensor | None = None) -> None:
        """Records the first non-finite row of ``x`` [T, ...], unless an earlier micro-batch had one in ``what``. ``rows``: the token
        indices of the rows."""
        with torch.no_grad():
            bad = ~torch.isfinite(x)
            if not bad.any() or any(place.what == what for place in places):
                return
            row = int(bad.reshape(len(x), -1).any(dim=1).nonzero()[0])
            value = x[row][bad[row]].reshape(-1)[0].item()
        micro_batch = self._micro_batches[self._number]
        token = row if rows is None else int(rows[row])
        sequence = int(torch.searchsorted(micro_batch.own_rows, token, right=True)) - 1
        places.append(Place(what, layer, self._number, micro_batch.ids[sequence], int(micro_batch.positions[token]), value))

    def _look_at_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name not in self.findings.gradients and parameter.grad is not None:
                bad = int((~torch.isfinite(parameter.grad)).sum())
                if bad:
                    self.findings.gradients[name] = BadGradient(self._number, bad, parameter.numel())
