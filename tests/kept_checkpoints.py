"""Waits for checkpoints in the memory of several nodes."""

import time
from collections.abc import Callable
from pathlib import Path

from tandem.runtime.records.checkpoint_tiers import tiers_of


def wait_until_kept(directory: Path, step: int, is_running: Callable[[], bool] = lambda: True) -> dict[str, list[int]]:
    """Waits until the memory of two nodes has a checkpoint of ``step`` or later of the run in ``directory``. Returns the ranks whose files each keeps."""
    ends = time.monotonic() + 240
    while True:
        for state in tiers_of(directory):
            if state.tier == "memory" and state.step >= step and len(state.where) >= 2:
                return {node: list(ranks) for node, ranks in state.where.items()}
        assert time.monotonic() < ends and is_running(), f"no checkpoint of step {step} is in the memory of two nodes"
        time.sleep(0.05)
