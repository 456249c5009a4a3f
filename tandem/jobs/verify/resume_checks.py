"""What is verified before a run is resumed. The ranks verify every byte of the checkpoint that they load. Imports no torch."""

import shlex
from pathlib import Path

from tandem.jobs.run_files import SFT_FOLDER
from tandem.jobs.verify.input_files import verify_input_files
from tandem.jobs.verify.verify_config import verify_config
from tandem.jobs.verify.verify_records import verify_records
from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_lock import RunLock
from tandem.types import RunError


def check_recipe_text(directory: Path) -> None:
    """Raises ``RunError`` if ``config.yaml`` of the run in ``directory`` is not what the journal has. For a recipe that cannot be read: whether it was
    damaged or is of another version."""
    try:
        with Journal(directory / "journal.sqlite", read_only=True) as journal:
            findings = verify_config(directory, journal)
    except RunError:
        return
    for finding in findings:
        if finding.stops:
            raise RunError(finding.line())


def check_records(directory: Path, needs_journal: bool, callback: Callback) -> None:
    """Verifies the records of the run in ``directory`` and of its stage ``sft``. Damage that no later step depends on is told and journalled.

    Raises ``RunError`` for the rest, and ``UserError`` if the run is in use."""
    with RunLock(directory):
        findings = verify_records(directory, needs_journal)
        if (directory / SFT_FOLDER).is_dir() and not (directory / SFT_FOLDER / "model").is_dir():
            findings += verify_records(directory / SFT_FOLDER, needs_journal=False, is_stage=True)
        path = directory / "journal.sqlite"
        if not findings and path.exists() and path.stat().st_size:
            # Before their code runs. What reads a missing one, or one that was mended, says so.
            with Journal(path, read_only=True) as journal:
                findings += [finding for finding in verify_input_files(directory, journal) if finding.stops]
        stopping = [finding for finding in findings if finding.stops]
        if stopping:
            more = f" ('tandem verify {shlex.quote(str(directory))}' shows {len(findings) - 1} more)" if len(findings) > 1 else ""
            raise RunError(f"{stopping[0].line()}{more}")
        for finding in findings:
            callback.message(finding.line())
        if findings and (directory / "journal.sqlite").exists():
            with Journal(directory / "journal.sqlite") as journal:
                for finding in findings:
                    journal.record_event("damage", {"reason": finding.line()})
