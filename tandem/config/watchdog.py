"""Section ``watchdog``: when what is waited for counts as stuck, and the alarms of the controller."""

from dataclasses import dataclass

from tandem.config.limits import MOST_GIB, check_seconds
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """The deadlines of waits, learned from measured times, and the alarms of the controller. See `hybrid.md`, Watchdog."""

    deadline_factor: float = 10.0
    """What takes this many times longer without a sign of life than it ever did before counts as stuck: a call of a sidecar, or a worker of several that
    finishes no group. It is replaced."""
    min_deadline_s: float = 60.0
    """Shortest time in seconds after which something counts as stuck. The longest is `machine.call_deadline_s`, which also holds until times were measured."""
    memory_alarm_gib: float = 4.0
    """Memory of the run's controller, in GiB, above which it raises an alarm."""
    lag_alarm_s: float = 5.0
    """Seconds that the loop of the controller may stand still before it raises an alarm."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_seconds("watchdog", self, "min_deadline_s", "lag_alarm_s")
        if not self.deadline_factor > 1:
            raise UserError(f"'watchdog.deadline_factor' is {self.deadline_factor:g}; it must be more than 1, as the slowest so far is never stuck")
        if not 0 < self.memory_alarm_gib <= MOST_GIB:
            raise UserError(f"'watchdog.memory_alarm_gib' is {self.memory_alarm_gib:g}; it must be above 0, at most {MOST_GIB}")
