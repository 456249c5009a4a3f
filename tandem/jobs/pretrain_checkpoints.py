"""The checkpoints of a pretraining run: when, of what, and what becomes of them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.config.load import to_mapping
from tandem.config.pretrain import PretrainRecipe
from tandem.jobs.pretrain_records import Records
from tandem.layout.boxes import whole_box
from tandem.layout.shapes import parameters
from tandem.model_registry.open import open_registry
from tandem.model_registry.versions import NewVersion
from tandem.runtime.agreement import gather_values
from tandem.runtime.communicator import Communicator
from tandem.runtime.requests import SignalRequests
from tandem.storage.files import open_storage
from tandem.text.tokenizer import TOKENIZER_FILES
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.find import Found, newest_whole
from tandem.trainer.checkpoint.manifest import read_manifest
from tandem.trainer.checkpoint.model_state import WEIGHTS
from tandem.trainer.checkpoint.random_states import random_states, restore_random_states
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.checkpoint.shard import Key, Shard
from tandem.trainer.checkpoint.trigger import CheckpointTrigger, Due
from tandem.trainer.checkpoint.uploader import Uploader
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.offload.tensor_file import file_tensor
from tandem.trainer.parallel.replica import Replica
from tandem.types import RunError, UserError

RUN_FILES = ("config.yaml", "metrics.jsonl")
"""What else of a run is copied, so that it can go on where its folder is lost."""
REGISTERED = ("train/loss", "actor/grad_norm")
"""Metrics of a step that a version is entered with."""
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)


class RunCheckpoints:
    """``start``: the folder that the model came from. ``ranks``: a communicator of all ranks that nothing else uses. ``last``: the step
    of the newest checkpoint, begun or loaded. Every rank calls every method, in the same step."""

    def __init__(
        self, recipe: PretrainRecipe, directory: Path, start: Path, replica: Replica, guard: GradScaler, ranks: Communicator, records: Records
    ) -> None:
        self._recipe, self._directory, self._start = recipe, directory, start
        self._replica, self._guard, self._ranks, self._records = replica, guard, ranks, records
        self.folder = directory / "checkpoints"
        # Where there is a supervisor, that one says it.
        self.requests = SignalRequests(records.listener.message if records.board is None else None)
        self.last: int | None = None
        self._state = ReplicaState(replica)
        # Not over ``ranks``: they agree in every step, while the thread that writes votes over those.
        self._times = CheckpointTrigger(recipe.checkpoint, replica.ranks.world, self.requests)
        keeps_books = records.journal is not None
        self._uploader = self._make_uploader() if recipe.checkpoint.upload and keeps_books else None
        self._registry = open_registry(recipe.registry, create=True) if recipe.registry.is_on and keeps_books else None
        self._writer = Checkpointer(
            self.folder, recipe.checkpoint.keep, ranks, asdict(replica.ranks.mesh.shape), asynchronous=recipe.checkpoint.asynchronous,
            on_committed=self._uploader.add if self._uploader else None, in_use=self._uploader.in_use if self._uploader else tuple,
            fault_point=records.fault_point, staging_folder=None if replica.paged is None else replica.paged.folder,
        )  # fmt: skip
        self._metrics: dict[str, float] = {}
        self._found: Found | None = None
        self._boundary = 0

    def load(self, at_most: int | None = None) -> int:
        """Take over the newest whole checkpoint, of step ``at_most`` or before; the step it is of, 0 without one. Raises ``RunError`` where a run
        has some and none is whole: to begin again would write over what it has."""
        damaged: list[str] = []
        found = newest_whole(self.folder, self._ranks, at_most, damaged.append)
        if found is None and damaged and at_most is None:
            raise RunError(
                f"no checkpoint of this run is whole ({damaged[0]}); put one back, from a copy or with 'tandem resume NEW_FOLDER --from' what "
                "'checkpoint.upload' was, or start a new run"
            )
        for why in damaged:
            self._records.listener.message(why)
        if found is None:
            return 0
        state = found.manifest.state
        self._check_cursor(found, state["cursor"])
        contents = Contents(found.folder, found.manifest)
        self._state.load(contents, int(state["updates"]))
        self._guard.load_state(state["guard"])
        balance = self._replica.model.router_balance
        if balance is not None:
            balance.load_state({layer: bias for layer, bias in state["router_bias"].items() if int(layer) in balance.biases})
        own = contents.own(self._ranks.rank, self._ranks.size)
        if own is not None:
            restore_random_states(own["random"])
        self.last, self._found = found.step, found
        return found.step

    def journal_loaded(self) -> None:
        """Write down the checkpoint that was loaded, where the death came before that; after the journal is cut to it."""
        found, journal = self._found, self._records.journal
        if found is not None and journal is not None and found.step not in {saved.step for saved in journal.checkpoints()}:
            journal.commit_checkpoint(found.step, found.digest)
            self._register(found.step, found.folder, found.digest)

    def due(self, step: int) -> Due:
        """What the state after ``step`` steps asks for; what was committed meanwhile is journalled."""
        self._collect()
        return self._times.due(step)

    def save(self, step: int, metrics: Mapping[str, float], span: AbstractContextManager[None]) -> float:
        """Begin the checkpoint of ``step``; the seconds that training stood still for. The rows before it are to be on the disk: no
        resume writes them again. ``metrics``: of the step before, for the registry. ``span`` stands
        around the writing, in its thread."""
        # What was under way is journalled before its place is taken.
        self._writer.wait(self._beat)
        self._collect()
        balance = self._replica.model.router_balance
        every = gather_values(self._ranks, {} if balance is None else balance.state(), "the biases of all routers")
        state: dict[str, Any] = {
            "updates": self._replica.optimizer.updates, "guard": self._guard.state(),
            "router_bias": {layer: bias for held in every for layer, bias in held.items()},
            "cursor": {"steps": step, "sequences": step * self._recipe.data.global_batch_size},
        }  # fmt: skip
        companions: Sequence[Path] = [self._start / name for name in COMPANIONS if (self._start / name).is_file()]
        self._metrics = {name: value for name, value in metrics.items() if name in REGISTERED}
        self._boundary = self._records.journal.last_transition() if self._records.journal is not None else 0
        stall = self._writer.save(step, self._state.shards(), state, {"random": random_states()}, companions, span)
        self.last = step
        self._times.saved()
        return stall

    def whole_weights(self, into: Path | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the newest checkpoint by its Hugging Face name, on this rank alone; in memory, or in unnamed files of ``into``."""
        assert self.last is not None
        folder = self.folder / f"step-{self.last}"
        contents = Contents(folder, read_manifest(folder)[0])
        for name, shape in parameters(self._replica.model.shapes):
            dtype = contents.whole(Key(WEIGHTS, name))[1]
            tensor = torch.empty(shape, dtype=dtype) if into is None else file_tensor(into, shape, dtype)
            contents.read([Shard(Key(WEIGHTS, name), shape, whole_box(shape), tensor)])
            yield name, tensor

    def paged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Where weights are paged: every tensor by its Hugging Face name, as views of a file: on one process of the pager's, on ranks of one
        that the newest checkpoint is read to."""
        assert self._replica.paged is not None
        return self._state.weights() if self._ranks.size == 1 else self.whole_weights(self._replica.paged.folder)

    def finish(self) -> None:
        """Wait for what is under way, copies too. Raises ``RunError`` where it fails."""
        self._writer.wait(self._beat)
        self._collect()
        if self._uploader is not None:
            self._uploader.finish(self._beat)

    def close(self) -> None:
        """End what is under way; after a failure elsewhere it is let finish as far as it comes."""
        with contextlib.suppress(RunError):
            self._writer.wait()
            self._collect()
        self._writer.close()
        if self._uploader is not None:
            self._uploader.close()
        if self._registry is not None:
            self._registry.close()

    def _beat(self) -> None:
        if self._records.board is not None:
            self._records.board.beat()

    def _make_uploader(self) -> Uploader:
        storage = open_storage(self._recipe.checkpoint.upload, create=True)
        companions = [self._directory / name for name in RUN_FILES]
        return Uploader(storage, self.folder, self._recipe.checkpoint.keep, companions, self._records.listener.message)

    def _collect(self) -> None:
        done, journal = self._writer.take_committed(), self._records.journal
        if done is not None and journal is not None:
            journal.commit_checkpoint(done.step, done.digest, self._boundary)
            self._records.timings["checkpoint_write"] = done.write_s
            self._register(done.step, done.folder, done.digest)

    def _register(self, step: int, folder: Path, digest: str) -> None:
        """Enter a committed checkpoint in the registry. A registry that fails costs a line, and no training."""
        journal, recipe = self._records.journal, self._recipe
        if self._registry is None or journal is None:
            return
        held_out = [result["loss"] for at, kind, result in journal.evaluations() if kind == "held_out" and at <= step]
        entry = NewVersion(
            recipe.registry.name or self._directory.name, str(folder.resolve()), digest, step, str(self._directory.resolve()), to_mapping(recipe),
            journal.get("data", {}), recipe.model.path or "", self._metrics | ({"held_out/loss": held_out[-1]} if held_out else {}),
        )  # fmt: skip
        try:
            self._registry.register(entry)
        except (RunError, UserError) as error:
            self._records.listener.message(f"the checkpoint of step {step} is not entered in the registry: {error}")

    def _check_cursor(self, found: Found, cursor: Mapping[str, int]) -> None:
        per_step = self._recipe.data.global_batch_size
        if cursor["sequences"] != found.step * per_step:
            raise UserError(
                f"'data.global_batch_size' is {per_step}; this run has seen {cursor['sequences']} sequences in {found.step} steps, and would "
                "repeat or leave out some: set it back"
            )
