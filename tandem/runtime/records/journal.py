"""The journal of a run: every result is committed before anything uses it.

The checkpoint commit decides where a run continues. On resume ``cut_after(step)`` removes the entries after the checkpoint, but keeps
samples and scores: steps are repeated from them, and they are never computed a second time. Samples are committed when a rollout ends,
scores before they are trained on. Every commit is one transaction, flushed to the disk. Transitions are flushed with the next commit: a
``kill -9`` loses none, a power failure the newest. A chain of digests covers every row, those of ``metrics.jsonl`` included
(``chained_tables``).

``step`` counts optimizer steps taken: step 3 is the work that starts from the state after 3 steps; a checkpoint of step
3 is that state. Times are Unix seconds.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.runtime.records.chained_tables import CHAIN_SCHEMA, ChainedTables, DamagedRow, Table
from tandem.runtime.records.sqlite_file import close_last, connect, errors
from tandem.types.errors import RunError
from tandem.types.replay_buffer import ReplayBuffer
from tandem.types.round import Round
from tandem.types.sample import Sample
from tandem.types.score import Score
from tandem.types.wire_records import decode_samples, decode_scores, encode_samples, encode_scores

COMMITS = ("commit_samples", "commit_scores", "commit_evaluation", "commit_checkpoint", "record_event")
"""The journal's commits: names of fault points; of a step's later rounds with their number, as in ``commit_samples_1``. A transition's fault point has the name
of its state."""

_VERSION = 3
_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS transitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL, sidecar TEXT NOT NULL, state TEXT NOT NULL,
    started_s REAL NOT NULL, ended_s REAL, incarnation INTEGER NOT NULL, detail TEXT NOT NULL DEFAULT '{}');
CREATE TABLE IF NOT EXISTS step_batches (
    step INTEGER NOT NULL, round INTEGER NOT NULL, samples BLOB NOT NULL, scores BLOB, digest TEXT NOT NULL, PRIMARY KEY (step, round));
CREATE TABLE IF NOT EXISTS replay_buffers (
    step INTEGER NOT NULL, round INTEGER NOT NULL, started INTEGER NOT NULL, samples BLOB NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (step, round));
CREATE TABLE IF NOT EXISTS evaluations (
    step INTEGER NOT NULL, kind TEXT NOT NULL, result TEXT NOT NULL, PRIMARY KEY (step, kind));
CREATE TABLE IF NOT EXISTS checkpoints (
    step INTEGER PRIMARY KEY, digest TEXT NOT NULL, committed_s REAL NOT NULL, last_transition INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS metrics_rows (step INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
    + CHAIN_SCHEMA
)
_TABLES = {
    "transitions": Table(("id", "step", "sidecar", "state", "started_s", "ended_s", "incarnation", "detail")),
    # Its digest is of the samples and scores, which are compared with it whenever they are read.
    "step_batches": Table(("step", "round", "samples", "scores", "digest"), keys=2, covered=("step", "round", "digest")),
    "replay_buffers": Table(("step", "round", "started", "samples", "digest"), keys=2, covered=("step", "round", "started", "digest")),
    "evaluations": Table(("step", "kind", "result"), keys=2),
    "checkpoints": Table(("step", "digest", "committed_s", "last_transition")),
    "events": Table(("id", "time_s", "kind", "detail")),
    "metrics_rows": Table(("step", "digest")),
    "run": Table(("key", "value")),
}


@dataclass(frozen=True, slots=True)
class Transition:
    """A period of a sidecar in one state. ``ended_s`` is ``None`` while it lasts, and stays ``None`` if the process was killed in it;
    ``failed`` in ``detail`` is the class of the exception that ended it."""

    id: int
    step: int
    sidecar: str
    state: str
    started_s: float
    ended_s: float | None
    incarnation: int
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: the state after ``step`` optimizer steps."""

    step: int
    digest: str
    committed_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """An event for the report: a recovery, a fault, a warning."""

    id: int
    time_s: float
    kind: str
    detail: dict[str, Any]


class Journal:
    """The open ``journal.sqlite`` of a run. Thread-safe; one process writes, others read. ``brief``: for a few reads at once, of a
    file of any size. ``is_beside``: for some events of another process than the one that writes, and that merges the file at its end.

    ``incarnation``: the number of trainer starts in this run, resumes included. Raises ``RunError`` where the file is damaged, locked or
    cannot be written.
    """

    def __init__(
        self, path: Path, *, fault_point: FaultPoint = no_fault, read_only: bool = False, busy_s: float = 10.0, brief: bool = False,
        is_beside: bool = False,
    ) -> None:  # fmt: skip
        self.path = path
        self._fault_point = fault_point
        self._merges = not read_only and not is_beside
        self._lock = threading.RLock()
        self._connection = connect(path, "the run's journal", _VERSION, _SCHEMA, read_only=read_only, durable=False, busy_s=busy_s, brief=brief)
        self._tables = ChainedTables(self._connection, path, _TABLES, read_only=read_only)
        self.incarnation: int = int(self.get("incarnation", 0))

    def close(self) -> None:
        with self._lock:
            self._tables.close()
            if self._merges:
                close_last(self._connection, self.path)
            else:
                self._connection.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the run -------------------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the JSON value stored under ``key``, ``default`` without one."""
        rows = self._read("SELECT value FROM run WHERE key = ?", (key,))
        return self._value(rows[0][0]) if rows else default

    def set(self, key: str, value: Any) -> None:
        self._put("run", (key, _json(value)))

    def next_incarnation(self) -> int:
        """Counts one more start of a trainer and returns its number, which is larger than all earlier ones of this run."""
        self.incarnation += 1
        self.set("incarnation", self.incarnation)
        return self.incarnation

    # -- transitions ---------------------------------------------------------------------------------------------------

    @contextmanager
    def transition(self, step: int, sidecar: str, state: str) -> Iterator[dict[str, Any]]:
        """Records that ``sidecar`` is in ``state`` while the body runs. The body may fill the yielded detail."""
        self._fault_point(f"before:{state}:{step}")
        detail: dict[str, Any] = {}
        began = (step, sidecar, str(state), time.time())
        row = self._put("transitions", (None, *began, None, self.incarnation, "{}"))
        try:
            yield detail
        except BaseException as error:
            detail["failed"] = type(error).__name__
            raise
        finally:
            self._put("transitions", (row, *began, time.time(), self.incarnation, _json(detail)))
        self._fault_point(f"after:{state}:{step}")

    def transitions(self, step: int | None = None) -> list[Transition]:
        """Returns all transitions, or those of ``step``, in the order of their starts."""
        where, parameters = ("", ()) if step is None else ("WHERE step = ?", (step,))
        columns = "id, step, sidecar, state, started_s, ended_s, incarnation, detail"
        rows = self._read(f"SELECT {columns} FROM transitions {where} ORDER BY id", parameters)
        return [
            Transition(id, at, sidecar, state, started_s, ended_s, incarnation, self._value(detail))
            for id, at, sidecar, state, started_s, ended_s, incarnation, detail in rows
        ]

    def spans(self, after: int = 0) -> list[tuple[int, int, str, str, float, float | None]]:
        """Returns id, step, sidecar, state, start and end of the transitions with an id above ``after``, in order, without their details."""
        return self._read("SELECT id, step, sidecar, state, started_s, ended_s FROM transitions WHERE id > ? ORDER BY id", (after,))  # type: ignore[return-value]

    def first_transition(self) -> tuple[int, float] | None:
        """Returns step and start of the first transition, ``None`` without one."""
        rows = self._read("SELECT step, started_s FROM transitions ORDER BY id LIMIT 1")
        return (int(rows[0][0]), float(rows[0][1])) if rows else None

    def transition_of(self, id: int) -> Transition | None:
        """Returns one transition, ``None`` where there is none with that ``id``."""
        rows = self._read("SELECT step FROM transitions WHERE id = ?", (id,))
        return next((each for each in self.transitions(rows[0][0]) if each.id == id), None) if rows else None

    # -- samples and scores --------------------------------------------------------------------------------------------

    def commit_samples(
        self, step: int, samples: Sequence[Sample], round: int = 0, buffer: ReplayBuffer | None = None,
        encode: Callable[[Sequence[Sample]], bytes] = encode_samples,
    ) -> None:
        """Commits the samples of ``round`` of ``step`` and, with partial rollouts, the replay ``buffer`` that the round leaves, in one transaction. ``encode``:
        ``encode_samples``, or what remembers it for others. Raises ``RunError`` if the round already has other samples."""
        blob = encode(samples)
        with self._commit(_of_round("commit_samples", round), step):
            committed = self._step_batch(step, round)
            if committed is None:
                self._tables.put("step_batches", (step, round, blob, None, _digest(blob, None)))
                if buffer is not None:
                    kept = encode_samples(buffer.samples)
                    self._tables.put("replay_buffers", (step, round, buffer.started, kept, _digest(kept, None)))
            elif committed[0] != blob:
                raise RunError(f"the run's journal already has other samples for step {step}; a step's samples are drawn once")

    def commit_scores(self, step: int, scores: Sequence[Score], round: int = 0) -> None:
        """Commits the scores of ``round`` of ``step``, faults included. Raises ``RunError`` if it has no samples or already has other scores."""
        blob = encode_scores(scores)
        with self._commit(_of_round("commit_scores", round), step):
            committed = self._step_batch(step, round)
            if committed is None:
                raise RunError(f"the run's journal has no samples of step {step} for these scores")
            if committed[1] is None:
                self._tables.put("step_batches", (step, round, committed[0], blob, _digest(committed[0], blob)))
            elif committed[1] != blob:
                raise RunError(f"the run's journal already has other scores for step {step}; a step is judged once")

    def samples(self, step: int, round: int = 0) -> list[Sample] | None:
        """Returns the samples of ``round`` of ``step``, or ``None`` where its rollout has not ended."""
        committed = self._step_batch(step, round)
        return None if committed is None else decode_samples(committed[0])

    def sample_blobs(self, step: int) -> list[bytes]:
        """Returns the samples of each round of ``step`` as they are stored, to look into before they are decoded."""
        return [row[0] for row in self._read("SELECT samples FROM step_batches WHERE step = ? ORDER BY round", (step,))]

    def steps_before(self, step: int, count: int) -> list[int]:
        """Returns at most ``count`` steps up to ``step`` that have samples, the newest first."""
        return [row[0] for row in self._read("SELECT DISTINCT step FROM step_batches WHERE step <= ? ORDER BY step DESC LIMIT ?", (step, count))]

    def scores(self, step: int, round: int = 0) -> list[Score] | None:
        """Returns the scores of ``round`` of ``step``, or ``None`` where it has none."""
        committed = self._step_batch(step, round)
        return None if committed is None or committed[1] is None else decode_scores(committed[1])

    def drawn(self, step: int) -> list[list[Sample]]:
        """Returns the samples of each round of ``step``, in order, those that were not judged too."""
        drawn: list[list[Sample]] = []
        while (samples := self.samples(step, len(drawn))) is not None:
            drawn.append(samples)
        return drawn

    def rounds(self, step: int) -> list[Round]:
        """Returns the rounds of ``step`` that were judged, in order."""
        judged: list[Round] = []
        while (scores := self.scores(step, len(judged))) is not None:
            samples = self.samples(step, len(judged))
            assert samples is not None
            judged.append(Round(samples, scores))
        return judged

    def rounds_before(self, step: int) -> int:
        """Returns the number of rounds of all steps before ``step``."""
        return int(self._read("SELECT COUNT(*) FROM step_batches WHERE step < ?", (step,))[0][0])

    def replay_buffer(self, step: int, round: int = 0) -> ReplayBuffer:
        """Returns the replay buffer that ``round`` of ``step`` begins with: the one that the newest round before it has left, empty without one."""
        earlier = "WHERE step < ? OR (step = ? AND round < ?) ORDER BY step DESC, round DESC LIMIT 1"
        rows = self._read(f"SELECT step, started, samples, digest FROM replay_buffers {earlier}", (step, step, round))
        if not rows:
            return ReplayBuffer()
        at, started, samples, digest = rows[0]
        if _digest(samples, None) != digest:
            raise RunError(f"the run's journal: {self.path} is damaged (replay buffer of step {at}); restore it from a copy or start a new run")
        return ReplayBuffer(tuple(decode_samples(samples)), started)

    def last_journalled_step(self) -> int | None:
        """Returns the newest step that has samples, ``None`` without one."""
        (found,) = self._read("SELECT MAX(step) FROM step_batches")[0]
        return None if found is None else int(found)

    def journalled_steps(self) -> list[int]:
        """Returns the steps that have samples, ascending."""
        return [row[0] for row in self._read("SELECT DISTINCT step FROM step_batches ORDER BY step")]

    def _step_batch(self, step: int, round: int) -> tuple[bytes, bytes | None] | None:
        rows = self._read("SELECT samples, scores, digest FROM step_batches WHERE step = ? AND round = ?", (step, round))
        if not rows:
            return None
        samples, scores, digest = rows[0]
        if _digest(samples, scores) != digest:
            raise RunError(f"the run's journal: {self.path} is damaged (samples of step {step}); restore it from a copy or start a new run")
        return samples, scores

    # -- evaluations, checkpoints, events ------------------------------------------------------------------------------

    def commit_evaluation(self, step: int, kind: str, result: dict[str, Any]) -> None:
        """Commits the evaluation ``kind`` of the weights after ``step`` steps; replaces an earlier one of the same kind and step."""
        with self._commit("commit_evaluation", step):
            self._tables.put("evaluations", (step, kind, _json(result)))

    def evaluation(self, step: int, kind: str) -> dict[str, Any] | None:
        rows = self._read("SELECT result FROM evaluations WHERE step = ? AND kind = ?", (step, kind))
        return self._value(rows[0][0]) if rows else None

    def evaluations(self) -> list[tuple[int, str, dict[str, Any]]]:
        """Returns every evaluation as (step, kind, result), by step."""
        rows = self._read("SELECT step, kind, result FROM evaluations ORDER BY step, rowid")
        return [(step, kind, self._value(result)) for step, kind, result in rows]

    def commit_checkpoint(self, step: int, digest: str, boundary: int | None = None) -> None:
        """Records that the checkpoint of ``step`` with ``digest`` is whole on the disk; resumes start from it. ``boundary``: the newest
        transition (``last_transition``) at the time its state was taken (``None``: now)."""
        with self._commit("commit_checkpoint", step):
            boundary = self.last_transition() if boundary is None else boundary
            self._tables.put("checkpoints", (step, digest, time.time(), boundary))

    def last_transition(self) -> int:
        """Returns the id of the newest transition, 0 without one."""
        return int(self._read("SELECT COALESCE(MAX(id), 0) FROM transitions")[0][0])

    def checkpoints(self) -> list[Checkpoint]:
        """Returns the committed checkpoints by step."""
        return [Checkpoint(*row) for row in self._read("SELECT step, digest, committed_s FROM checkpoints ORDER BY step")]

    def record_event(self, kind: str, detail: dict[str, Any]) -> None:
        """Records an event. ``cut_after`` keeps events."""
        with self._commit("record_event", int(detail.get("step", 0))):
            self._tables.put("events", (None, time.time(), kind, _json(detail)))

    def events(self) -> list[Event]:
        rows = self._read("SELECT id, time_s, kind, detail FROM events ORDER BY id")
        return [Event(id, time_s, kind, self._value(detail)) for id, time_s, kind, detail in rows]

    # -- rows of metrics.jsonl -----------------------------------------------------------------------------------------

    def record_row(self, step: int, digest: str) -> None:
        """Records the digest of the row of ``step`` in ``metrics.jsonl``, which is written already."""
        self._put("metrics_rows", (step, digest))

    def row_digests(self) -> dict[int, str]:
        """Returns the digests of the rows of ``metrics.jsonl`` by step."""
        return dict(self._read("SELECT step, digest FROM metrics_rows ORDER BY step"))

    # -- verification --------------------------------------------------------------------------------------------------

    def verify(self) -> list[DamagedRow]:
        """Returns the rows that are not as they were written. Samples and scores are compared with their digests when they are read."""
        with self._lock, errors(self.path, "the run's journal"):
            return self._tables.verify()

    def damaged_batches(self) -> list[int]:
        """Returns the steps whose samples, scores or replay buffers do not have their digest."""
        damaged = []
        for step, round in self._read("SELECT step, round FROM step_batches ORDER BY step, round"):
            try:
                self._step_batch(step, round)
                self.replay_buffer(step, round + 1)
            except RunError:
                damaged.append(step)
        return sorted(set(damaged))

    # -- resume --------------------------------------------------------------------------------------------------------

    def cut_after(self, step: int) -> None:
        """Goes back to the checkpoint of ``step`` (0 without one: the start), in one transaction.

        Removes transitions that began after its commit, and evaluations, checkpoints and rows of metrics of later steps. Keeps evaluations
        up to ``step``, every event, and all samples, scores and replay buffers.
        """
        with self._lock, errors(self.path, "the run's journal"), self._tables.writing(is_durable=False):
            committed = self._connection.execute("SELECT last_transition FROM checkpoints WHERE step = ?", (step,)).fetchone()
            if committed is None:
                # The run was killed between the commit on the disk and the one here: the checkpoint's transition is the boundary.
                query = "SELECT MAX(id) FROM transitions WHERE step = ? AND state = 'checkpoint'"
                committed = self._connection.execute(query, (step,)).fetchone()
            if committed[0] is None:
                self._tables.remove("transitions", "step >= ?", (step,))
            else:
                self._tables.remove("transitions", "id > ?", committed)
            self._tables.remove("evaluations", "step > ?", (step,))
            self._tables.remove("checkpoints", "step > ?", (step,))
            self._tables.remove("metrics_rows", "step >= ?", (step,))

    def distrust_after(self, step: int) -> None:
        """Goes back to the checkpoint of ``step`` as ``cut_after`` does, and removes the samples and scores of later steps too: the weights that drew them
        may be wrong."""
        self.cut_after(step)
        with self._lock, errors(self.path, "the run's journal"), self._tables.writing(is_durable=True):
            self._tables.remove("step_batches", "step > ?", (step,))
            self._tables.remove("replay_buffers", "step > ?", (step,))

    # -- reading and writing -------------------------------------------------------------------------------------------

    def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with (
            self._lock,
            errors(self.path, "the run's journal"),
            closing(self._connection.execute(query, parameters)) as cursor,
        ):
            return cursor.fetchall()

    def _put(self, table: str, row: Sequence[Any]) -> int:
        """Writes one row as its own transaction, which need not wait for the disk; returns its id."""
        with self._lock, errors(self.path, "the run's journal"), self._tables.writing(is_durable=False):
            return self._tables.put(table, row)

    def _value(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise RunError(f"the run's journal: {self.path} is damaged (a value that is not JSON); 'tandem verify' says what is damaged") from None

    @contextmanager
    def _commit(self, name: str, step: int) -> Iterator[None]:
        self._fault_point(f"before:{name}:{step}")
        with self._lock, errors(self.path, "the run's journal"):
            # Transitions need not wait for the disk; what a resume starts from must.
            self._connection.execute("PRAGMA synchronous=FULL")
            try:
                with self._tables.writing(is_durable=True):
                    yield
            finally:
                self._connection.execute("PRAGMA synchronous=NORMAL")
        self._fault_point(f"after:{name}:{step}")


def _of_round(name: str, round: int) -> str:
    """Returns the name of the commit ``name`` of ``round``; fault points distinguish rounds by it."""
    return f"{name}_{round}" if round else name


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _digest(samples: bytes, scores: bytes | None) -> str:
    digest = blake2b(samples, digest_size=16)
    if scores is not None:
        digest.update(b"\0scores\0" + scores)
    return digest.hexdigest()
