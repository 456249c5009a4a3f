"""The shards of a replica: whole parameters, in memory or in a file, or the runs of them that ZeRO leaves to a rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tandem.layout.shapes import parameters
from tandem.model.huggingface import checked_tensors
from tandem.trainer.adamw_paged import PagedAdamW
from tandem.trainer.checkpoint.model_state import WEIGHTS, Part, load_pages, load_state, paged_shards, parts_of, run_shards, state_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.shard import Key, Shard
from tandem.trainer.pages import MOMENTS
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.zero import Part as Run
from tandem.trainer.zero import ShardedOptimizer
from tandem.types import UserError


class ReplicaState:
    """What of a checkpoint a replica holds. Every rank of it makes one, and calls ``load`` together."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        with replica.whole():
            # Where weights are cut, a parameter has no memory outside.
            self._parts: list[Part] = parts_of(replica.model)

    def shards(self) -> list[Shard]:
        """Live views of weights and moments."""
        optimizer = self._replica.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return [shard for run in optimizer.parts() for shard in self._of_run(run)]
        if isinstance(optimizer, PagedAdamW):
            return paged_shards(self._parts, self._replica.model, optimizer)
        return state_shards(self._replica.model, optimizer)

    def load(self, contents: Contents, updates: int) -> None:
        """Take over weights and moments. Raises ``UserError`` for a checkpoint of another model or optimizer."""
        optimizer = self._replica.optimizer
        if isinstance(optimizer, PagedAdamW):
            load_pages(contents, self._parts, self._replica.model, optimizer, updates)
            return
        if not isinstance(optimizer, ShardedOptimizer):
            load_state(contents, self._replica.model, optimizer, updates)
            return
        self._check(contents)
        kinds = (WEIGHTS, *MOMENTS) if updates else (WEIGHTS,)
        runs = [
            Run(kind, run.name, run.first, torch.empty_like(run.values))
            for run in list(optimizer.parts())
            if run.kind == WEIGHTS
            for kind in kinds
        ]
        try:
            contents.read([shard for run in runs for shard in self._of_run(run)])
        except UserError as error:
            raise UserError(f"checkpoint '{contents.folder}' is of another model: {error}") from None
        optimizer.load_parts(runs, updates)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Where weights are paged: every tensor by its Hugging Face name, in their order, as live views."""
        assert self._replica.paged is not None
        held = self._replica.paged.weights()
        for part in self._parts:
            yield part.name, held[part.parameter].view(-1)[part.first : part.first + part.box.numel].view(part.box.shape)

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Where weights are paged: take over those of a whole model by Hugging Face name, one in memory at a time. Raises ``UserError``
        where they are not the model's, and has changed nothing then."""
        assert self._replica.paged is not None
        given = checked_tensors(self._replica.model, tensors)
        for part in self._parts:
            self._replica.paged.put(WEIGHTS, part.parameter, given[part.name], part.first)

    def _of_run(self, run: Run) -> list[Shard]:
        return run_shards(self._parts, run.kind, run.name, run.first, run.values)

    def _check(self, contents: Contents) -> None:
        names = {name for name, _ in parameters(self._replica.model.shapes)}
        found: Mapping[Key, Sequence[object]] = contents.stored
        for key in found:
            if key.name not in names or key.state not in (WEIGHTS, *MOMENTS):
                raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: it has '{key}', which ZeRO does not read")
