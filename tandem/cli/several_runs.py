"""A command for several runs: one that cannot be shown or stopped is a line, and the others follow."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.types import UserError


def for_each_run(directories: Sequence[str], act: Callable[[Path], None]) -> int:
    """Calls ``act`` for each of ``directories``; returns the exit status, that of the worst error. Raises what ``act`` raises where there is a single one."""
    from tandem.cli.main import fail

    if len(directories) == 1:
        act(Path(directories[0]))
        return 0
    status = 0
    for directory in map(Path, directories):
        try:
            act(directory)
        except UserError as error:  # A RunError is one.
            sys.stdout.flush()
            status = max(status, fail(str(error), error.exit_code))
    return status
