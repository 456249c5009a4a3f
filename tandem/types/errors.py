"""Errors that cross rooms."""


class UserError(Exception):
    """Something the user can mend.

    The message is one line that names the thing, the value and the fix. The command line prints it as it is and exits
    with ``exit_code``: 2 for a usage or configuration error, 1 for a run that failed.
    """

    exit_code = 2


class EndlessTemplate(UserError):
    """A chat template that computed for longer than it may: another form of the same messages is not tried."""


class RunError(UserError):
    """A run that cannot go on. One line, exit code 1."""

    exit_code = 1


class CollectiveError(RunError):
    """A collective failed or did not end: another rank is dead, hangs, or makes another call."""


class EngineDied(RunError):
    """A tensor-parallel rank of an engine died or hangs, so that the engine cannot go on. A new one can take its place."""


class DamagedOffload(RunError):
    """Offloaded tensors that came back with other bytes than were saved. A checkpoint has them."""


class DamagedWeights(RunError):
    """Weights in shared memory whose bytes are not those of their manifest. The trainer can register them again."""
