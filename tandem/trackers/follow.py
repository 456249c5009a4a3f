"""The process of one tracker: ``python -m tandem.trackers.follow NAME FILE FOLDER`` follows the run in FOLDER until its trackers are to end.

FILE names its files in ``trackers/``: ``FILE.sent`` (the rows that it has), ``FILE.said`` (messages for the run). The run writes ``status``.
"""

import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.config.load import read_yaml
from tandem.config.recipe import Recipe, load_config
from tandem.report.run_facts import REPORT
from tandem.report.samples import samples_of_step
from tandem.runtime.records.journal import Journal
from tandem.trackers.follower import Follower
from tandem.trackers.open import open_tracker
from tandem.trackers.sent_rows import SentRows
from tandem.trackers.tracker import RunFacts, SampleRow, Status
from tandem.trainer.checkpoint.format.commit import MARKER

FOLDER, STATUS = "trackers", "status"
POLL_S = 0.2


def follow(name: str, file: str, directory: Path) -> None:
    """Follows the run in ``directory`` for the tracker ``name``."""
    folder = directory / FOLDER
    with (folder / f"{file}.lock").open("w") as lock:
        # The process of an earlier life of the run may not be gone yet.
        fcntl.flock(lock, fcntl.LOCK_EX)
        recipe = load_config(directory / "config.yaml")
        config = recipe.trackers

        def say(text: str) -> None:
            with (folder / f"{file}.said").open("a", encoding="utf-8") as said:
                said.write(f"tracker {name} {text}\n")

        def samples_of(step: int) -> Sequence[SampleRow]:
            if not isinstance(recipe, Recipe) or not config.samples or step % config.samples_every_steps:
                return ()
            with Journal(directory / "journal.sqlite", read_only=True) as journal:
                shown = samples_of_step(journal, directory, step, config.samples)
            return [SampleRow(prompt, sample.text, sample.reward, sample.parts) for prompt, sample in shown]

        def settled() -> int:
            return max((int(path.parent.name.partition("-")[2]) for path in (directory / "checkpoints").glob(f"step-[0-9]*/{MARKER}")), default=0)

        facts = RunFacts(directory.name, directory, read_yaml(directory / "config.yaml"))
        follower = Follower(facts, lambda: open_tracker(name, config, directory, say), SentRows(folder / f"{file}.sent"), samples_of, say, settled)
        while True:
            # Read before the rows: after it there are no new ones.
            status = _status(folder)
            has_all = follower.catch_up(all_settled=status == "finished")
            if status is not None and has_all and _ended(follower, directory, status):
                return
            time.sleep(POLL_S)


def _ended(follower: Follower, directory: Path, status: Status) -> bool:
    """Ends the tracker; returns whether it could."""
    if follower.tracker is None:
        return True
    try:
        if status == "finished":
            for path in (directory / "model", directory / REPORT):
                if path.exists():
                    follower.tracker.artefact(path)
        follower.tracker.finish(status)
    except Exception as error:
        follower.fail(error)
        return False
    return True


def _status(folder: Path) -> Status | None:
    try:
        return "finished" if (folder / STATUS).read_text() == "finished" else "stopped"
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    os.nice(10)
    follow(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
