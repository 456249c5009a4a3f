"""Which checkpoint to go on from, and which ones to let go."""

import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.checkpoint.commit import discard, sweep
from tandem.trainer.checkpoint.manifest import Damaged, Manifest, read_manifest, verify

logger = logging.getLogger(__name__)


def committed_steps(checkpoints: Path) -> list[int]:
    """The steps that have a folder under ``checkpoints``, ascending; whether they are whole is not checked."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(match[1]) for path in checkpoints.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name)))


class Found(NamedTuple):
    """A whole checkpoint."""

    step: int
    folder: Path
    digest: str
    manifest: Manifest


def newest_whole(
    checkpoints: Path, ranks: Communicator, at_most: int | None = None, passed_over: Callable[[str], None] | None = None
) -> Found | None:
    """The newest checkpoint of which every byte is as it was written, of step ``at_most`` or before; the ranks share the reading
    and find the same. Damaged ones are named in the log and skipped; ``passed_over`` hears of them on every rank."""
    [steps, *_] = gather_values(ranks, committed_steps(checkpoints), "the checkpoints that there are")
    for step in reversed(steps):
        if at_most is not None and step > at_most:
            continue
        folder = checkpoints / f"step-{step}"
        found, trouble = None, None
        try:
            found = verify(folder, ranks.rank, ranks.size)
        except Damaged as error:
            trouble = str(error)
        troubles = gather_values(ranks, trouble, f"the checkpoint of step {step}")
        if found is not None and not any(troubles):
            return Found(step, folder, found[1], found[0])
        why = f"checkpoint '{folder}' is skipped: {next(text for text in troubles if text)}"
        if ranks.rank == 0:
            logger.warning("%s", why)
        if passed_over is not None:
            passed_over(why)
    return None


def prune(checkpoints: Path, keep: int, in_use: Collection[int] = ()) -> list[int]:
    """Remove all but the newest ``keep`` committed checkpoints, those ``in_use`` and what dead writers left; the steps removed. One without a marker that
    belongs to its manifest counts for nothing, and stays for inspection while it is newer than those kept."""
    sweep(checkpoints)
    kept = 0
    removed = []
    for step in reversed(committed_steps(checkpoints)):
        folder = checkpoints / f"step-{step}"
        if kept == keep:
            if step not in in_use:
                discard(folder)
                removed.append(step)
            continue
        try:
            read_manifest(folder)
        except Damaged:
            continue
        kept += 1
    return sorted(removed)
