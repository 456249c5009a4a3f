"""Refuses a run that a job of another launcher has: the lock on its folder is not seen by other machines everywhere, and not held by a job that waits."""

from pathlib import Path

from tandem.cluster.launch.choose import launcher
from tandem.cluster.launch.launcher import LauncherName
from tandem.cluster.launch.record import read_record
from tandem.cluster.launch.several_nodes import check_not_running
from tandem.types import UserError


def check_not_elsewhere(directory: Path, name: LauncherName) -> None:
    """Raises ``UserError`` if the run in ``directory``, which launcher ``name`` is to continue, is queued or running as a job of another one. A scheduler that
    does not answer here says nothing of the run."""
    record = read_record(directory)
    if record is None or not record.job or record.launcher == name:
        return
    try:
        status = launcher(record.launcher).status(directory)
    except UserError:
        return
    check_not_running(directory, status)
