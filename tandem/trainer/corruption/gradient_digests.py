"""Digests of the loss and the gradients of single micro-batches, taken while they are computed."""

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.model.head_outputs import HeadOutputs
from tandem.runtime.machine.tensor_bytes import bytes_view
from tandem.storage.digests import best_algorithm, bytes_digest, new_digest
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare

LOSS = "loss"


class GradientDigests:
    """Takes the digests of the micro-batches ``wanted``, by number, of a pass over ``micro_batches`` of ``model``: of each parameter's gradient as autograd
    adds it to the others, before any sum over micro-batches or ranks. ``order``: the micro-batch of each backward pass. Changes no result."""

    def __init__(self, model: Decoder, micro_batches: Sequence[MicroBatch], wanted: Collection[int], order: Sequence[int]) -> None:
        self._micro_batches, self._order, self._done = micro_batches, order, 0
        self._digests: dict[int, dict[str, Any]] = {number: {} for number in wanted if number < len(micro_batches)}
        self._handles = [
            parameter.register_hook(partial(self._gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters() if parameter.requires_grad
        ]  # fmt: skip

    def loss(self, loss: Loss) -> Loss:
        """Returns ``loss``, whose values are digested."""

        def digested(outputs: HeadOutputs, micro_batch: MicroBatch) -> LossShare:
            share = loss(outputs, micro_batch)
            for number in self._digests:
                if self._micro_batches[number] is micro_batch:
                    self._add(number, LOSS, share.loss)
            return share

        return digested

    def after(self, after_backward: Callable[[], None] | None) -> Callable[[], None]:
        """Returns ``after_backward``, which also counts the backward passes."""

        def counted() -> None:
            self._done += 1
            if after_backward is not None:
                after_backward()

        return counted

    def take(self) -> dict[int, dict[str, str]]:
        """Ends the digests and returns them by micro-batch and by parameter or ``LOSS``."""
        for handle in self._handles:
            handle.remove()
        return {number: {name: str(digest.hexdigest()) for name, digest in of.items()} for number, of in self._digests.items()}

    def _gradient(self, name: str, gradient: Tensor) -> None:
        number = self._order[self._done]
        if number in self._digests:
            self._add(number, name, gradient)

    def _add(self, number: int, name: str, tensor: Tensor) -> None:
        digest, host = self._digests[number].setdefault(name, new_digest(best_algorithm())), tensor.detach().cpu().contiguous()
        digest.update(bytes_view(host))


def combined(digests: dict[str, str]) -> str:
    """Returns one digest of the digests of all tensors."""
    return bytes_digest(json.dumps(digests, sort_keys=True).encode())
