"""A run as a job of a scheduler: what is the same on every one. The job is the scheduler's process on the run's first machine; the
run itself is its child.

    0   the run has finished
    75  it was stopped and saved, and a resume continues it (``EX_TEMPFAIL``)
    1   it failed;  2  it was refused

Imports no torch.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tandem.cluster.etcd_process import own_etcd
from tandem.cluster.launch.record import FOLDER, PASSWORD, Record, read_record
from tandem.config.recipe import AnyRecipe, load_config
from tandem.runtime.process.processes import Threads, available_cores, spawn, terminate
from tandem.runtime.records.run_lock import RunLock
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

SAVED = 75
"""Exit status of a job whose run was stopped and saved (``EX_TEMPFAIL``)."""
_INTERRUPTED = 130
_LOOK_S = 2.0
_FAILS_S = 20.0


class RunProcess:
    """The process of the run in ``directory``, which continues it, or begins it, with ``tandem resume``. ``stop`` may be called at any time, also from a
    signal handler. ``stops``: how often it was; ``failure``: why it was ended because it could not go on; empty: it was not."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.stops, self.failure = 0, ""
        # Again in the thread that has it: the handler of a signal may run inside.
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, recipe: AnyRecipe, overrides: Sequence[str], output: Path | None = None) -> int:
        """Runs it until it ends, with new values ``overrides``. ``output``: a file for what it tells its user; ``None``: this process's output. Returns the
        exit status of the job."""
        threads = Threads(recipe.machine.threads or available_cores())
        arguments = ["resume", str(self._directory), "--on", "local", "--of-job", *overrides]
        process = spawn("tandem.cli.main", arguments, threads=threads, new_session=True, output=output)
        with self._lock:
            self._process = process
            for _ in range(self.stops + bool(self.failure)):
                process.terminate()
        status = process.wait()
        logger.info("the controller ended with %d", status)
        if self.failure:
            raise RunError(self.failure)
        # One that was asked to stop before it listened has done nothing.
        if status == _INTERRUPTED or (self.stops and status == -signal.SIGTERM):
            return SAVED
        return status if status >= 0 else 128 - status

    def stop(self) -> None:
        """Asks it to finish its step, save it and stop; a second time, to stop at once."""
        with self._lock:
            self.stops += 1
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def fail(self, why: str) -> None:
        """Ends it, because what it needs on this machine is lost: what it has saved stays, and a resume continues it. ``run`` raises ``RunError``."""
        with self._lock:
            self.failure = why
            process = self._process
        if process is not None:
            terminate(process, _FAILS_S)


def read_job(directory: Path) -> tuple[Record, AnyRecipe]:
    """Returns the record of the run in ``directory`` and its recipe, with the new values of a resume. Raises ``UserError`` for a run that was not launched."""
    record = read_record(directory)
    if record is None:
        raise UserError(f"'{directory}' was not launched: it has no {FOLDER}/record.json")
    return record, load_config(directory / "config.yaml", record.overrides)


def wait_for_earlier(directory: Path, say: Callable[[str], None], is_over: Callable[[], bool]) -> None:
    """Waits until no process holds the lock of the run in ``directory``, which this job begins again: one on a node that was taken for dead may still write.
    ``say`` is told which. ``is_over``: whether to wait no longer."""
    said = ""
    while os.access(directory, os.W_OK) and not is_over():
        try:
            RunLock(directory).release()
            return
        except UserError as error:
            if str(error) != said:
                said = str(error)
                say(said)
        time.sleep(_LOOK_S)


def exit_status(run: Callable[[], int]) -> int:
    """Returns the exit status of a job that ``run`` is. What is refused, and what has failed, is told in one line."""
    try:
        return run()
    except (UserError, RunError) as error:
        print(f"tandem: {error}", file=sys.stderr, flush=True)
        return error.exit_code


@contextlib.contextmanager
def store_of_run(
    directory: Path, record: Record, recipe: AnyRecipe, host: str, run: RunProcess, say: Callable[[str], None], password_file: Path | None = None
) -> Iterator[list[str]]:
    """Inside, the run has its etcd at ``host``, unless it has another. ``password_file``: of that etcd; ``None``: the one in the run's folder. ``run`` ends
    if it is lost; ``say``: of messages for the user. Yields the values with which its processes find it."""
    if not record.starts_etcd:
        yield []
        return
    # The keys of all runs: what cordons a node of the cluster for every run stands beside those of a run.
    prefix = f"{recipe.coordination.prefix.rstrip('/')}/"
    password = password_file or directory / FOLDER / PASSWORD
    with own_etcd(host, password, directory / "logs" / "etcd.log", prefix, shared=directory / FOLDER, say=say, lost=run.fail) as etcd:
        logger.info("etcd at %s, cluster %s", etcd.endpoint, etcd.cluster_id)
        yield etcd.overrides()


def last_error(outputs: Sequence[Path], beginnings: tuple[str, ...] = ("tandem: ",)) -> str:
    """Returns the last line of the newest output that says why the run has ended: one of Tandem's, or one with another of ``beginnings``."""
    if not outputs:
        return ""
    try:
        lines = outputs[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-50:]
    except OSError as error:
        raise RunError(f"'{outputs[-1]}' cannot be read: {error.strerror}") from None
    return next((line.removeprefix("tandem: ") for line in reversed(lines) if line.startswith(beginnings)), "")
