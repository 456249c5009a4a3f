"""Which events of a run its pages show above everything, and at the steps of its curves."""

from tandem.report.run_facts import RunFacts

ALERTS = ("damage", "mismatch", "weights_damaged", "checkpoint_damaged", "journal_lost")
"""Events after which results may not be what they should be."""
MARKED = ("recovery", "resume", "fewer_ranks", "skipped_step", "mismatch", "weights_damaged", "silent_corruption", "reward_fault")
"""Events that the curves show at their step."""
MOST_MARKS = 60


def alert_lines(run: RunFacts) -> list[str]:
    """Returns the events after which results may not be what they should be, at most one line for each kind."""
    lines = [run.note] if run.note else []
    for kind in ALERTS:
        alarms = [event["detail"] for event in run.events if event["kind"] == kind]
        if alarms:
            more = f" (and {len(alarms) - 1} more, below)" if len(alarms) > 1 else ""
            lines.append(f"{alarms[0].get('reason') or alarms[0].get('what') or kind}{more}")
    return lines


def marks(run: RunFacts) -> list[tuple[int, str]]:
    """Returns (step, event) of the newest events that belong to a step."""
    marks = [(int(event["detail"].get("step", 0)), event["kind"].replace("_", " ")) for event in run.events if event["kind"] in MARKED]
    return list(dict.fromkeys(marks))[-MOST_MARKS:]
