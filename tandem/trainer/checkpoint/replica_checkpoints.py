"""The checkpoints of a replica: what they hold, how they are taken over, and what was committed meanwhile. The same for every job."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.layout.shapes import parameters
from tandem.layout.shard_offsets import whole_offsets
from tandem.model.huggingface.model_folder import save_model
from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.text.tokenizer import TOKENIZER_FILES
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.find import Found, newest_whole, prune
from tandem.trainer.checkpoint.manifest import read_manifest
from tandem.trainer.checkpoint.model_state import WEIGHTS
from tandem.trainer.checkpoint.random_states import random_states, restore_random_states
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.checkpoint.shard import Key, Shard
from tandem.trainer.checkpoint.write import Committed
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.offload.tensor_file import file_tensor
from tandem.trainer.parallel.replica import Replica
from tandem.types import RunError

COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""What makes a checkpoint a Hugging Face folder, besides the weights."""


class ReplicaCheckpoints:
    """``checkpoints/step-N`` of ``replica``. ``start``: the folder that the model came from. ``ranks``: a communicator of all ranks that
    nothing else uses. Every rank calls every method, in the same step.

    ``last``: the step of the newest checkpoint, begun or loaded. ``state``: what they hold of the replica. ``damaged``: why ``load`` passed
    checkpoints over. ``on_committed`` hears, on rank 0, of each step in the thread that writes; steps ``in_use`` are not removed."""

    def __init__(
        self, folder: Path, keep: int, start: Path, replica: Replica, guard: GradScaler, ranks: Communicator, *, asynchronous: bool = True,
        on_committed: Callable[[int], None] | None = None, in_use: Callable[[], Collection[int]] = tuple, fault_point: FaultPoint = no_fault,
    ) -> None:  # fmt: skip
        self.folder, self._start, self._replica, self._guard, self._ranks = folder, start, replica, guard, ranks
        self._keep, self._in_use = keep, in_use
        self.last: int | None = None
        self.damaged: list[str] = []
        self.state = ReplicaState(replica)
        self._writer = Checkpointer(
            folder, keep, ranks, asdict(replica.ranks.mesh.shape), asynchronous=asynchronous, on_committed=on_committed, in_use=in_use,
            fault_point=fault_point, staging_folder=None if replica.paged is None else replica.paged.folder,
        )  # fmt: skip

    def load(self, at_most: int | None = None, check: Callable[[Found], None] = lambda found: None) -> Found | None:
        """Loads the newest whole checkpoint, of step ``at_most`` or before, after ``check`` of it. ``damaged`` says why others were passed over."""
        self.damaged = []
        found = newest_whole(self.folder, self._ranks, at_most, self.damaged.append)
        if found is None:
            return None
        check(found)
        state = found.manifest.state
        contents = Contents(found.folder, found.manifest)
        self.state.load(contents, int(state["updates"]))
        self._guard.load_state(state["guard"])
        balance = self._replica.model.router_balance
        if balance is not None:
            balance.load_state({layer: bias for layer, bias in state["router_bias"].items() if int(layer) in balance.biases})
        own = contents.own(self._ranks.rank, self._ranks.size)
        if own is not None:
            restore_random_states(own["random"])
        self.last = found.step
        if at_most is None and self._ranks.rank == 0:
            # A death between the commit of this checkpoint and the removal of older ones left one too many.
            prune(self.folder, self._keep, {found.step, *self._in_use()})
        return found

    def save(
        self, step: int, cursor: Mapping[str, int], span: AbstractContextManager[None] | None = None, beat: Callable[[], None] | None = None
    ) -> float:
        """Begin the checkpoint of ``step``, after the one before; the seconds that training stood still for. ``cursor``: where the data is.
        ``span`` is entered around the writing, in its thread. Raises ``RunError`` if this checkpoint or the one before fails."""
        self._writer.wait(beat)
        balance = self._replica.model.router_balance
        every = gather_values(self._ranks, {} if balance is None else balance.state(), "the biases of all routers")
        state: dict[str, Any] = {
            "updates": self._replica.optimizer.updates, "guard": self._guard.state(),
            "router_bias": {layer: bias for held in every for layer, bias in held.items()}, "cursor": dict(cursor),
        }  # fmt: skip
        companions: Sequence[Path] = [self._start / name for name in COMPANIONS if (self._start / name).is_file()]
        stall = self._writer.save(step, self.state.shards(), state, {"random": random_states()}, companions, span)
        self.last = step
        return stall

    def take_committed(self) -> Committed | None:
        """The checkpoint that was committed since the last call, if one was. Raises ``RunError`` if it failed."""
        return self._writer.take_committed()

    def wait(self, beat: Callable[[], None] | None = None) -> None:
        """Until nothing is under way; ``beat`` is called every second. Raises ``RunError`` if it failed."""
        self._writer.wait(beat)

    def close(self) -> None:
        """End what is under way; after a failure elsewhere it may finish as far as it can."""
        with contextlib.suppress(RunError):
            self._writer.wait()
        self._writer.close()

    def export(self, folder: Path) -> None:
        """The model as a Hugging Face folder, once. A model that no rank holds whole is read from the newest checkpoint, which is of now."""
        replica = self._replica
        if not replica.ranks.is_first or folder.exists():
            return
        is_cut = any(replica.ranks.groups[name].size > 1 for name in ("tensor", "expert", "pipeline"))
        tensors = None
        if replica.pages_weights:
            tensors = self._paged_weights()
        elif is_cut or replica.cuts_weights:
            tensors = self.whole_weights()
        save_model(replica.model, folder, self._start, tensors=tensors)

    def whole_weights(self, into: Path | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the newest checkpoint by its Hugging Face name, on this rank alone; in memory, or in unnamed files of ``into``."""
        assert self.last is not None
        folder = self.folder / f"step-{self.last}"
        contents = Contents(folder, read_manifest(folder)[0])
        for name, shape in parameters(self._replica.model.shapes):
            dtype = contents.whole(Key(WEIGHTS, name))[1]
            tensor = torch.empty(shape, dtype=dtype) if into is None else file_tensor(into, shape, dtype)
            contents.read([Shard(Key(WEIGHTS, name), shape, whole_offsets(shape), tensor)])
            yield name, tensor

    def _paged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its Hugging Face name as views of a file: the pager's on one process, on ranks one that the newest checkpoint is
        read to."""
        assert self._replica.paged is not None
        return self.state.weights() if self._ranks.size == 1 else self.whole_weights(self._replica.paged.folder)
