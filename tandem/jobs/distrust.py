"""What follows silent data corruption: who is wrong is recorded, and what may be wrong is not used again. Imports no torch."""

import logging
import shutil
from pathlib import Path

from tandem.config.checkpoint import CheckpointConfig
from tandem.jobs.run_files import resume_command
from tandem.jobs.verify.verify_records import steps_on_disk
from tandem.runtime.callback import Callback
from tandem.runtime.records.agreements import CORDON, CORRUPTION, last_agreement, trusted_step
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import forget_local
from tandem.storage.files import open_storage
from tandem.trainer.corruption.finding import CorruptionFinding
from tandem.types import RunError

logger = logging.getLogger(__name__)
SUSPECT = "suspect-step-"
"""Beginning of the names of checkpoints that are newer than the last agreement, for whoever examines them. No reader takes them for checkpoints."""


def distrust(
    directory: Path, finding: CorruptionFinding, checkpoint: CheckpointConfig, callback: Callback, restarts: int, most: int, *,
    is_replaced: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Records ``finding``, sets aside what was computed since the last agreement, and returns the number of restarts with the one that must follow, and
    the step of the checkpoint that is trusted, 0 for the start.

    The machines of the named ranks are recorded as cordoned. Raises ``RunError`` if a rank was wrong again when its computation was repeated, unless
    ``is_replaced``: others take the places of those machines; and after ``most`` restarts. The run can then be resumed elsewhere."""
    with Journal(directory / "journal.sqlite") as journal:
        agreed, step = last_agreement(journal, finding.step), trusted_step(journal, steps_on_disk(directory), finding.step) or 0
        suspects = _set_aside(directory / "checkpoints", step, steps_on_disk(directory))
        if checkpoint.upload:
            _withdraw(checkpoint.upload, step, callback)
        detail = {**finding.to_json(), "reason": finding.describe(), "last_agreement": agreed, "checkpoint": step, "suspect_checkpoints": suspects}
        journal.record_event(CORRUPTION, detail)
        cordoned = {"step": finding.step, "state": "cordoned", "reason": finding.describe()}
        for host in sorted(set(finding.hosts)):
            ranks = [rank for rank, its in zip(finding.ranks, finding.hosts, strict=True) if its == host]
            journal.record_event(CORDON, {**cordoned, "node": host, "host": host, "ranks": ranks})
        journal.distrust_after(step)
        forget_local(checkpoint.local_directory, journal)
    where = f"the checkpoint of step {step}" if step else "the start"
    back = f"the steps since the last agreement ({'none yet' if agreed is None else f'step {agreed}'}) are repeated from {where}"
    if is_replaced:
        back = f"spares take the places of {' and '.join(sorted(set(finding.hosts)))}, which is cordoned, and {back}"
    elif finding.is_persistent:
        raise RunError(
            f"{finding.describe()}; the run stops, because the machine would be wrong again: {' and '.join(sorted(set(finding.hosts)))} is recorded as "
            f"cordoned; run '{resume_command(directory)}' on another one, where {back}"
        )
    if restarts >= most:
        raise RunError(f"{finding.describe()}; run.max_restarts is {most}, so the ranks are not restarted again; after a resume {back}")
    callback.message(f"{finding.describe()}; {back} (restart {restarts + 1} of {most})")
    return restarts + 1, step


def _set_aside(checkpoints: Path, step: int, committed: list[int]) -> list[int]:
    """Renames the checkpoints newer than ``step``, in place of those of an earlier finding, and returns their steps."""
    for old in checkpoints.glob(f"{SUSPECT}*") if checkpoints.is_dir() else ():
        shutil.rmtree(old, ignore_errors=True)
    suspects = sorted(each for each in committed if each > step)
    for each in reversed(suspects):
        (checkpoints / f"step-{each}").rename(checkpoints / f"{SUSPECT}{each}")
    return suspects


def _withdraw(url: str, step: int, callback: Callback) -> None:
    """Removes the marker of every copy newer than ``step``, so that it is no checkpoint, and is copied again."""
    from tandem.trainer.checkpoint.format.commit import MARKER
    from tandem.trainer.checkpoint.remote import uploaded_steps

    try:
        storage = open_storage(url)
        for each in uploaded_steps(storage):
            if each > step:
                storage.remove(f"step-{each}/{MARKER}")
    except (RunError, OSError) as error:
        callback.message(f"the copies in '{url}' of checkpoints newer than step {step} may be wrong, and could not be withdrawn: {error}")
