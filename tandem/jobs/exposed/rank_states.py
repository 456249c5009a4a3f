"""Finds the heartbeats of a run's trainer ranks in its folder, for readers in another process."""

from pathlib import Path

from tandem.runtime.process.heartbeat_table import RankState, read_states


def newest_ranks(directory: Path) -> list[RankState]:
    """Returns what the trainer's ranks of the run in ``directory`` do now. Empty where no rank has begun: a run on data in one process has none."""
    tables = [*directory.glob("ranks/*/heartbeats"), *directory.glob("pod/trainer-*/heartbeats")]
    return [state for state in read_states(max(tables, key=_made)) if state.pid] if tables else []


def _made(path: Path) -> float:
    try:
        return path.parent.stat().st_mtime
    except OSError:
        return 0.0
