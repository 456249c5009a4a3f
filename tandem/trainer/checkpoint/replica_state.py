"""The shards of a replica: whole parameters, in memory or in a file, or the runs of them that ZeRO leaves to a rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tandem.layout.shapes import parameters
from tandem.model.huggingface import checked_tensors
from tandem.trainer.adamw_paged import PagedAdamW
from tandem.trainer.blockwise import CODES, SCALES, is_coded
from tandem.trainer.checkpoint.codes import Part, StoredCodes, coded_shard
from tandem.trainer.checkpoint.model_state import WEIGHTS, load_pages, load_state, paged_shards, parts_of, run_shards, state_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.shard import Key, Shard
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
        self._check(contents, optimizer)
        model, plain, coded = self._replica.model, list[Run](), list[Run]()
        stored, device = StoredCodes(contents, model, self._parts), next(model.parameters()).device
        try:
            for run in optimizer.parts(form=True):
                if run.kind == WEIGHTS or (updates and not is_coded(run.kind)):
                    plain.append(run._replace(values=torch.empty_like(run.values, device=device)))
                elif updates and run.kind.endswith(CODES):
                    moment = run.kind.removesuffix(CODES)
                    codes, scales = stored.read(moment, run.name, run.first, run.values.numel())
                    coded += [run._replace(values=codes), run._replace(kind=moment + SCALES, values=scales)]
            contents.read([shard for run in plain for shard in self._of_run(run)])
        except UserError as error:
            raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: {error}") from None
        optimizer.load_parts(plain + coded, updates)

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
        if is_coded(run.kind):
            return [coded_shard(self._replica.model, run.kind, run.name, run.first, run.values)]
        return run_shards(self._parts, run.kind, run.name, run.first, run.values)

    def _check(self, contents: Contents, optimizer: ShardedOptimizer) -> None:
        names = {name for name, _ in parameters(self._replica.model.shapes)}
        found: Mapping[Key, Sequence[object]] = contents.stored
        for key in found:
            if key.state not in (WEIGHTS, *optimizer.kinds) or (not is_coded(key.state) and key.name not in names):
                raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: it has '{key}'")
