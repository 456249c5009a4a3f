"""A run of any job: its folder, its records, and its stop on request."""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tandem.jobs.run_files import RunStopped, resume_command
from tandem.runtime.records.run_records import Records


@dataclass(kw_only=True)
class Run:
    """A run of any job. ``first_step``: the first step of its loop: 0, or the step of the checkpoint that it resumes from."""

    directory: Path
    records: Records
    first_step: int = 0

    def stop(self, step: int) -> NoReturn:
        """Stops the run at ``step``, whose checkpoint is saved, after SIGTERM or Ctrl-C. Raises ``RunStopped``."""
        self.records.callback.message(f"stopped after step {step}, which is saved: '{resume_command(self.directory)}' continues")
        raise RunStopped
