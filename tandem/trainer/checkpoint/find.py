"""Selects the checkpoint to resume from and the checkpoints to remove."""

import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.checkpoint.format.commit import discard, sweep
from tandem.trainer.checkpoint.format.manifest import MANIFEST, Damaged, Manifest, read_manifest, verify

logger = logging.getLogger(__name__)


def committed_steps(checkpoints: Path) -> list[int]:
    """Returns the steps that have a folder under ``checkpoints``, ascending; their integrity is not checked."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(match[1]) for path in checkpoints.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name)))


class VerifiedCheckpoint(NamedTuple):
    """A verified checkpoint."""

    step: int
    folder: Path
    digest: str
    manifest: Manifest


def newest_whole(
    checkpoints: Path, ranks: Communicator, at_most: int | None = None, passed_over: Callable[[str], None] | None = None
) -> VerifiedCheckpoint | None:
    """Returns the newest checkpoint, at or before step ``at_most``, in which every byte is as written; ``None`` if there is none.

    The ranks share the reading and return the same checkpoint. Damaged checkpoints are logged and skipped; ``passed_over`` is called with
    the reason on every rank."""
    [steps, *_] = gather_values(ranks, committed_steps(checkpoints), "committed checkpoints")
    for step in reversed(steps):
        if at_most is not None and step > at_most:
            continue
        checkpoint = whole_checkpoint(checkpoints / f"step-{step}", step, ranks, passed_over)
        if checkpoint is not None:
            return checkpoint
    return None


def whole_checkpoint(
    folder: Path, step: int, ranks: Communicator, passed_over: Callable[[str], None] | None = None
) -> VerifiedCheckpoint | None:
    """Returns the checkpoint in ``folder`` if every byte of it is as written, else ``None``, as ``newest_whole`` does."""
    verified, trouble = None, None
    try:
        verified = verify(folder, ranks.rank, ranks.size)
        if verified[0].step != step:
            trouble = f"its {MANIFEST} is that of step {verified[0].step}"
    except Damaged as error:
        trouble = str(error)
    troubles = gather_values(ranks, trouble, f"the checkpoint of step {step}")
    if verified is not None and not any(troubles):
        return VerifiedCheckpoint(step, folder, verified[1], verified[0])
    why = f"checkpoint '{folder}' is skipped: {next(text for text in troubles if text)}"
    if ranks.rank == 0:
        logger.warning("%s", why)
    if passed_over is not None:
        passed_over(why)
    return None


def prune(checkpoints: Path, keep: int, in_use: Collection[int] = ()) -> list[int]:
    """Removes all but the newest ``keep`` committed checkpoints, those ``in_use`` and what dead writers left; returns the removed steps.

    A checkpoint whose marker does not match its manifest is not counted, and is kept for inspection while it is newer than those kept."""
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
