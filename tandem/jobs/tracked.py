"""The trackers of a run: one process for each, which the run starts and ends and never waits for in between."""

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tandem.config.trackers import TrackersConfig
from tandem.jobs.helper_process import HelperProcess
from tandem.runtime.callback import Callback
from tandem.runtime.import_path import path_for_children
from tandem.runtime.process.processes import Threads, spawn
from tandem.trackers.follow import FOLDER, STATUS
from tandem.trackers.follower import missing_rows
from tandem.trackers.tracker import Status


class Tracked(Callback):
    """Starts the trackers of ``config`` when the run has its folder, and passes on what they say with ``say``."""

    def __init__(self, config: TrackersConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._directory = Path()
        self._passed_on: dict[str, int] = {}
        self._processes: dict[str, HelperProcess] = {}

    def started(self, run_directory: str, max_steps: int, target: float | None) -> None:
        self._directory = Path(run_directory)
        folder = self._directory / FOLDER
        try:
            folder.mkdir(exist_ok=True)
            (folder / STATUS).unlink(missing_ok=True)
            for name in self._config.names:
                (folder / f"{_file(name)}.said").unlink(missing_ok=True)
                self._processes[name] = HelperProcess(f"tracker {name}", partial(self._start, name), self._say)
        except OSError as error:
            self._say(f"the trackers could not be started: {error}; the run continues without them")

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        return spawn(
            "tandem.trackers.follow", [name, _file(name), str(self._directory)], threads=Threads(1), new_session=True,
            output=self._directory / "logs" / f"tracker_{_file(name)}.log", environment={"PYTHONPATH": path_for_children()},
        )  # fmt: skip

    def row(self, row: Mapping[str, float | int | str]) -> None:
        for helper in self._processes.values():
            helper.look()
        self._pass_on()

    def close(self, status: Status) -> None:
        """Lets the trackers end, for at most ``finish_timeout_s``, and says what one lacks that has not."""
        if not self._processes:
            return
        folder, until = self._directory / FOLDER, time.monotonic() + self._config.finish_timeout_s
        # One that was killed sends what it lacks.
        for helper in self._processes.values():
            helper.look(now=True)
        (folder / STATUS).write_text(status)
        for helper in self._processes.values():
            try:
                helper.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                helper.process.kill()
                helper.process.wait()
        self._pass_on()
        for name, process in ((name, helper.process) for name, helper in self._processes.items()):
            missing = missing_rows(self._directory, folder / f"{_file(name)}.sent")
            if not process.returncode and missing:
                # It cannot remove points: those that a resume repeats are not sent before.
                self._say(f"tracker {name} was not sent the last {missing} rows of metrics.jsonl, which are after the newest checkpoint")
            elif process.returncode:
                self._say(f"tracker {name} ended and lacks {missing} rows of metrics.jsonl; see '{self._directory / 'logs'}/tracker_{_file(name)}.log'")
        self._processes = {}

    def _pass_on(self) -> None:
        for name in self._processes:
            said = self._directory / FOLDER / f"{_file(name)}.said"
            # A last line without its end is still being written.
            lines = said.read_text("utf-8").split("\n")[:-1] if said.exists() else []
            for line in lines[self._passed_on.get(name, 0) :]:
                self._say(line)
            self._passed_on[name] = len(lines)


def _file(name: str) -> str:
    """Returns ``name`` as the beginning of names of files."""
    return re.sub(r"[^\w.-]", "_", name)
