"""Copies of a run's checkpoints in object storage, with the files that the run is continued from where its folder is lost."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.recipe import Recipe, load_config
from tandem.jobs.run_files import INPUTS_FOLDER, PRIVATE, rl_start_folder
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import KEY as LOCAL_KEY
from tandem.runtime.records.sqlite_file import snapshot
from tandem.storage.files import open_storage
from tandem.types import UserError

if TYPE_CHECKING:
    # It needs torch, which a controller without uploads does not load.
    from tandem.trainer.checkpoint.uploader import Uploader

CONFIG, METRICS, JOURNAL = "config.yaml", "metrics.jsonl", "journal.sqlite"
START = "start/"
"""Names of the files of the model that reinforcement learning starts from, which is its reference too."""


def make_uploader(
    checkpoint: CheckpointConfig, directory: Path, say: Callable[[str], None], start: Path | None = None
) -> "Uploader | None":
    """Returns what copies the checkpoints of the run in ``directory`` to ``checkpoint.upload`` (``None`` where that is empty). ``start``: a folder of
    the run that is copied once, as what ``train`` was given is. ``say`` is told of a copy that failed."""
    if not checkpoint.upload:
        return None
    from tandem.trainer.checkpoint.uploader import Uploader

    def run_files() -> Mapping[str, Path]:
        copy = directory / f"{JOURNAL}.upload"
        snapshot(directory / JOURNAL, copy, "the copy of the run's journal")
        return {CONFIG: directory / CONFIG, METRICS: directory / METRICS, JOURNAL: copy}

    once = {f"{START}{path.name}": path for path in sorted(start.iterdir())} if start is not None else {}
    once |= {f"{INPUTS_FOLDER}/{path.name}": path for path in sorted((directory / INPUTS_FOLDER).glob("*"))}
    storage = open_storage(checkpoint.upload, create=True)
    return Uploader(storage, directory / "checkpoints", checkpoint.keep, run_files, once, say)


def check_upload_is_free(checkpoint: CheckpointConfig) -> None:
    """Raises ``UserError`` where a new run's checkpoints would be copied to where those of another one are."""
    if not checkpoint.upload:
        return
    from tandem.trainer.checkpoint.remote import uploaded_steps

    if uploaded_steps(open_storage(checkpoint.upload, create=True)):
        raise UserError(
            f"'checkpoint.upload' is '{checkpoint.upload}', which holds a run's checkpoints; name another place, or continue that run with "
            f"'tandem resume DIR --from {shlex.quote(checkpoint.upload)}'"
        )


def restore(run_directory: str | Path, url: str) -> None:
    """Makes the folder of a run again from what ``checkpoint.upload`` copied to ``url``. Raises ``UserError`` if the folder exists or ``url``
    holds no run."""
    from tandem.trainer.checkpoint.remote import fetch_file, fetch_newest

    directory, storage = Path(run_directory), open_storage(url)
    if (directory / CONFIG).exists():
        raise UserError(f"the run '{directory}' exists; 'tandem resume {shlex.quote(str(directory))}' continues it, or name another folder")
    names = {file.name for file in storage.files()}
    if CONFIG not in names:
        raise UserError(f"'{url}' holds no run: it has no {CONFIG}; name what 'checkpoint.upload' was")
    if fetch_newest(storage, directory / "checkpoints") is None:
        raise UserError(f"'{url}' holds no whole checkpoint; start the run again")
    directory.chmod(PRIVATE)

    def fetch(name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"{target.name}.tmp")
        fetch_file(storage, name, fresh)
        fresh.replace(target)

    unread = directory / f"{CONFIG}.restored"
    fetch(CONFIG, unread)
    recipe = load_config(unread)
    if isinstance(recipe, Recipe):
        start = rl_start_folder(recipe, directory)
        for name in sorted(name for name in names if name.startswith(START)):
            fetch(name, start / name.removeprefix(START))
    inputs = sorted(name for name in names if name.startswith(f"{INPUTS_FOLDER}/"))
    for name in (*inputs, METRICS, JOURNAL):
        if name in names:
            fetch(name, directory / name)
    if JOURNAL in names:
        with Journal(directory / JOURNAL) as journal:
            journal.record_event("restore", {"from": url, "numerics": journal.get("numerics")})
            # Another machine may give other bits, and a run that lost its folder continues there all the same.
            journal.set("numerics", None)
            # Checkpoints on a disk there may be newer than the rows of this copy.
            journal.set(LOCAL_KEY, None)
    # The recipe comes last: without it the folder is no run.
    unread.replace(directory / CONFIG)
