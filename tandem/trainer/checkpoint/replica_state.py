"""The checkpoint shards of a replica: whole parameters, in memory or in a file, or the runs of them that a rank owns under ZeRO."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.layout.parameters import trained_parameters
from tandem.layout.shard_offsets import ShardOffsets
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import adapter_of, checked_tensors, to_huggingface
from tandem.trainer.checkpoint.codes import Part, StoredCodes, coded_shard
from tandem.trainer.checkpoint.format.shard import Key, Shard
from tandem.trainer.checkpoint.model_state import WEIGHTS, load_pages, load_state, paged_shards, parts_of_replica, run_shards, state_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.optimizers.blockwise import CODES, SCALES, is_coded
from tandem.trainer.parallel.placement import is_tied_copy
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.parallel.zero import Part as Run
from tandem.trainer.parallel.zero import ShardedOptimizer
from tandem.types import UserError


class WeightShard(NamedTuple):
    """A weight shard that is read on demand. ``read`` returns it in the shape of ``offsets``, as a view of the rank's memory or, for paged
    weights, of the file. ``is_frozen``: its values never change, because the parameter has no gradient."""

    name: str
    whole: tuple[int, ...]
    offsets: ShardOffsets
    dtype: torch.dtype
    read: Callable[[], Tensor]
    is_frozen: bool = False


class ReplicaState:
    """The shards that a replica holds of a checkpoint, and of the weights sent to engines. Every rank makes one for the lifetime of the
    replica and calls ``load`` together."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self._parts = replica, parts_of_replica(replica)

    def shards(self) -> list[Shard]:
        """Returns weights and moments as live views."""
        optimizer = self.replica.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return [shard for run in optimizer.parts() for shard in self._of_run(run)]
        if self.replica.paged is not None:
            return paged_shards(self._parts, self.replica.model, self.replica.paged)
        return state_shards(self.replica.model, optimizer)

    def load(self, contents: Contents, updates: int) -> None:
        """Loads weights and moments. Raises ``UserError`` for a checkpoint of another model or optimizer."""
        optimizer = self.replica.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            self._load_runs(contents, optimizer, updates)
        elif self.replica.paged is not None:
            load_pages(contents, self._parts, self.replica.model, self.replica.paged, updates)
        else:
            load_state(contents, self.replica.model, optimizer, updates)

    def _load_runs(self, contents: Contents, optimizer: ShardedOptimizer, updates: int) -> None:
        self._check(contents, optimizer)
        model, plain, coded = self.replica.model, list[Run](), list[Run]()
        stored = StoredCodes(contents, model, self._parts)
        try:
            for run in optimizer.parts(form=True):
                if run.kind == WEIGHTS or (updates and not is_coded(run.kind)):
                    plain.append(run)
                elif updates and run.kind.endswith(CODES):
                    moment = run.kind.removesuffix(CODES)
                    codes, scales = stored.read(moment, run.name, run.first, run.values.numel())
                    coded += [run._replace(values=codes), run._replace(kind=moment + SCALES, values=scales)]
            contents.check([shard for run in plain for shard in self._of_run(run)])
        except UserError as error:
            raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: {error}") from None

        def read(run: Run) -> Run:
            empty = run._replace(values=torch.empty_like(run.values, device=model.device))
            contents.read(self._of_run(empty))
            return empty

        # From file to file, one part is in memory at a time; otherwise everything is read before anything is changed.
        optimizer.load_parts(map(read, plain) if optimizer.paged is not None else [read(run) for run in plain] + coded, updates)

    def weight_shards(self) -> list[WeightShard]:
        """Returns this rank's shards of the weights, without the last pipeline stage's copy of a tied embedding.

        Nothing is read or gathered: under ZeRO 3 each shard lies in the run of elements that the rank owns."""
        model, optimizer = self.replica.model, self.replica.optimizer
        parts = [part for part in self._parts if not is_tied_copy(model, part.parameter)]
        if isinstance(optimizer, ShardedOptimizer) and optimizer.stage == 3:
            runs = [run for run in optimizer.parts(form=True) if run.kind == WEIGHTS]
            return [_shard_of_run(run, shard, partial(optimizer.weight, run.name)) for run in runs for shard in self._of_run(run, parts)]
        paged = None if isinstance(optimizer, ShardedOptimizer) else self.replica.paged
        weight = model.get_parameter if paged is None else paged.weight
        return [
            WeightShard(
                p.name, p.whole, p.offsets, model.dtype, partial(_view, partial(weight, p.parameter), p.first, p.offsets),
                is_frozen=not model.get_parameter(p.parameter).requires_grad,
            )
            for p in parts
        ]

    @property
    def folder(self) -> Path | None:
        """The folder of the paged optimizer's file (``None``: all is in memory)."""
        return None if self.replica.paged is None else self.replica.paged.folder

    def whole(self) -> Iterable[tuple[str, Tensor]] | None:
        """Returns every tensor that training changes by its Hugging Face name in their order, as live views; ``None`` if this rank has only a part."""
        replica = self.replica
        if any(replica.ranks.groups[name].size > 1 for name in ("tensor", "expert", "pipeline")) or replica.shards_weights:
            return None
        if replica.pages_weights:
            return self._paged_weights() if replica.ranks.world.size == 1 else None
        return to_huggingface(replica.model) if replica.model.shapes.lora is None else adapter_of(replica.model).items()

    def _paged_weights(self) -> Iterator[tuple[str, Tensor]]:
        assert self.replica.paged is not None
        held = self.replica.paged.weights()
        for part in self._parts:
            yield part.name, held[part.parameter].view(-1)[part.first : part.first + part.offsets.numel].view(part.offsets.shape)

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the weights of a whole model by Hugging Face name, one tensor in memory at a time. For paged weights and weights sharded by
        ZeRO. Raises ``UserError`` if they are not this model's; nothing is changed then."""
        optimizer, paged = self.replica.optimizer, self.replica.paged

        def put(name: str, first: int, values: Tensor) -> None:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.fill(name, first, values)
            else:
                assert paged is not None
                paged.put(WEIGHTS, name, values, first)

        fill_parts(self.replica.model, self._parts, tensors, put)

    def _of_run(self, run: Run, parts: list[Part] | None = None) -> list[Shard]:
        if is_coded(run.kind):
            return [coded_shard(self.replica.model, run.kind, run.name, run.first, run.values)]
        return run_shards(self._parts if parts is None else parts, run.kind, run.name, run.first, run.values)

    def _check(self, contents: Contents, optimizer: ShardedOptimizer) -> None:
        names = {name for name, _ in trained_parameters(self.replica.model.shapes)}
        stored: Mapping[Key, Sequence[object]] = contents.stored
        for key in stored:
            if key.state not in (WEIGHTS, *optimizer.kinds) or (not is_coded(key.state) and key.name not in names):
                raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: it has '{key}'")


def fill_parts(
    model: Decoder, parts: Sequence[Part], tensors: Iterable[tuple[str, Tensor]], put: Callable[[str, int, Tensor], None]
) -> None:
    """Calls ``put(parameter, first, values)`` with what the ``parts`` of ``model`` have of a whole model's ``tensors``, one in memory at a time.
    Raises ``UserError`` if they are not this model's, before the first call."""
    given = checked_tensors(model, tensors)
    for part in parts:
        put(part.parameter, part.first, given[part.name][part.offsets.slices].reshape(-1))


def _shard_of_run(run: Run, shard: Shard, read: Callable[[], Tensor]) -> WeightShard:
    # The shard is a view of the run's placeholder, so its offset in the placeholder is its offset in the run.
    first = int(shard.tensor.storage_offset() - run.values.storage_offset())
    return WeightShard(shard.key.name, shard.whole, shard.offsets, shard.tensor.dtype, partial(_view, read, first, shard.offsets))


def _view(flat: Callable[[], Tensor], first: int, offsets: ShardOffsets) -> Tensor:
    return flat().detach().view(-1)[first : first + offsets.numel].view(offsets.shape)
