"""The checkpoints of a run on data: when, and what becomes of them."""

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from tandem.config.pretrain import PretrainRecipe
from tandem.jobs.registered import Registered
from tandem.jobs.uploads import make_uploader
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.runtime.records.run_records import Records
from tandem.trainer.checkpoint.find import VerifiedCheckpoint
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.trigger import CheckpointTrigger, Due
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.replica import Replica
from tandem.types import RunError, UserError

REGISTERED = ("train/loss", "actor/grad_norm")
"""Metrics of a step that a version is entered with."""


class DataCheckpoints:
    """``start``: the folder that the model came from. ``ranks``: a communicator of all ranks that nothing else uses. Every rank calls every
    method, in the same step."""

    def __init__(
        self, recipe: PretrainRecipe, directory: Path, start: Path, replica: Replica, guard: GradScaler, ranks: Communicator, records: Records
    ) -> None:
        self._recipe, self._directory, self._records = recipe, directory, records
        # Where there is a supervisor, that one says it.
        self.requests = SignalRequests(records.callback.message if records.board is None else None)
        # Not over ``ranks``: they agree in every step, while the thread that writes votes over those.
        world = replica.ranks.world

        def agree(wanted: Sequence[bool]) -> list[bool]:
            return [bool(flag) for flag in world.all_gather(torch.tensor(wanted), "whether to save").any(dim=0).tolist()]

        self._trigger = CheckpointTrigger(recipe.checkpoint, self.requests, is_first=world.rank == 0, agree=agree)
        keeps_books = records.journal is not None
        self._uploader = make_uploader(recipe.checkpoint, directory, records.callback.message) if keeps_books else None
        self._registered = Registered(recipe, directory, records.journal, records.callback) if records.journal is not None else None
        self.replica = ReplicaCheckpoints(
            directory / "checkpoints", recipe.checkpoint.keep, start, replica, guard, ranks, asynchronous=recipe.checkpoint.asynchronous,
            on_committed=self._uploader.add if self._uploader else None, in_use=self._uploader.in_use if self._uploader else tuple,
            fault_point=records.fault_point,
        )  # fmt: skip
        self._metrics: dict[str, float] = {}
        self._found: VerifiedCheckpoint | None = None
        self._boundary = 0

    @property
    def last(self) -> int | None:
        """The step of the newest checkpoint, begun or loaded."""
        return self.replica.last

    def load(self, at_most: int | None = None) -> int:
        """Take over the newest whole checkpoint, of step ``at_most`` or before; the step it is of, 0 without one. Raises ``RunError`` if a run
        has some and none is whole: a new beginning would overwrite what it has."""
        self._found = self.replica.load(at_most, self._check_cursor)
        damaged = self.replica.damaged
        if self._found is None and damaged and at_most is None:
            raise RunError(
                f"no checkpoint of this run is whole ({damaged[0]}); put one back, from a copy or with 'tandem resume NEW_FOLDER --from' what "
                "'checkpoint.upload' was, or start a new run"
            )
        for why in damaged:
            self._records.callback.message(why)
        return 0 if self._found is None else self._found.step

    def journal_loaded(self) -> None:
        """Journal the checkpoint that was loaded, if the death came before that; after the journal is cut to it."""
        found, journal = self._found, self._records.journal
        if found is not None and journal is not None and found.step not in {saved.step for saved in journal.checkpoints()}:
            journal.commit_checkpoint(found.step, found.digest)
            self._register(found.step, found.digest)

    def due(self, step: int) -> Due:
        """What the state after ``step`` steps asks for; what was committed meanwhile is journalled."""
        self._collect()
        return self._trigger.due(step)

    def save(self, step: int, metrics: Mapping[str, float], span: AbstractContextManager[None]) -> float:
        """Begin the checkpoint of ``step``; the seconds that training stood still for. The rows before it are to be on the disk: no
        resume writes them again. ``metrics``: of the step before, for the registry. ``span`` is entered around the writing, in its thread."""
        # What was under way is journalled before its place is taken.
        self.replica.wait(self._beat)
        self._collect()
        self._metrics = {name: value for name, value in metrics.items() if name in REGISTERED}
        self._boundary = self._records.journal.last_transition() if self._records.journal is not None else 0
        stall = self.replica.save(step, {"steps": step, "sequences": step * self._recipe.data.global_batch_size}, span, self._beat)
        self._trigger.saved()
        return stall

    def finish(self) -> None:
        """Wait for what is under way, copies too. Raises ``RunError`` where it fails."""
        self.replica.wait(self._beat)
        self._collect()
        if self._uploader is not None:
            self._uploader.finish(self._beat)

    def close(self) -> None:
        """End what is under way; after a failure elsewhere it may finish as far as it can."""
        with contextlib.suppress(RunError):
            self.replica.wait()
            self._collect()
        self.replica.close()
        if self._uploader is not None:
            self._uploader.close()
        if self._registered is not None:
            self._registered.close()

    def _beat(self) -> None:
        if self._records.board is not None:
            self._records.board.beat()

    def _collect(self) -> None:
        done, journal = self.replica.take_committed(), self._records.journal
        if done is not None and journal is not None:
            journal.commit_checkpoint(done.step, done.digest, self._boundary)
            self._records.timings["checkpoint_write"] = done.write_s
            self._register(done.step, done.digest)

    def _register(self, step: int, digest: str) -> None:
        if self._registered is not None:
            self._registered.enter(step, digest, self._metrics)

    def _check_cursor(self, found: VerifiedCheckpoint) -> None:
        per_step, cursor = self._recipe.data.global_batch_size, found.manifest.state["cursor"]
        if cursor["sequences"] != found.step * per_step:
            raise UserError(
                f"'data.global_batch_size' is {per_step}; this run has seen {cursor['sequences']} sequences in {found.step} steps, and would "
                "repeat or leave out some: set it back"
            )
