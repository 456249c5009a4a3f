"""What every scheduler's launcher does around its own call: what it refuses, the record of the run, and what it tells its user."""

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.cluster.launch.launcher import Launch, LauncherName, Placed, Status
from tandem.cluster.launch.record import Record, read_record, write_record
from tandem.cluster.launch.several_nodes import NodesOf, check_not_running, for_nodes
from tandem.config.load import to_mapping
from tandem.config.recipe import AnyRecipe
from tandem.jobs.prepare import check_resume, read_recipe
from tandem.runtime.process.program import program
from tandem.types import UserError


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that another job is to continue. ``record``: of that job, whose id is still the earlier one's. ``finished``: what the user is told of a run that
    has finished, and is not continued."""

    recipe: AnyRecipe
    record: Record
    finished: str


def refuse_inline(launch: Launch, name: LauncherName, what: str) -> None:
    """Raises ``UserError`` for a run in one process, which a scheduler's ``what`` is not."""
    if launch.inline:
        raise UserError(f"--inline is one process on this machine, and '--on {name}' {what} on others; leave one of them out")


def resumed(
    directory: Path, overrides: Sequence[str], name: LauncherName, status: Callable[[Path], Status], nodes_of: NodesOf, *, etcd_is_here: bool = True
) -> Resumed:
    """Returns the run in ``directory``, with new values of keys, for another job of launcher ``name``. ``status``: of a run that this launcher has placed.
    Raises ``UserError`` for one that cannot be resumed."""
    record = read_record(directory) or Record(name, folder=str(Path.cwd()))
    check_not_running(directory, status(directory) if record.launcher == name else Status("stopped"))
    more, starts_etcd = for_nodes(to_mapping(read_recipe(directory, overrides)), directory, nodes_of, etcd_is_here=etcd_is_here)
    recipe, finished = check_resume(directory, [*overrides, *more])
    is_given = any(override.startswith("--coordination.endpoints=") for override in overrides)
    starts_etcd = (record.starts_etcd or starts_etcd) and not is_given
    return Resumed(recipe, replace(record, launcher=name, starts_etcd=starts_etcd, overrides=(*overrides, *more)), finished)


@contextlib.contextmanager
def recorded(directory: Path, record: Record) -> Iterator[None]:
    """Inside, the run has ``record``: its job reads it, and may begin before this process goes on. If the block raises, it has the earlier one again."""
    before = read_record(directory)
    write_record(directory, record)
    try:
        yield
    except BaseException:
        if before is not None:
            write_record(directory, before)
        raise


def placed(directory: Path, what: str) -> Placed:
    """Returns a run that was placed as ``what``, with the commands that follow it."""
    here = shlex.quote(os.path.relpath(directory))
    return Placed(directory, f"{what}: run {here}\n{program()} status {here}\n{program()} logs {here} --follow\n{program()} cancel {here}")
