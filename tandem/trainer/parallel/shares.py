"""Parts of a model that tensor and expert ranks hold, brought together for who writes the whole, and cut again for who has read it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.layout.pipeline_stages import Span
from tandem.layout.shapes import parameters
from tandem.layout.sharding import Cut, cut_slices, is_held
from tandem.model.decoder import Decoder
from tandem.model.huggingface import part_of, to_huggingface
from tandem.model.parallel import ModelParallel
from tandem.trainer.optimizer import OptimizerState


def gathered_model(part: Decoder) -> Decoder | None:
    """The whole model, in memory of its own, on the first rank of those that hold ``part``'s like; ``None`` on the others."""
    if not _is_part(part):
        return part
    tensors = _gathered(part, {name: parameter.detach() for name, parameter in part.named_parameters()})
    return None if tensors is None else _filled(part, None, tensors)


def gathered_state(like: Decoder, own: OptimizerState) -> OptimizerState:
    """The optimizer's state ``own`` (of all layers) of the whole model on the first rank; ``own`` on the others. ``like``: this rank's
    part of the model."""
    if not _is_part(like):
        return own
    moments: dict[str, Tensor] = {}
    for kind, held in _by_kind(own.moments).items():
        tensors = _gathered(like, held)
        if tensors is None:
            continue
        moments |= {f"{kind}/{name}": tensor.detach() for name, tensor in _filled(like, None, tensors).named_parameters()}
    return OptimizerState(moments, own.updates) if moments else own


def own_state(model: Decoder, whole: OptimizerState) -> OptimizerState:
    """Of the optimizer's state of a whole model what belongs to the part ``model``. Raises ``ValueError`` where it is of another model."""
    if not _is_part(model):
        return whole
    moments: dict[str, Tensor] = {}
    for kind, held in _by_kind(whole.moments).items():
        source = _twin(model, None, model.spans)
        _copy(source, held)
        found = dict(to_huggingface(source))
        target = _twin(model, model.parallel, model.spans)
        for name, tensor in to_huggingface(target):
            tensor.copy_(part_of(target, name, found[name]))
        moments |= {f"{kind}/{name}": parameter.detach() for name, parameter in target.named_parameters()}
    return OptimizerState(moments, whole.updates)


def _is_part(model: Decoder) -> bool:
    return model.cut.size > 1 or model.cut.expert_size > 1


def _by_kind(moments: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        kind, _, name = key.partition("/")
        found.setdefault(kind, {})[name] = tensor
    return found


def _gathered(part: Decoder, own: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """``own`` (of every parameter of ``part``) as whole tensors by Hugging Face name, on the first rank."""
    parallel = part.parallel
    assert parallel is not None
    source = _twin(part, parallel)
    _copy(source, own)
    held = {name: _over_tensor_ranks(part, parallel, name, tensor) for name, tensor in to_huggingface(source)}
    if parallel.tensor.rank:
        return None
    expert, found = parallel.expert, {name: tensor for name, tensor in held.items() if tensor is not None}
    for source_rank in range(1, expert.size):
        cut = Cut(expert_rank=source_rank, expert_size=expert.size)
        for name, shape in parameters(part.shapes):
            # What all ranks hold is there already.
            if is_held(part.shapes, name, cut) and not is_held(part.shapes, name, Cut(expert_size=expert.size)):
                if expert.rank == source_rank:
                    expert.send(found[name], 0, "experts of other ranks").wait()
                elif expert.rank == 0:
                    space = torch.empty(shape, dtype=part.dtype, device=part.device)
                    found[name] = expert.receive(space, source_rank, "experts of other ranks").wait()
    return found if expert.rank == 0 else None


def _over_tensor_ranks(part: Decoder, parallel: ModelParallel, name: str, own: Tensor) -> Tensor | None:
    """The whole tensor on the first tensor-parallel rank."""
    ranks, shape = parallel.tensor, dict(parameters(part.shapes))[name]
    if ranks.size == 1:
        return own
    cuts = [Cut(rank, ranks.size, part.cut.deterministic) for rank in range(ranks.size)]
    slices = [cut_slices(part.shapes, name, shape, cut) for cut in cuts]
    if slices[0] == slices[-1]:
        return own
    sizes = [tuple(s.stop - s.start for s in each) for each in slices]
    longest = max(torch.Size(size).numel() for size in sizes)
    flat = torch.nn.functional.pad(own.reshape(-1), (0, longest - own.numel()))
    parts = ranks.gather(flat, 0, "parts of the model")
    if not parts:
        return None
    whole = own.new_empty(shape)
    for each, size, tensor in zip(slices, sizes, parts, strict=True):
        whole[each] = tensor[: torch.Size(size).numel()].view(size)
    return whole


def _twin(model: Decoder, parallel: ModelParallel | None, spans: Sequence[Span] = ()) -> Decoder:
    """A decoder of all layers, or of ``spans``, with uninitialised numbers."""
    return Decoder(model.shapes, model.kernels, dtype=model.dtype, device=model.device, spans=spans, parallel=parallel)


@torch.no_grad()
def _copy(model: Decoder, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name not in values:
            raise ValueError(f"the state has no tensor '{name}'")
        if values[name].shape != parameter.shape:
            raise ValueError(f"the state's '{name}' is {tuple(values[name].shape)}; the model has {tuple(parameter.shape)}")
        parameter.copy_(values[name])


@torch.no_grad()
def _filled(like: Decoder, parallel: ModelParallel | None, tensors: Mapping[str, Tensor]) -> Decoder:
    found = _twin(like, parallel)
    for name, tensor in to_huggingface(found):
        tensor.copy_(tensors[name])
    return found
