"""One run of any job: where it is, what it writes down, and how it ends when asked to."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tandem.runtime.records.run_records import Records


@dataclass(kw_only=True)
class Run:
    """``first_step``: where its loop begins: 0, or the step of the checkpoint that it resumes from."""

    directory: Path
    records: Records
    first_step: int = 0

    def stop(self, step: int) -> NoReturn:
        """Ends the run at ``step``, which is saved, as SIGTERM or Ctrl-C asked. Raises ``KeyboardInterrupt``."""
        resume = f"tandem resume {shlex.quote(str(self.directory))}"
        self.records.callback.message(f"stopped after step {step}, which is saved: '{resume}' continues")
        raise KeyboardInterrupt
