"""A pipeline's stages brought together, for who writes the whole model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.runtime.communicator import Communicator
from tandem.trainer.optimizer import OptimizerState
from tandem.trainer.parallel.pipeline import Pipeline, broadcast_value


def gathered_model(pipeline: Pipeline) -> Decoder | None:
    """The whole model, in memory of its own, on the first rank of the pipeline; ``None`` on the others."""
    part = pipeline.model
    own = {name: parameter.detach() for name, parameter in part.named_parameters()}
    tensors = gathered_tensors(pipeline.ranks, own, "the weights of a stage")
    if tensors is None:
        return None
    found = Decoder(part.shapes, part.kernels, dtype=part.dtype, device=part.device, parallel=part.parallel)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            parameter.copy_(tensors[name])
    return found


def gathered_state(pipeline: Pipeline, own: OptimizerState) -> OptimizerState:
    """The optimizer's state of the whole model on the first rank of the pipeline; ``own`` on the others."""
    moments = gathered_tensors(pipeline.ranks, own.moments, "the optimizer's state of a stage")
    return own if moments is None else OptimizerState(moments, own.updates)


def gathered_tensors(ranks: Communicator, own: Mapping[str, Tensor], name: str) -> dict[str, Tensor] | None:
    """Every rank's tensors by name on rank 0, of a name that several have the first rank's; ``None`` on the others."""
    device = next(iter(own.values())).device if own else torch.device("cpu")
    found = dict(own)
    for source in range(1, ranks.size):
        listed = [(key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for key, tensor in own.items()]
        for key, dtype, shape in broadcast_value(ranks, listed, source, name, device):
            if ranks.rank == source:
                ranks.send(own[key], 0, name).wait()
            elif ranks.rank == 0:
                arrived = ranks.receive(torch.empty(shape, dtype=getattr(torch, dtype), device=device), source, name).wait()
                found.setdefault(key, arrived)
    return found if ranks.rank == 0 else None
