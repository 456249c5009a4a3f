"""The checkpoints of a run on data: when they are taken, journalled, uploaded and registered."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter

import torch

from tandem.config.checkpoint import CheckpointConfig
from tandem.jobs.registered import Registered
from tandem.jobs.uploads import make_uploader
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.runtime.records.agreements import trusted_step
from tandem.runtime.records.checkpoint_tiers import Loaded, describe_fetched, record_loaded, record_written
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_records import Records
from tandem.trainer.checkpoint.find import VerifiedCheckpoint, committed_steps
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.checkpoint.tiers.disks_tier import Node
from tandem.trainer.checkpoint.tiers.upload_tier import fetch_copy
from tandem.trainer.checkpoint.trigger import CheckpointTrigger, Due, copies_due
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.replica import Replica
from tandem.types import RunError, UserError

REGISTERED = ("train/loss", "actor/grad_norm")
"""Metrics of a step that are stored with a registered version."""


class DataCheckpoints:
    """Takes, loads and keeps the checkpoints of a run on data. Every rank calls every method, in the same step.

    Args:
        batch_sequences: sequences of a global batch.
        start: the folder of the model that the run starts from.
        ranks: a communicator of all ranks that nothing else uses.
        memory, local: hold further checkpoints, in the memory of nodes and on a disk of this one (``None``: there is none).
        node: this one, of several machines whose disks have the files of their own ranks (``None``: all ranks share ``local``).
        recorded: the step up to which the run's folder has rows, on several machines (``None``: on one).
        registered: enters committed checkpoints in the model registry (the first rank only).
    """

    def __init__(
        self, checkpoint: CheckpointConfig, batch_sequences: int, directory: Path, start: Path, replica: Replica, guard: GradScaler,
        ranks: Communicator, records: Records, registered: Registered | None, memory: Keepers | None = None,
        local: Path | None = None, node: Node | None = None, recorded: int | None = None,
    ) -> None:  # fmt: skip
        self._is_spread = recorded is not None
        self._config, self._batch_sequences, self._directory = checkpoint, batch_sequences, directory
        self._records, self._registered = records, registered
        # Where there is a supervisor, it prints the message.
        self.requests = SignalRequests(records.callback.message if records.board is None else None, records.callback.wants_stop)
        # Not over ``ranks``, which the writing thread uses: ranks agree in every step.
        world = replica.ranks.world

        def agree(wanted: Sequence[bool]) -> list[bool]:
            return [bool(flag) for flag in world.all_gather(torch.tensor(wanted), "whether to save").any(dim=0).tolist()]

        self._agree = agree
        self._trigger = CheckpointTrigger(checkpoint, self.requests, is_first=world.rank == 0, agree=agree)
        self._uploader = make_uploader(checkpoint, directory, records.callback.message) if records.journal is not None else None
        self.replica = ReplicaCheckpoints(
            directory / "checkpoints", checkpoint.keep, start, ReplicaState(replica), guard, ranks, asynchronous=checkpoint.asynchronous,
            on_committed=self._uploader.add if self._uploader else None, in_use=self._in_use,
            fault_point=records.fault_point, memory=memory, local=local,
        )  # fmt: skip
        self.replica.node, self.replica.recorded = node, recorded
        self._metrics: dict[str, float] = {}
        self._loaded: VerifiedCheckpoint | None = None
        self._boundary = 0

    @property
    def last(self) -> int | None:
        """The step of the newest checkpoint that was begun or loaded."""
        return self.replica.last

    def load(self, at_most: int | None = None) -> int:
        """Loads the newest whole checkpoint of step ``at_most`` or before. Returns its step, 0 if the run has no checkpoint. Raises ``RunError``
        if all checkpoints are damaged, because a new start would overwrite them."""
        began = perf_counter()
        self._loaded = self.replica.load(at_most, self._check_cursor)
        damaged = list(self.replica.damaged)
        read_bytes, is_fetched = dict(self.replica.read_bytes), False
        if self._loaded is None and at_most is None and self._fetch_copy(bool(damaged)):
            self._loaded, is_fetched = self.replica.load(at_most, self._check_cursor), True
            damaged += self.replica.damaged
        if self._loaded is None and damaged and at_most is None:
            raise RunError(
                f"no checkpoint of this run is whole ({damaged[0]}); restore one from a copy or with 'tandem resume NEW_FOLDER --from URL' "
                "(URL: the run's 'checkpoint.upload'), or start a new run"
            )
        journal = self._records.journal
        if self._loaded is None and at_most is None and journal is not None and journal.checkpoints():
            newest = journal.checkpoints()[-1].step
            raise RunError(
                f"the journal has the checkpoint of step {newest} as committed, and 'checkpoints' has none; put it back, restore the run with "
                "'tandem resume NEW_FOLDER --from URL', or start a new run"
            )
        if self._loaded is not None and at_most is None and journal is not None:
            self._record_loaded(journal, perf_counter() - began, read_bytes, is_fetched)
        for why in damaged:
            if self._records.journal is not None:
                self._records.journal.record_event("checkpoint_damaged", {"reason": why})
            self._records.callback.message(why)
        return 0 if self._loaded is None else self._loaded.step

    def _record_loaded(self, journal: Journal, seconds: float, read_bytes: dict[str, int], is_fetched: bool) -> None:
        """Records the loaded checkpoint, which ``is_fetched`` from the copies; see ``record_loaded``."""
        opened = self.replica.opened
        assert opened is not None
        if is_fetched:
            # It was sent to the folder, and read there.
            read_bytes = {**read_bytes, "upload": opened.size_bytes}
        tier = "upload" if is_fetched else opened.tier
        loaded = Loaded(opened.checkpoint.step, tier, opened.size_bytes, seconds, read_bytes, opened.where)
        if said := record_loaded(journal, loaded):
            self._records.callback.message(said)

    def _fetch_copy(self, has_damaged: bool) -> bool:
        """Fetches the newest whole copy of ``checkpoint.upload`` where the folder has lost its checkpoints. Returns whether there is one, on every rank."""
        journal, fetched = self._records.journal, None
        if journal is not None and self._config.upload and (has_damaged or journal.checkpoints()):
            fetched = fetch_copy(self._config.upload, self._directory / "checkpoints", self._beat)
            if fetched is not None:
                self._records.callback.message(describe_fetched(fetched, self._config.upload))
        return self._agree([fetched is not None])[0]

    def journal_loaded(self) -> None:
        """Journals the loaded checkpoint if the run died between its commit and its row in the journal. Called after the journal is cut to
        its step."""
        loaded, journal = self._loaded, self._records.journal
        if self.is_near:
            # The folder alone has checkpoints that count; the run goes on from this one all the same.
            return
        if loaded is not None and journal is not None and loaded.step not in {saved.step for saved in journal.checkpoints()}:
            journal.commit_checkpoint(loaded.step, loaded.digest)
            self._register(loaded.step, loaded.digest)

    def due(self, step: int) -> Due:
        """Returns what is due after ``step`` steps. Journals the checkpoint that was committed meanwhile."""
        self._collect()
        return self._trigger.due(step)

    def save(self, step: int, metrics: Mapping[str, float], span: AbstractContextManager[None]) -> float:
        """Begins the checkpoint of ``step`` and returns the seconds for which training was stalled. The rows of earlier steps must be on the
        disk, because no resume writes them again. ``metrics``: of the step before, for the registry. ``span`` is entered around the writing,
        in the writing thread."""
        # The checkpoint in progress is journalled first.
        self.replica.wait(self._beat)
        self._collect()
        self._metrics = {name: value for name, value in metrics.items() if name in REGISTERED}
        self._boundary = self._records.journal.last_transition() if self._records.journal is not None else 0
        stall = self.replica.save(step, {"steps": step, "sequences": step * self._batch_sequences}, span, self._beat)
        self._trigger.saved()
        return stall

    @property
    def is_near(self) -> bool:
        """Whether the loaded checkpoint is of a tier before the run's folder, and so none of the run's checkpoints."""
        return self.replica.opened is not None and self.replica.opened.tier != "folder"

    def copy(self, step: int) -> None:
        """Begins the checkpoint of ``step`` in memory and on the local disk, where it is due. One is left out where the writing of a checkpoint is still in
        progress on some rank, because training does not wait for it."""
        tiers = copies_due(self._config, step)
        if not tiers or self._agree([self.replica.is_busy])[0]:
            return
        self.replica.wait(self._beat)
        self._collect()
        if "local" in tiers or self._is_spread:
            # A resume may begin there, and writes no earlier row again.
            self._records.sync()
        self._records.timings["checkpoint_copy_stall"] = self.replica.copy(
            step, {"steps": step, "sequences": step * self._batch_sequences}, tiers, self._beat
        )

    def forget_local(self) -> None:
        """Removes what is on the disk of this node, where each has its own, of a run that has finished."""
        if self.replica.node is not None and self.replica.local is not None:
            self.replica.state.replica.ranks.world.barrier("the last checkpoint")
            shutil.rmtree(self.replica.local, ignore_errors=True)

    def finish(self) -> None:
        """Waits for the checkpoint and the uploads in progress. Raises ``RunError`` where one fails."""
        self.replica.wait(self._beat)
        self._collect()
        if self._uploader is not None:
            self._uploader.finish(self._beat)

    def close(self) -> None:
        """Ends the checkpoint and the uploads in progress; after a failure elsewhere they finish as far as they can."""
        with contextlib.suppress(RunError):
            self.replica.wait()
            self._collect()
        self.replica.close()
        if self._uploader is not None:
            self._uploader.close()

    def _in_use(self) -> set[int]:
        """Returns the steps whose folders are kept: those that are being uploaded, and the one that is returned to after silent data corruption."""
        kept = self._uploader.in_use() if self._uploader is not None else set()
        if self._records.journal is not None:
            trusted = trusted_step(self._records.journal, committed_steps(self._directory / "checkpoints"))
            kept |= set() if trusted is None else {trusted}
        return kept

    def _beat(self) -> None:
        if self._records.board is not None:
            self._records.board.beat()

    def _collect(self) -> None:
        done, journal = self.replica.take_committed(), self._records.journal
        copied = [] if self._uploader is None else self._uploader.take_written()
        for each in [*self.replica.take_written(), *copied]:
            if journal is not None and record_written(journal, *each):
                self._records.callback.message(f"tier {each.tier} takes no more checkpoints: {each.trouble}")
        if done is not None and journal is not None:
            journal.commit_checkpoint(done.step, done.digest, self._boundary)
            self._records.timings["checkpoint_write"] = done.write_s
            self._register(done.step, done.digest)

    def _register(self, step: int, digest: str) -> None:
        if self._registered is not None:
            self._registered.enter(step, digest, self._metrics)

    def _check_cursor(self, found: VerifiedCheckpoint) -> None:
        per_step, cursor = self._batch_sequences, found.manifest.state["cursor"]
        if cursor["sequences"] != found.step * per_step:
            raise UserError(
                f"'data.global_batch_size' is {per_step}, but this run has read {cursor['sequences']} sequences in {found.step} steps and would "
                "repeat or skip some; restore the old value"
            )
