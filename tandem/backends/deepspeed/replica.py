"""A model that DeepSpeed trains on one rank, in the place of the trainer's own ``Replica``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tandem.backends.collective_errors import collectives_of
from tandem.backends.deepspeed.network import Network
from tandem.backends.deepspeed.optimizer import DeepSpeedOptimizer
from tandem.backends.library_sums import LibrarySums
from tandem.model.decoder import Decoder
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.step import ForwardBackward, ForwardBackwardOutput, Loss, LossShare, OnPhase, Progress, predict, stacked, sum_shares

_named = partial(collectives_of, "DeepSpeed")


@dataclass(frozen=True, slots=True)
class DeepSpeedReplica:
    """``engine``: DeepSpeed's, over ``network``, which has the decoder ``model``."""

    ranks: Ranks
    model: Decoder
    network: Network
    engine: Any
    optimizer: DeepSpeedOptimizer

    @property
    def sums(self) -> LibrarySums | None:
        return LibrarySums(self.ranks) if self.ranks.world.size > 1 else None

    def passes(self, own: int, most: int) -> int:
        """Returns ``most``: ranks communicate within the passes of ZeRO 2 and 3, and DeepSpeed counts the same passes on every rank."""
        return most

    @property
    def forward_backward(self) -> ForwardBackward:
        return self._forward_backward

    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float = 1.0, on_progress: Progress | None = None,
        tracer: Tracer = NO_TRACE, scale: float = 1.0, after_backward: Callable[[], None] | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> ForwardBackwardOutput:  # fmt: skip
        def shares() -> Iterator[LossShare]:
            for number, micro_batch in enumerate(micro_batches):
                self.engine.set_gradient_accumulation_boundary(number + 1 == len(micro_batches))
                held = list[LossShare]()
                on_phase("forward")
                with tracer.span("forward", micro_batch=number), _named("a forward pass", self.ranks):
                    total = self.engine(partial(self._loss, micro_batch, loss, temperature, scale, held))
                on_phase("backward")
                with tracer.span("backward", micro_batch=number), _named("a backward pass", self.ranks):
                    self.engine.backward(total, scale_wrt_gas=False)
                    if after_backward is not None:
                        after_backward()
                yield held[0]
                if on_progress is not None:
                    on_progress(number + 1, len(micro_batches))

        return sum_shares(shares())

    def _loss(self, micro_batch: MicroBatch, loss: Loss, temperature: float, scale: float, held: list[LossShare], decoder: Decoder) -> Tensor:
        """Returns what is differentiated, and appends the share of the loss to ``held``. It is computed within the network's forward pass, while the head's
        weights are whole. DeepSpeed takes the mean of gradients over data-parallel ranks, where ours are shares of one sum."""
        share = loss(predict(decoder, micro_batch, temperature), micro_batch)
        held.append(share)
        return share.loss * (scale * self.ranks.data.size)

    @torch.no_grad()
    def infer(
        self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None
    ) -> list[Tensor]:
        """Returns what ``trainer.logprobs.infer`` does for this rank's micro-batches."""
        values = []
        for done, micro_batch in enumerate(micro_batches, start=1):
            with _named("a forward pass", self.ranks):
                values.append(self.network(partial(_inferred, micro_batch, temperature)))
            if on_progress is not None:
                on_progress(done, len(micro_batches))
        return values

    def reshard(self) -> None:
        """Does nothing: DeepSpeed frees what a forward pass gathered at its end."""

    def drop_gradients(self) -> int:
        """Drops gradients between two steps, after which DeepSpeed holds none. Returns 0."""
        self.optimizer.zero_grad()
        return 0

    def weights(self) -> list[Tensor]:
        """Returns the weights that the network computes with, this rank's part of them under ZeRO 3, and the fp32 copies that the optimizer updates."""
        held: list[Any] = list(self.model.parameters())
        return [parameter.ds_tensor if self.optimizer.stage == 3 else parameter for parameter in held] + self.optimizer.flat_weights()

    def moments(self) -> list[Tensor]:
        """Returns this rank's part of the optimizer's state."""
        return self.optimizer.flat_moments()

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter by name, under ZeRO 3 gathered one at a time. Every rank must take all."""
        for name, parameter in self.model.named_parameters():
            with self._gathered(parameter):
                yield name, parameter.detach()

    def _gathered(self, parameter: nn.Parameter) -> AbstractContextManager[Any]:
        if self.optimizer.stage < 3:
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
        return gathered

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's part of the summed gradients, before the step."""
        yield from self.optimizer.gradients()


def _inferred(micro_batch: MicroBatch, temperature: float, decoder: Decoder) -> Tensor:
    return stacked(predict(decoder, micro_batch, temperature))
