"""Verifies the records of a run: its recipe, journal, metrics, and which checkpoints it should have. Imports no torch and reads no checkpoint."""

import re
from pathlib import Path

from tandem.jobs.verify.finding import Finding
from tandem.jobs.verify.verify_config import verify_config
from tandem.runtime.records.chained_tables import DamagedRow
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import digests_on_disk
from tandem.types import RunError

RESTORE = "restore it from a copy, or the run with 'tandem resume NEW_FOLDER --from URL' (URL: its 'checkpoint.upload'), or start a new run"

_DEPENDS = {
    "transitions": ("the times of phases in the report depend on it", False),
    "events": ("the events in the report depend on it", False),
    "metrics_rows": ("the verification of metrics.jsonl depends on it", False),
    "head": ("whether the newest rows were cut off depends on it", False),
    "unflushed": ("no result depends on it; a loss of power explains it", False),
    "evaluations": ("the reported accuracy or loss, and when the run ends, depend on it", True),
    "checkpoints": ("where the run resumes depends on it", True),
    "run": ("how the run resumes depends on it", True),
}


def verify_records(directory: Path, needs_journal: bool, is_stage: bool = False) -> list[Finding]:
    """Returns what is wrong with the records of the run in ``directory``. ``needs_journal``: whether the run cannot continue without it;
    ``is_stage``: as for ``verify_config``."""
    path, steps = directory / "journal.sqlite", steps_on_disk(directory)
    if not path.exists() or path.stat().st_size == 0:
        return _lost_journal(directory, "an empty" if path.exists() else "no", needs_journal) if steps else []
    try:
        with Journal(path, read_only=True) as journal:
            # A restored run has no numerics, and a mesh.
            if steps and journal.get("mesh") is None:
                return _lost_journal(directory, "an empty", needs_journal)
            findings = [_finding(path, row, max(steps, default=0)) for row in journal.verify()]
            if any(finding.stops for finding in findings):
                return findings
            findings += verify_config(directory, journal, is_stage)
            findings += _verify_metrics(directory / "metrics.jsonl", journal.row_digests(), max(steps, default=0))
            findings += _verify_presence(directory, steps, [saved.step for saved in journal.checkpoints()])
            return findings
    except RunError as error:
        what, _, fix = str(error).partition("; ")
        without = "" if needs_journal else ", or remove it and resume: the run continues from its checkpoint without its evaluations and events"
        return [Finding(what, "every record of the run depends on it", f"{fix or RESTORE}{without}", stops=True)]


def _lost_journal(directory: Path, what: str, needs_journal: bool) -> list[Finding]:
    """A new journal would not know which samples and scores were drawn."""
    lost = "its samples, scores, evaluations and events are lost with it" if needs_journal else "its evaluations and events are lost with it"
    fix = RESTORE if needs_journal else "restore it from a copy, or resume without it"
    return [Finding(f"the run '{directory}' has checkpoints and {what} journal.sqlite", lost, fix, stops=needs_journal)]


def steps_on_disk(directory: Path) -> list[int]:
    """Returns the steps that have a checkpoint's folder."""
    folders = (re.fullmatch(r"step-(\d+)", path.name) for path in (directory / "checkpoints").glob("step-*"))
    return sorted(int(match[1]) for match in folders if match)


def _finding(path: Path, row: DamagedRow, newest: int) -> Finding:
    where = f"'{path}', {row.part} {row.key}".rstrip() if row.part != "file" else f"'{path}'"
    if row.part == "step_batches":
        step = row.key.partition("/")[0]
        is_used = not step.isdigit() or int(step) >= newest
        depends = "the step would be trained on it" if is_used else "'tandem replay' of that step depends on it"
        return Finding(f"{where}: {row.what}", depends, RESTORE if is_used else "nothing to do", is_used)
    depends, stops = _DEPENDS.get(row.part, ("every record of the run depends on it", True))
    return Finding(f"{where}: {row.what}", depends, RESTORE if stops else "nothing to do", stops)


def _verify_metrics(path: Path, recorded: dict[int, str], newest: int) -> list[Finding]:
    """Rows after the newest recorded one were written by a process that was killed before it recorded them; rows after the newest
    checkpoint are made again."""
    depends, findings, seen = "the curves depend on it, no later step does", [], set()
    last = max(recorded, default=-1)
    for number, (step, digest) in enumerate(digests_on_disk(path), start=1):
        where = f"line {number} of '{path}'"
        if step is None:
            fix = "restore it from a copy, or remove that line"
            findings.append(Finding(f"{where} is not a row of metrics", "the curves and the report depend on it", fix, stops=True))
            continue
        seen.add(step)
        if step in recorded and recorded[step] != digest:
            findings.append(Finding(f"{where} (step {step}) does not have the digest it was written with", depends, "restore it from a copy", stops=False))
        elif step not in recorded and step <= last:
            findings.append(Finding(f"{where} (step {step}) was not written by this run", depends, "restore it from a copy", stops=False))
    lost = [step for step in recorded if step not in seen and step < newest]
    if lost:
        what = f"'{path}' lacks {len(lost)} rows, the first of step {lost[0]}"
        findings.append(Finding(what, depends, "restore it from a copy", stops=False))
    return findings


def _verify_presence(directory: Path, steps: list[int], committed: list[int]) -> list[Finding]:
    newest = max(committed, default=0)
    if not committed or newest in steps or max(steps, default=0) > newest:
        return []
    what = f"'{directory / 'checkpoints' / f'step-{newest}'}', which the journal has as committed, is missing"
    if not steps:
        return [Finding(f"{what}, and so are all others", "the run would begin again at step 0", RESTORE, stops=True)]
    return [Finding(what, f"the run continues from step {max(steps)} instead", "restore it from a copy to continue from it", stops=False)]
