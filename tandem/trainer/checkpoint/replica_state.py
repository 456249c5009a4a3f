"""The shards of a replica: whole parameters, in memory or in a file, or the runs of them that ZeRO leaves to a rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tandem.layout.shapes import parameters
from tandem.model.huggingface import checked_tensors
from tandem.trainer.checkpoint.codes import Part, StoredCodes, coded_shard
from tandem.trainer.checkpoint.model_state import WEIGHTS, load_pages, load_state, paged_shards, parts_of, run_shards, state_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.shard import Key, Shard
from tandem.trainer.optimizers.blockwise import CODES, SCALES, is_coded
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.parallel.zero import Part as Run
from tandem.trainer.parallel.zero import ShardedOptimizer
from tandem.types import UserError


class ReplicaState:
    """What of a checkpoint a replica holds. Every rank of it makes one, and calls ``load`` together."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        with replica.addresses():
            # Where weights are cut, a parameter has no memory outside.
            self._parts: list[Part] = parts_of(replica.model)

    def shards(self) -> list[Shard]:
        """Live views of weights and moments."""
        optimizer = self._replica.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return [shard for run in optimizer.parts() for shard in self._of_run(run)]
        if self._replica.paged is not None:
            return paged_shards(self._parts, self._replica.model, self._replica.paged)
        return state_shards(self._replica.model, optimizer)

    def load(self, contents: Contents, updates: int) -> None:
        """Take over weights and moments. Raises ``UserError`` for a checkpoint of another model or optimizer."""
        optimizer = self._replica.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            self._load_runs(contents, optimizer, updates)
        elif self._replica.paged is not None:
            load_pages(contents, self._parts, self._replica.model, self._replica.paged, updates)
        else:
            load_state(contents, self._replica.model, optimizer, updates)

    def _load_runs(self, contents: Contents, optimizer: ShardedOptimizer, updates: int) -> None:
        self._check(contents, optimizer)
        model, plain, coded = self._replica.model, list[Run](), list[Run]()
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

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Where weights are paged on one process: every tensor by its Hugging Face name, in their order, as live views."""
        assert self._replica.paged is not None
        held = self._replica.paged.weights()
        for part in self._parts:
            yield part.name, held[part.parameter].view(-1)[part.first : part.first + part.box.numel].view(part.box.shape)

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Where weights are paged: take over those of a whole model by Hugging Face name, one in memory at a time. Raises ``UserError``
        where they are not the model's, and has changed nothing then."""
        given, optimizer = checked_tensors(self._replica.model, tensors), self._replica.optimizer
        for part in self._parts:
            values = given[part.name][part.box.slices].reshape(-1)
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.fill(part.parameter, part.first, values)
            else:
                assert self._replica.paged is not None
                self._replica.paged.put(WEIGHTS, part.parameter, values, part.first)

    def _of_run(self, run: Run) -> list[Shard]:
        if is_coded(run.kind):
            return [coded_shard(self._replica.model, run.kind, run.name, run.first, run.values)]
        return run_shards(self._parts, run.kind, run.name, run.first, run.values)

    def _check(self, contents: Contents, optimizer: ShardedOptimizer) -> None:
        names = {name for name, _ in parameters(self._replica.model.shapes)}
        found: Mapping[Key, Sequence[object]] = contents.stored
        for key in found:
            if key.state not in (WEIGHTS, *optimizer.kinds) or (not is_coded(key.state) and key.name not in names):
                raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: it has '{key}'")
