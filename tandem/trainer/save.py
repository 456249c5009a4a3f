"""A trainer's checkpoint: ``checkpoints/step-N`` with weights, moments and state, committed in two phases.

The folder is a Hugging Face folder too: ``model.safetensors`` has Hugging Face's names, and the files that make it
whole (``config.json``, the tokenizer) are copied beside it."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.model.decoder import Decoder
from tandem.model.huggingface import load_tensors, to_huggingface
from tandem.model.safetensors_file import read_file, write_file
from tandem.trainer.checkpoint.commit import commit_folder, damage, discard, read_digest, sweep
from tandem.trainer.optimizers.adamw import Optimizer, OptimizerState
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

MODEL, MOMENTS, STATE = "model.safetensors", "optimizer.safetensors", "trainer.json"
RESERVED = frozenset({MODEL, MOMENTS, STATE})


class HasState(Protocol):
    """An optimizer, or what ranks have gathered of theirs."""

    def state(self) -> OptimizerState:
        """What the next step depends on besides weights and gradients."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: the state after ``step`` optimizer steps. ``digest`` is over every byte of it."""

    step: int
    folder: Path
    digest: str


def save_checkpoint(
    checkpoints: Path,
    step: int,
    model: Decoder,
    optimizer: HasState,
    state: Mapping[str, Any],
    companions: Sequence[Path] = (),
    before_commit: Callable[[], None] | None = None,
) -> Checkpoint:
    """Commit ``checkpoints/step-N``. ``state`` is the trainer's own, as JSON; ``companions`` are files to copy beside
    it.

    ``before_commit`` is called when all is written and nothing is committed. Raises ``RunError`` on a full disk; the
    checkpoints before stay as they are.
    """
    final = checkpoints / f"step-{step}"
    held = optimizer.state()

    def write(folder: Path) -> None:
        write_file(folder / MODEL, to_huggingface(model))
        write_file(folder / MOMENTS, sorted(held.moments.items()))
        content = {"step": step, "updates": held.updates, "state": dict(state)}
        (folder / STATE).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for companion in companions:
            if companion.name not in RESERVED:
                shutil.copyfile(companion, folder / companion.name)
        if before_commit is not None:
            before_commit()

    if checkpoints.is_dir():
        sweep(checkpoints)
    return Checkpoint(step, final, commit_folder(final, write))


def load_checkpoint(folder: Path, model: Decoder, optimizer: Optimizer) -> dict[str, Any]:
    """Verify every digest of ``folder``, then take over its weights and moments; returns the trainer's state.

    Raises ``RunError`` for a folder that is not committed or damaged, and ``UserError`` for one of another model; model
    and optimizer are unchanged then.
    """
    trouble = damage(folder)
    if trouble is not None:
        raise RunError(f"checkpoint '{folder}' cannot be used: {trouble}; resume from an earlier one")
    content = json.loads((folder / STATE).read_text(encoding="utf-8"))
    before = optimizer.state()
    try:
        moments = dict(read_file(folder / MOMENTS))
        optimizer.load_state(OptimizerState(moments, int(content["updates"])))
        load_tensors(model, read_file(folder / MODEL))
    except (ValueError, UserError) as error:
        optimizer.load_state(before)
        raise UserError(f"checkpoint '{folder}' is of another model: {error}") from None
    state: dict[str, Any] = content["state"]
    return state


def committed_steps(checkpoints: Path) -> list[int]:
    """The steps that have a folder under ``checkpoints``, ascending; whether they are whole is not looked at."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(match[1]) for path in checkpoints.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name)))


def newest_committed(checkpoints: Path, at_most: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole, of step ``at_most`` or before; damaged ones are named in the log and
    skipped."""
    for step in reversed(committed_steps(checkpoints)):
        if at_most is not None and step > at_most:
            continue
        folder = checkpoints / f"step-{step}"
        trouble = damage(folder)
        if trouble is None:
            return Checkpoint(step, folder, read_digest(folder))
        logger.warning("checkpoint '%s' is skipped: %s", folder, trouble)
    return None


def prune(checkpoints: Path, keep: int) -> list[int]:
    """Remove all but the newest ``keep`` whole checkpoints, and what dead writers left; returns the steps removed.

    A damaged folder newer than those that stay is left for inspection. Sizes are looked at, not digests: what was
    written a moment ago need not be read again."""
    sweep(checkpoints)
    whole: list[int] = []
    removed: list[int] = []
    for step in reversed(committed_steps(checkpoints)):
        if len(whole) == keep:
            discard(checkpoints / f"step-{step}")
            removed.append(step)
        elif damage(checkpoints / f"step-{step}", digests=False) is None:
            whole.append(step)
    return sorted(removed)
