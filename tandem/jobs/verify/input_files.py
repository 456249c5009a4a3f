"""The files that a run reads besides its model: prompts, and the files of reward functions. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path

from tandem.jobs.verify.finding import Finding
from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal
from tandem.storage.digests import bytes_digest
from tandem.types import RunError

KEY = "input_files"
"""The journal's key of the files and their digests."""
SOURCE = ".py"
"""The end of the name of a file that a user may mend: the run continues with the new one, and says so. Any other one stays as it was."""


def check_input_files(files: Mapping[str, str], journal: Journal, callback: Callback) -> None:
    """Records the digests of ``files`` at the run's first start. Later a file of source that was changed is told and journalled; raises ``RunError`` for
    another that was."""
    run = journal.path.parent.resolve()
    resolved = {Path(name).resolve(): digest for name, digest in files.items()}
    # A run's own folder may be moved.
    now = {str(path.relative_to(run) if path.is_relative_to(run) else path): digest for path, digest in resolved.items()}
    saved = journal.get(KEY)
    # The same file in another place is the same input.
    changed = [name for name, digest in (saved or {}).items() if digest not in now.values()]
    for name in changed:
        if not name.endswith(SOURCE):
            raise RunError(f"'{name}' is not the file that this run began with: its digest is another; restore it, or start a new run")
        line = f"'{name}' was changed since the run began: later steps use the new file"
        callback.message(line)
        journal.record_event("reward_function_changed", {"reason": line, "before": saved[name], "now": now.get(name, "")})
    if saved is None or changed:
        journal.set(KEY, now)


def verify_input_files(directory: Path, journal: Journal) -> list[Finding]:
    """Returns a finding for each recorded file that is missing or has another content now; a resume is refused where one that cannot be mended has."""
    findings = []
    for name, digest in (journal.get(KEY) or {}).items():
        path, is_source = directory / name, name.endswith(SOURCE)
        depends = f"the {'rewards' if is_source else 'prompts or rewards'} of every later step depend on it"
        try:
            if bytes_digest(path.read_bytes()) != digest:
                fix = "a resume uses it as it is now, and records so" if is_source else "restore it from a copy, or start a new run"
                findings.append(Finding(f"'{path}' does not have the digest that it had when the run began", depends, fix, stops=not is_source))
        except OSError as error:
            findings.append(Finding(f"'{path}' cannot be read: {error.strerror}", depends, "restore it from a copy", stops=False))
    return findings
