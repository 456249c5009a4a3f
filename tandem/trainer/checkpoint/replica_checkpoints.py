"""Saves, loads and exports the checkpoints of a replica, for every kind of job."""

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.layout.parameters import trained_parameters
from tandem.layout.shard_offsets import whole_offsets
from tandem.model.huggingface.model_folder import read_tensors, save_model
from tandem.model.huggingface.peft_folder import merged_tensors, save_adapter
from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.text.tokenizer import TOKENIZER_FILES
from tandem.trainer.backend import TrainedReplica, TrainedState
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.find import VerifiedCheckpoint, prune
from tandem.trainer.checkpoint.format.manifest import read_manifest
from tandem.trainer.checkpoint.format.shard import CRITIC, REFERENCE, Key, Shard
from tandem.trainer.checkpoint.frozen_state import FrozenState
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.model_state import WEIGHTS
from tandem.trainer.checkpoint.random_states import random_states, restore_random_states
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.checkpoint.tiers.disks_tier import DisksTier, DisksWriter, Node
from tandem.trainer.checkpoint.tiers.folder_tier import FolderTier, LocalTier
from tandem.trainer.checkpoint.tiers.memory_tier import MemoryTier
from tandem.trainer.checkpoint.tiers.tier import CopyTier, Opened, Tier, Written, nearest
from tandem.trainer.checkpoint.write import Committed
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.offload.tensor_file import file_tensor
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.types import RunError, UserError

ADAPTER = "adapter"
"""The name of the exported adapter's folder."""
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""The files that, with the weights, make a checkpoint a Hugging Face folder."""


class SavedBeside(NamedTuple):
    """A replica with its ``guard`` that is saved and loaded with another. ``start``: the folder that it was loaded from."""

    replica: Replica
    guard: GradScaler
    start: Path


class ReplicaCheckpoints:
    """Manages ``checkpoints/step-N`` of the replica that ``state`` has the shards of. Every rank calls every method in the same step.

    ``start``: the folder that the model was loaded from. ``ranks``: a communicator of all ranks that nothing else uses. ``last``: the step
    of the newest checkpoint started or loaded. ``damaged``: why ``load`` skipped checkpoints. ``beside``: replicas
    that are saved and loaded with the other, by name (``CRITIC``, ``DRAFT``); ``reference``: one that follows it, whose weights are saved and loaded too.
    On rank 0, ``on_committed`` is called with each committed step in the writing thread; the
    steps ``in_use`` are not removed. ``memory`` and ``local``, a folder on a disk of this node, have each checkpoint of the folder too, and those
    that ``copy`` takes; with ``node``, every node has a disk of its own for its ranks. ``load`` prefers them to the folder, up to step ``recorded``.
    ``opened``: what was loaded, and from which tier."""

    def __init__(
        self, folder: Path, keep: int, start: Path, state: TrainedState, guard: GradScaler, ranks: Communicator, *, asynchronous: bool = True,
        on_committed: Callable[[int], None] | None = None, in_use: Callable[[], Collection[int]] = tuple, fault_point: FaultPoint = no_fault,
        beside: Mapping[str, SavedBeside] = MappingProxyType({}), reference: FrozenReplica | None = None, memory: Keepers | None = None,
        local: Path | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.state, self._start, self._guard, self._ranks = folder, state, start, guard, ranks
        self._keep, self._in_use = keep, in_use
        self.memory, self.local = memory, local
        self.recorded: int | None = None
        self.node: Node | None = None
        self.opened: Opened | None = None
        self.read_bytes: dict[str, int] = {}
        """Bytes that ``load`` has read on all ranks, by tier: what it verified, whether it was whole or not."""
        self.last: int | None = None
        self.damaged: list[str] = []
        self._beside = {name: (saved, ReplicaState(saved.replica)) for name, saved in beside.items()}
        self._reference = None if reference is None else FrozenState(reference)
        self._writer = Checkpointer(
            folder, keep, ranks, asdict(state.replica.ranks.mesh.shape), asynchronous=asynchronous, on_committed=on_committed, in_use=in_use,
            fault_point=fault_point, staging_folder=state.folder,
        )  # fmt: skip

    def load(self, at_most: int | None = None, check: Callable[[VerifiedCheckpoint], None] = lambda checkpoint: None) -> VerifiedCheckpoint | None:
        """Loads the newest undamaged checkpoint at or before step ``at_most`` after calling ``check`` on it, and returns it; ``None`` if
        there is none. ``damaged`` says why others were skipped."""
        self.damaged = []
        # Recorded steps are repeated from what the run's folder has.
        copies = self._readable() if at_most is None else []
        try:
            return self._load_nearest([*copies, FolderTier("folder", self.folder)], at_most, check)
        finally:
            for tier in copies:
                if isinstance(tier, DisksTier):
                    tier.close()

    def _load_nearest(self, tiers: Sequence[Tier], at_most: int | None, check: Callable[[VerifiedCheckpoint], None]) -> VerifiedCheckpoint | None:
        self.opened = nearest(tiers, self._ranks, at_most, self.damaged.append, self.recorded)
        every = gather_values(self._ranks, [tier.read_bytes for tier in tiers], "the bytes that were read")
        self.read_bytes = {tier.name: sum(sizes) for tier, sizes in zip(tiers, zip(*every, strict=True), strict=True)}
        if self.opened is None:
            return None
        checkpoint, source = self.opened.checkpoint, self.opened.source
        check(checkpoint)
        state = checkpoint.manifest.state
        contents = Contents(checkpoint.folder, checkpoint.manifest, source=source)
        self.state.load(contents, int(state["updates"]))
        _load_counters(self.state.replica, self._guard, state)
        for name, ((replica, guard, _), shards) in self._beside.items():
            if name not in state:
                raise UserError(f"checkpoint '{checkpoint.folder}' has no {name}; it was written by a run without one")
            shards.load(Contents(checkpoint.folder, checkpoint.manifest, name, source), int(state[name]["updates"]))
            _load_counters(replica, guard, state[name])
        if self._reference is not None:
            self._reference.load(Contents(checkpoint.folder, checkpoint.manifest, REFERENCE, source))
        own = contents.own(self._ranks.rank, self._ranks.size)
        if own is not None:
            restore_random_states(own["random"])
        if source is not None:
            source.forget()
        if self.opened.tier == "local" and source is not None:
            # Others may still read what is on the disk of this node.
            self._ranks.barrier("the checkpoint of the local disks")
        if self.opened.tier != "folder":
            # It is none of the folder's.
            return checkpoint
        self.last = checkpoint.step
        if at_most is None and self._ranks.rank == 0:
            # A process that was killed between a commit and the removal of older checkpoints left one too many.
            prune(self.folder, self._keep, {checkpoint.step, *self._in_use()})
        return checkpoint

    def save(
        self, step: int, cursor: Mapping[str, int], span: AbstractContextManager[None] | None = None, beat: Callable[[], None] | None = None
    ) -> float:
        """Starts the checkpoint of ``step`` after the previous one is done; returns the seconds for which training was blocked.

        ``cursor``: the position in the data. ``span`` is entered around the write, in the writing thread. Raises ``RunError`` if this
        checkpoint or the previous one fails."""
        companions: Sequence[Path] = [self._start / name for name in COMPANIONS if (self._start / name).is_file()]
        stall = self._save(step, cursor, companions, span, beat)
        self.last = step
        return stall

    def copy(self, step: int, cursor: Mapping[str, int], tiers: Collection[str], beat: Callable[[], None] | None = None) -> float:
        """Does ``save`` to those of ``tiers`` that there are: the state is no checkpoint of the folder."""
        return self._save(step, cursor, (), None, beat, tiers)

    def _copies(self) -> list[CopyTier]:
        """Returns the tiers before the run's folder as they are written to, the nearest first."""
        copies: list[CopyTier] = []
        if self.memory is not None:
            copies.append(MemoryTier(self.memory, self.folder))
        if self.local is not None:
            copies.append(LocalTier(self.local, self._keep) if self.node is None else DisksWriter(self.local, self._keep, self.node))
        return copies

    def _readable(self) -> list[Tier]:
        """Returns the tiers before the run's folder as they are read, the nearest first."""
        tiers: list[Tier] = [] if self.memory is None else [MemoryTier(self.memory, self.folder)]
        if self.local is not None:
            tiers.append(LocalTier(self.local, self._keep) if self.node is None else DisksTier.of(self.local, self._ranks, self.node))
        return tiers

    def take_written(self) -> list[Written]:
        """Returns what was written since the last call, and to which tiers it was not."""
        return self._writer.take_written()

    @property
    def is_busy(self) -> bool:
        """Whether a write of this rank is in progress."""
        return self._writer.is_busy

    def _save(
        self, step: int, cursor: Mapping[str, int], companions: Sequence[Path], span: AbstractContextManager[None] | None,
        beat: Callable[[], None] | None, only: Collection[str] | None = None,
    ) -> float:  # fmt: skip
        """``only``: the tiers that it is written to; ``None``: all, and the folder."""
        self._writer.wait(beat)
        state: dict[str, Any] = {**self._counters(self.state.replica, self._guard), "cursor": dict(cursor)}
        copies = [tier for tier in self._copies() if only is None or tier.name in only]
        shards = self.state.shards()
        for name, ((replica, guard, _), own) in self._beside.items():
            state[name] = self._counters(replica, guard)
            shards = shards + list(_of(name, own.shards()))
        if self._reference is not None:
            shards = shards + list(_of(REFERENCE, self._reference.shards()))
        return self._writer.save(step, shards, state, {"random": random_states()}, companions, span, copies, only is None)

    def _counters(self, replica: TrainedReplica, guard: GradScaler) -> dict[str, Any]:
        """Returns what a checkpoint holds of ``replica`` besides tensors, over all ranks."""
        balance = replica.model.router_balance
        every = gather_values(self._ranks, {} if balance is None else balance.state(), "router biases")
        biases = {layer: bias for held in every for layer, bias in held.items()}
        return {"updates": replica.optimizer.updates, "guard": guard.state(), "router_bias": biases}

    def take_committed(self) -> Committed | None:
        """Returns the checkpoint committed since the last call, or ``None``. Raises ``RunError`` if the write failed."""
        return self._writer.take_committed()

    def wait(self, beat: Callable[[], None] | None = None) -> None:
        """Waits until no write is in progress and calls ``beat`` meanwhile. Raises ``RunError`` if the write failed."""
        self._writer.wait(beat)

    def close(self) -> None:
        """Waits for a write in progress, ignoring its failure, and stops the thread."""
        with contextlib.suppress(RunError):
            self._writer.wait()
        self._writer.close()

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the model as a Hugging Face folder with weights of ``dtype``, unless it exists. A model that no rank holds whole is read from the
        newest checkpoint, which must be of the current step. An adapter is merged into the weights, and written beside the folder as ``adapter``."""
        self._export(folder, dtype, self.state, self._start)

    def export_critic(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the critic, if there is one, in the way of ``export``."""
        if CRITIC in self._beside:
            critic, state = self._beside[CRITIC]
            self._export(folder, dtype, state, critic.start, CRITIC)

    def state_of(self, name: str) -> ReplicaState | None:
        """Returns the shards of the replica that is saved beside the other as ``name``; ``None`` without one."""
        return self._beside[name][1] if name in self._beside else None

    def _export(self, folder: Path, dtype: torch.dtype, state: TrainedState, start: Path, of: str = "") -> None:
        replica = state.replica
        if not replica.ranks.is_first or folder.exists():
            return
        tensors = state.whole()
        if tensors is None:
            tensors = self.whole_weights(state, of)
        if replica.model.shapes.lora is not None:
            adapter = dict(tensors)
            # The model's folder comes last: where it exists, the adapter is that of the same step.
            shutil.rmtree(folder.with_name(ADAPTER), ignore_errors=True)
            save_adapter(adapter, replica.model.shapes, folder.with_name(ADAPTER), start)
            base = dict(read_tensors(start, stacked=replica.model.shapes.transformers is None))
            tensors = merged_tensors(base, adapter, replica.model.shapes)
        save_model(replica.model, folder, start, tensors=tensors, like=start, dtype=dtype)

    def whole_weights(self, state: TrainedState, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of ``state`` in the newest checkpoint by its Hugging Face name, on this rank alone; in memory, or in unnamed files
        in the folder of ``state``. ``of``: the model beside the actor, as in ``Contents``."""
        assert self.last is not None
        folder = self.folder / f"step-{self.last}"
        contents = Contents(folder, read_manifest(folder)[0], of)
        for name, shape in trained_parameters(state.replica.model.shapes):
            dtype = contents.whole(Key(WEIGHTS, name))[1]
            tensor = torch.empty(shape, dtype=dtype) if state.folder is None else file_tensor(state.folder, shape, dtype)
            contents.read([Shard(Key(WEIGHTS, name), shape, whole_offsets(shape), tensor)])
            yield name, tensor

def _of(model: str, shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yields ``shards`` with the keys of the ``model`` beside the actor."""
    return (shard._replace(key=shard.key.beside(model)) for shard in shards)


def _load_counters(replica: TrainedReplica, guard: GradScaler, state: Mapping[str, Any]) -> None:
    guard.load_state(state["guard"])
    balance = replica.model.router_balance
    if balance is not None:
        balance.load_state({layer: bias for layer, bias in state["router_bias"].items() if int(layer) in balance.biases})
