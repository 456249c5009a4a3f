"""Records digests of what an optimizer step computes on one rank: weights, the outputs of layers and their gradients, gradients of parameters, and the
weights after the update."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.model.layer_pass import AroundLayer, LayerFunction
from tandem.runtime.machine.tensor_bytes import bytes_view
from tandem.runtime.records.tensor_digests import FOLDER, TensorDigests
from tandem.storage.digests import new_digest
from tandem.trainer.backend import TrainedReplica
from tandem.types import TrainSequence

ALGORITHM = "blake2b_128"
"""Of the standard library, so that two environments have it."""


class TensorRecord:
    """Writes the digests of ``step`` to ``path``. Does not change any result."""

    def __init__(self, path: Path) -> None:
        self._digests, self.step = TensorDigests(path), 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds one tensor of the present step."""
        host = tensor.detach().cpu().contiguous()
        digest = new_digest(ALGORITHM)
        digest.update(f"{host.dtype} {list(host.shape)}".encode())
        digest.update(bytes_view(host))
        norm = float(torch.linalg.vector_norm(host.double())) if host.numel() else 0.0
        self._digests.add(self.step, "train", name, str(digest.hexdigest()), norm)

    def watch(self, model: Decoder, label: str) -> None:
        """Adds, from now on, the output of every layer of ``model`` and its gradient, in forward and backward passes."""
        model.around_layer = partial(self._around, label, model.around_layer)

    def batch(self, sequences: Iterable[TrainSequence]) -> None:
        """Adds what the update is given: tokens, masks, advantages, and what rollout, reference and critic say of each token."""
        held = list(sequences)
        for name in ("token_ids", "loss_mask", "rollout_logprobs", "sampling_logprobs", "reference_logprobs", "values", "returns", "advantages"):
            values = [value for sequence in held for value in getattr(sequence, name) or ()]
            if values:
                self.add(f"batch, {name}", torch.tensor(values, dtype=torch.int64 if name == "token_ids" else torch.float64))

    def weights(self, replica: TrainedReplica, label: str) -> None:
        """Adds every parameter. Every rank calls it."""
        for name, weight in replica.each_parameter():
            self.add(f"{label}, {name}", weight)

    def gradients(self, replica: TrainedReplica) -> None:
        """Adds the gradients of the parameters, or of this rank's part of them, once they are summed over ranks."""
        for name, gradient in replica.each_gradient():
            self.add(f"gradient of {name}", gradient)

    def _around(
        self, label: str, inner: AroundLayer | None, index: int, layer: LayerFunction, x: Tensor | None, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        if x is None:
            self._output(f"{label}, the embedding", residual)
        x, residual = layer(x, residual) if inner is None else inner(index, layer, x, residual)
        # The residual stream contains the attention's output, but not yet the MLP's.
        for what, output in (("attention", residual), ("MLP", x)):
            self._output(f"{label}, layer {index}, {what}", output)
        return x, residual

    def _output(self, name: str, output: Tensor) -> None:
        self.add(name, output)
        if output.requires_grad:
            output.register_hook(partial(self._gradient, name))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, gradient: Tensor) -> None:
        self.add(f"gradient of {name}", gradient)


def tensor_record(directory: Path, rank: int) -> TensorRecord | None:
    """Returns the record of a run in ``directory`` that is recorded, which has a folder for it."""
    folder = directory / FOLDER
    return TensorRecord(folder / f"rank-{rank}.jsonl") if folder.is_dir() else None
