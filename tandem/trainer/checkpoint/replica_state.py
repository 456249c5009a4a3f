"""The shards of a replica: whole parameters, in memory or in a file, or the runs of them that ZeRO leaves to a rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.layout.shapes import parameters
from tandem.layout.shard_offsets import ShardOffsets
from tandem.model.huggingface.model_folder import checked_tensors
from tandem.trainer.checkpoint.codes import Part, StoredCodes, coded_shard
from tandem.trainer.checkpoint.model_state import WEIGHTS, load_pages, load_state, paged_shards, parts_of, run_shards, state_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.shard import Key, Shard
from tandem.trainer.optimizers.blockwise import CODES, SCALES, is_coded
from tandem.trainer.parallel.placement import is_tied_copy
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.parallel.zero import Part as Run
from tandem.trainer.parallel.zero import ShardedOptimizer
from tandem.types import UserError


class WeightShard(NamedTuple):
    """A shard of the weights that is looked up when it is needed: ``read`` returns it in the shape of ``box``, as a view of the rank's own
    memory or, where weights are paged, of the file."""

    name: str
    whole: tuple[int, ...]
    box: ShardOffsets
    dtype: torch.dtype
    read: Callable[[], Tensor]


class ReplicaState:
    """What a replica holds of a checkpoint, and of the weights that go to engines. Every rank of it makes one, for as long as it has the
    replica, and calls ``load`` together."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        with replica.addresses():
            # Where weights are cut, a parameter has no memory outside.
            self._parts: list[Part] = parts_of(replica.model)

    def shards(self) -> list[Shard]:
        """Live views of weights and moments."""
        optimizer = self.replica.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return [shard for run in optimizer.parts() for shard in self._of_run(run)]
        if self.replica.paged is not None:
            return paged_shards(self._parts, self.replica.model, self.replica.paged)
        return state_shards(self.replica.model, optimizer)

    def load(self, contents: Contents, updates: int) -> None:
        """Take over weights and moments. Raises ``UserError`` for a checkpoint of another model or optimizer."""
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
            found = run._replace(values=torch.empty_like(run.values, device=model.device))
            contents.read(self._of_run(found))
            return found

        # Read from a file to a file a part at a time; else all is read before the first is changed.
        optimizer.load_parts(map(read, plain) if optimizer.paged is not None else [read(run) for run in plain] + coded, updates)

    def weight_shards(self) -> list[WeightShard]:
        """This rank's part of the weights, without that copy of a tied embedding which the last stage of a pipeline has. Nothing is read
        or gathered: where ZeRO cuts the weights, each shard lies in the run of numbers that the rank owns."""
        model, optimizer = self.replica.model, self.replica.optimizer
        parts = [part for part in self._parts if not is_tied_copy(model, part.parameter)]
        if isinstance(optimizer, ShardedOptimizer) and optimizer.stage == 3:
            runs = [run for run in optimizer.parts(form=True) if run.kind == WEIGHTS]
            return [_shard_of_run(run, shard, partial(optimizer.weight, run.name)) for run in runs for shard in self._of_run(run, parts)]
        paged = None if isinstance(optimizer, ShardedOptimizer) else self.replica.paged
        weight = model.get_parameter if paged is None else paged.weight
        return [
            WeightShard(p.name, p.whole, p.box, model.dtype, partial(_view, partial(weight, p.parameter), p.first, p.box)) for p in parts
        ]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Where weights are paged on one process: every tensor by its Hugging Face name, in their order, as live views."""
        assert self.replica.paged is not None
        held = self.replica.paged.weights()
        for part in self._parts:
            yield part.name, held[part.parameter].view(-1)[part.first : part.first + part.box.numel].view(part.box.shape)

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes over the weights of a whole model by Hugging Face name, one in memory at a time: where they are paged, or cut by ZeRO. Raises
        ``UserError`` where they are not the model's, and has changed nothing then."""
        given, optimizer = checked_tensors(self.replica.model, tensors), self.replica.optimizer
        for part in self._parts:
            values = given[part.name][part.box.slices].reshape(-1)
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.fill(part.parameter, part.first, values)
            else:
                assert self.replica.paged is not None
                self.replica.paged.put(WEIGHTS, part.parameter, values, part.first)

    def _of_run(self, run: Run, parts: list[Part] | None = None) -> list[Shard]:
        if is_coded(run.kind):
            return [coded_shard(self.replica.model, run.kind, run.name, run.first, run.values)]
        return run_shards(self._parts if parts is None else parts, run.kind, run.name, run.first, run.values)

    def _check(self, contents: Contents, optimizer: ShardedOptimizer) -> None:
        names = {name for name, _ in parameters(self.replica.model.shapes)}
        found: Mapping[Key, Sequence[object]] = contents.stored
        for key in found:
            if key.state not in (WEIGHTS, *optimizer.kinds) or (not is_coded(key.state) and key.name not in names):
                raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: it has '{key}'")


def _shard_of_run(run: Run, shard: Shard, read: Callable[[], Tensor]) -> WeightShard:
    # The shard is a view of the run's placeholder: its offset there is that in the run.
    first = int(shard.tensor.storage_offset() - run.values.storage_offset())
    return WeightShard(shard.key.name, shard.whole, shard.box, shard.tensor.dtype, partial(_view, read, first, shard.box))


def _view(flat: Callable[[], Tensor], first: int, box: ShardOffsets) -> Tensor:
    return flat().detach().view(-1)[first : first + box.numel].view(box.shape)
