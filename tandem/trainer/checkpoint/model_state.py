"""Maps a decoder and its optimizer to checkpoint shards by Hugging Face name, and back.

The decoder stacks matrices (q, k and v; gate and up; the experts) and may hold only one rank's shard of them. Checkpoint shards are parts
of the whole model's tensors, so that any other mesh can read them.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tandem.layout.parameters import parameters, trained_parameters
from tandem.layout.shard_offsets import ShardOffsets
from tandem.layout.sharding import shard_slices
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import adapter_of, to_huggingface
from tandem.trainer.checkpoint.codes import Part, StoredCodes, coded_shard
from tandem.trainer.checkpoint.format.shard import Key, Shard, flat_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.optimizers.adamw import MOMENTS, Optimizer, OptimizerState
from tandem.trainer.optimizers.adamw_paged import PagedAdamW
from tandem.trainer.optimizers.blockwise import CODES, SCALES, is_coded
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.types import UserError

WEIGHTS = "weights"


def parts_of(decoder: Decoder) -> list[Part]:
    """Returns where the decoder's parameters hold the tensors of the whole model that training changes, in the order of
    ``layout.shapes.trained_parameters``: all, or with an adapter only the adapter's."""
    shapes = dict(trained_parameters(decoder.shapes))
    memory = sorted((p.data_ptr(), p.numel() * p.element_size(), name) for name, p in decoder.named_parameters())
    parts = []
    for name, view in to_huggingface(decoder) if decoder.shapes.lora is None else adapter_of(decoder).items():
        start, _, owner = next(entry for entry in reversed(memory) if entry[0] <= view.data_ptr())
        assert view.is_contiguous()
        slices = shard_slices(decoder.shapes, name, shapes[name], decoder.shard_spec)
        offsets = ShardOffsets(tuple(s.start for s in slices), tuple(s.stop for s in slices))
        parts.append(Part(owner, (view.data_ptr() - start) // view.element_size(), name, shapes[name], offsets))
    return parts


def parts_of_replica(replica: Replica | FrozenReplica) -> list[Part]:
    """Returns ``parts_of`` the replica's decoder, also where its parameters are sharded."""
    with replica.addresses():
        # Sharded parameters have no memory outside this context.
        return parts_of(replica.model)


def state_shards(decoder: Decoder, optimizer: Optimizer) -> list[Shard]:
    """Returns trained weights and moments as live views."""
    parts = parts_of(decoder)
    held = {WEIGHTS: {name: p.detach() for name, p in decoder.named_parameters()}, **_by_kind(optimizer.state().moments)}
    return [shard for kind, tensors in held.items() for shard in named_shards(parts, kind, tensors, decoder)]


def paged_shards(parts: list[Part], decoder: Decoder, optimizer: PagedAdamW) -> list[Shard]:
    """Returns ``state_shards`` for state in a file. ``parts``: of the decoder, whose parameters have no memory at this point."""
    held = {WEIGHTS: optimizer.weights(), **_by_kind(optimizer.state().moments)}
    return [shard for kind, tensors in held.items() for shard in named_shards(parts, kind, tensors, decoder)]


def load_pages(contents: Contents, parts: list[Part], decoder: Decoder, optimizer: PagedAdamW, updates: int) -> None:
    """Does ``load_state`` into a file, with one parameter in memory at a time."""
    shapes, kinds = {name: p.shape for name, p in decoder.named_parameters()}, (WEIGHTS, *MOMENTS) if updates else (WEIGHTS,)
    names = {name for name, _ in parameters(decoder.shapes)}
    strange = [key for key in contents.held if key.name not in names or key.state not in kinds]
    if strange:
        raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: it has '{strange[0]}'")
    dtype = decoder.dtype
    blank = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    try:
        contents.check([shard for kind in kinds for shard in named_shards(parts, kind, blank, decoder)])
    except UserError as error:
        raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: {error}") from None
    optimizer.load_state(OptimizerState({}, 0))
    for kind in kinds:
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=dtype)
            contents.read(list(named_shards(parts, kind, {name: tensor}, decoder)))
            optimizer.put(kind, name, tensor)
    optimizer.updates = updates


def named_shards(parts: list[Part], kind: str, tensors: Mapping[str, Tensor], decoder: Decoder) -> Iterator[Shard]:
    """Yields the shards of ``kind`` for every decoder parameter that ``tensors`` contains."""
    if is_coded(kind):
        yield from (coded_shard(decoder, kind, name, 0, tensor) for name, tensor in tensors.items())
        return
    for part in parts:
        tensor = tensors.get(part.parameter)
        if tensor is not None:
            run = tensor.view(-1)[part.first : part.first + part.offsets.numel]
            yield Shard(Key(kind, part.name), part.whole, part.offsets, run.view(part.offsets.shape))


def run_shards(parts: list[Part], kind: str, parameter: str, first: int, values: Tensor) -> list[Shard]:
    """Returns the shards of a rank that holds only a run of a parameter's memory, as under ZeRO. ``values[n]``: the elements of
    ``parameter`` from ``first`` on."""
    shards = []
    for part in parts:
        start, stop = max(first, part.first), min(first + values.numel(), part.first + part.offsets.numel)
        if part.parameter == parameter and start < stop:
            shards += flat_shards(Key(kind, part.name), part.whole, part.offsets, start - part.first, values[start - first : stop - first])
    return shards


def load_state(contents: Contents, decoder: Decoder, optimizer: Optimizer, updates: int) -> None:
    """Loads the weights and moments of which this rank holds a part. Raises ``UserError`` for a checkpoint of another model; nothing is
    changed then."""
    parts = parts_of(decoder)
    trained, names = {part.parameter for part in parts}, {name for name, _ in trained_parameters(decoder.shapes)}
    for key in contents.held:
        if key.state == WEIGHTS and key.name not in names:
            raise UserError(f"'{contents.folder}' is of another model: it has '{key}'")
    # Read into host memory, so that a GPU need not hold the state twice.
    weights = {name: torch.empty_like(p, device="cpu") for name, p in decoder.named_parameters() if name in trained}
    shards = list(named_shards(parts, WEIGHTS, weights, decoder))
    moments: dict[str, Tensor] = {}
    for kind in sorted({key.state for key in contents.held if not is_coded(key.state)} - {WEIGHTS}):
        tensors = {}
        for name, parameter in decoder.named_parameters():
            if any(Key(kind, part.name) in contents.stored for part in parts if part.parameter == name):
                tensors[name] = torch.empty_like(parameter, device="cpu")
        shards += named_shards(parts, kind, tensors, decoder)
        moments |= {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
    before = optimizer.state()
    try:
        contents.read(shards)
        stored = StoredCodes(contents, decoder, parts)
        for moment, name in stored.moments:
            moments[f"{moment}{CODES}/{name}"], moments[f"{moment}{SCALES}/{name}"] = stored.read(moment, name)
        optimizer.load_state(OptimizerState(moments, updates))
    except (ValueError, UserError) as error:
        optimizer.load_state(before)
        raise UserError(f"checkpoint '{contents.folder}' is of another model: {error}") from None
    with torch.no_grad():
        for name, weight in weights.items():
            decoder.get_parameter(name).copy_(weight)


def _by_kind(moments: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    by_kind: dict[str, dict[str, Tensor]] = {}
    for label, tensor in moments.items():
        kind, _, name = label.partition("/")
        by_kind.setdefault(kind, {})[name] = tensor
    return by_kind
