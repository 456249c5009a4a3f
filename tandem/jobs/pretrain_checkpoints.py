"""The checkpoints of a pretraining run: when, of what, and what becomes of them."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.config.load import to_mapping
from tandem.config.pretrain import PretrainRecipe
from tandem.model.decoder import Decoder
from tandem.model_registry.open import open_registry
from tandem.model_registry.versions import NewVersion
from tandem.runtime.communicator import Communicator
from tandem.runtime.journal import Journal
from tandem.runtime.requests import SignalRequests
from tandem.storage.files import open_storage
from tandem.text.tokenizer import TOKENIZER_FILES
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.due import Due, SaveTimes
from tandem.trainer.checkpoint.find import Found, newest_whole
from tandem.trainer.checkpoint.model_state import load_state, state_shards
from tandem.trainer.checkpoint.random_states import random_states, restore_random_states
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.uploader import Uploader
from tandem.trainer.guard import StepGuard
from tandem.trainer.optimizer import Optimizer
from tandem.types import RunError, UserError

RUN_FILES = ("config.yaml", "metrics.jsonl")
"""What else of a run is copied, so that it can go on where its folder is lost."""
REGISTERED = ("train/loss", "actor/grad_norm")
"""Metrics of a step that a version is entered with."""
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)


@dataclass
class RunCheckpoints:
    """``ranks``: a communicator of all ranks that nothing else uses. ``journal``: of the rank that keeps it. ``last``: the step of the
    newest checkpoint, begun or loaded."""

    recipe: PretrainRecipe
    directory: Path
    start: Path
    model: Decoder
    optimizer: Optimizer
    guard: StepGuard
    ranks: Communicator
    mesh: Mapping[str, int]
    journal: Journal | None
    on_message: Callable[[str], None] | None = None
    requests: SignalRequests = field(default_factory=SignalRequests)

    def __post_init__(self) -> None:
        config = self.recipe.checkpoint
        self.folder = self.directory / "checkpoints"
        self._times = SaveTimes(config, self.ranks, self.requests)
        self._uploader = self._make_uploader() if config.upload and self.ranks.rank == 0 else None
        self._writer = Checkpointer(
            self.folder, config.keep, self.ranks, self.mesh, asynchronous=config.asynchronous,
            on_committed=self._uploader.add if self._uploader else None, in_use=self._uploader.in_use if self._uploader else tuple,
        )  # fmt: skip
        self._registry = open_registry(self.recipe.registry, create=True) if self.recipe.registry.is_on and self.journal is not None else None
        self._metrics: dict[str, float] = {}
        self.last: int | None = None
        self._found: Found | None = None
        self._boundary = 0

    def load(self) -> int:
        """Take over the newest whole checkpoint; the step it is of, 0 without one."""
        found = newest_whole(self.folder, self.ranks)
        if found is None:
            return 0
        state = found.manifest.state
        self._check_cursor(found, state["cursor"])
        contents = Contents(found.folder, found.manifest)
        load_state(contents, self.model, self.optimizer, int(state["updates"]))
        self.guard.load_state(state["guard"])
        own = contents.own(self.ranks.rank, self.ranks.size)
        if own is not None:
            restore_random_states(own["random"])
        self.last, self._found = found.step, found
        return found.step

    def journal_loaded(self) -> None:
        """Write down the checkpoint that was loaded, where the death came before that; after the journal is cut to it."""
        if self._found is not None and self.journal is not None and self._found.step not in {c.step for c in self.journal.checkpoints()}:
            self.journal.commit_checkpoint(self._found.step, self._found.digest)
            self._register(self._found.step, self._found.folder, self._found.digest)

    def due(self, step: int) -> Due:
        """What the state after ``step`` steps asks for; what was committed meanwhile is journalled."""
        self._collect()
        return self._times.due(step)

    def save(self, step: int, metrics: Mapping[str, float]) -> float:
        """Begin the checkpoint of ``step``; the seconds that training stood still for. The rows before it are to be on the disk: no
        resume writes them again. ``metrics``: of the step before, for the registry."""
        # What was under way is journalled before its place is taken.
        self._writer.wait()
        self._collect()
        cursor = {"steps": step, "sequences": step * self.recipe.data.sequences_per_step}
        state: dict[str, Any] = {"updates": self.optimizer.updates, "guard": self.guard.state(), "cursor": cursor}
        companions: Sequence[Path] = [self.start / name for name in COMPANIONS if (self.start / name).is_file()]
        self._metrics = {name: value for name, value in metrics.items() if name in REGISTERED}
        self._boundary = self.journal.last_transition() if self.journal is not None else 0
        stall = self._writer.save(step, state_shards(self.model, self.optimizer), state, {"random": random_states()}, companions)
        self.last = step
        self._times.saved()
        return stall

    def finish(self) -> None:
        """Wait for what is under way, copies too. Raises ``RunError`` where it fails."""
        self._writer.wait()
        self._collect()
        if self._uploader is not None:
            self._uploader.finish()

    def close(self) -> None:
        """End what is under way; after a failure elsewhere it is let finish as far as it comes."""
        with contextlib.suppress(Exception):
            self._writer.wait()
            self._collect()
        self._writer.close()
        if self._uploader is not None:
            self._uploader.close()
        if self._registry is not None:
            self._registry.close()

    def _make_uploader(self) -> Uploader:
        storage = open_storage(self.recipe.checkpoint.upload, create=True)
        companions = [self.directory / name for name in RUN_FILES]
        return Uploader(storage, self.folder, self.recipe.checkpoint.keep, companions, self.on_message)

    def _collect(self) -> None:
        done = self._writer.take_committed()
        if done is not None and self.journal is not None:
            self.journal.commit_checkpoint(done.step, done.digest, self._boundary)
            self._register(done.step, done.folder, done.digest)

    def _register(self, step: int, folder: Path, digest: str) -> None:
        """Enter a committed checkpoint in the registry. A registry that fails costs a line, and no training."""
        if self._registry is None or self.journal is None:
            return
        held_out = [result["loss"] for at, kind, result in self.journal.evaluations() if kind == "held_out" and at <= step]
        metrics = self._metrics | ({"held_out/loss": held_out[-1]} if held_out else {})
        entry = NewVersion(
            self.recipe.registry.name or self.directory.name, str(folder.resolve()), digest, step, str(self.directory.resolve()),
            to_mapping(self.recipe), self.journal.get("data", {}), self.recipe.model.path or "", metrics,
        )  # fmt: skip
        try:
            self._registry.register(entry)
        except (RunError, UserError) as error:
            if self.on_message is not None:
                self.on_message(f"the checkpoint of step {step} is not entered in the registry: {error}")

    def _check_cursor(self, found: Found, cursor: Mapping[str, int]) -> None:
        per_step = self.recipe.data.sequences_per_step
        if cursor["sequences"] != found.step * per_step:
            raise UserError(
                f"'data.sequences_per_step' is {per_step}; this run has seen {cursor['sequences']} sequences in {found.step} steps, and would "
                "repeat or leave out some: set it back"
            )
