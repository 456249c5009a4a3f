"""Job arrays: the runs of a sweep as the elements of one job, each with a folder, a name and a record of its own, so that each is shown, stopped and resumed as
any other run."""

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.cluster.launch.launcher import Launch, Placed
from tandem.cluster.launch.record import Record, write_record, write_secrets
from tandem.cluster.launch.several_nodes import placed_recipe, prepared
from tandem.cluster.launch.slurm.check import check, nodes_of
from tandem.cluster.launch.slurm.commands import ask, submit
from tandem.cluster.launch.slurm.script import batch_script
from tandem.config.bundled import recipe_file
from tandem.config.load import apply_overrides, read_yaml
from tandem.config.recipe import AnyRecipe
from tandem.config.yaml_text import read_mapping
from tandem.runtime.process.program import program
from tandem.types import UserError

MOST_ELEMENTS = 10_000
_MOST_BYTES = 2**22
_SHOWN = 3


def read_array(path: Path) -> tuple[tuple[str, ...], ...]:
    """Returns the overrides of each run of a sweep: a YAML file whose ``runs`` is a list of mappings of keys. Raises ``UserError``."""
    example = "write 'runs:' and a line for each, such as - {trainer.learning_rate: 0.001}"
    content = read_mapping(
        str(path), f"'{path}'", _MOST_BYTES, why_short="the runs of an array are a short YAML file", missing="name the file with the runs of the array",
        wrong=f"has no runs; {example}",
    )  # fmt: skip
    data = content.get("runs")
    if set(content) != {"runs"} or not isinstance(data, list) or not all(isinstance(each, Mapping) and each for each in data):
        raise UserError(f"'{path}' has no list of runs; {example}")
    if not 1 <= len(data) <= MOST_ELEMENTS:
        raise UserError(f"'{path}' has {len(data)} runs; give 1 to {MOST_ELEMENTS}")
    found = []
    for number, each in enumerate(data):
        given = {str(key): value for key, value in each.items()}
        for key, why in (("run.name", "which is numbered"), ("slurm", "for which all runs of an array ask together")):
            if any(name == key or name.startswith(f"{key}.") for name in given):
                raise UserError(f"run {number} of '{path}' sets '{key}', {why}; give it with the command")
        found.append(tuple(f"--{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items()))
    return tuple(found)


def plan(launch: Launch) -> str:
    """Returns the batch script, and the overrides of each run."""
    base, recipes = _recipes(launch)
    first, _ = recipes[0]
    if shutil.which("sinfo") is not None:
        check(first, base, Path.cwd(), _indices(launch))
    runs = [f"# {base.name}-{number}: {shlex.join(overrides)}" for number, overrides in enumerate(launch.array)]
    return "\n".join([batch_script(first.slurm, base, Path.cwd(), _indices(launch)).rstrip(), *runs])


def submit_array(launch: Launch) -> Placed:
    """Begins all runs, or none: what cannot be placed raises ``UserError``, and leaves no folder."""
    base, recipes = _recipes(launch)
    first, _ = recipes[0]
    check(first, base, Path.cwd(), _indices(launch))
    with contextlib.ExitStack() as stack:
        placed: list[tuple[Path, Record]] = []
        for recipe, starts_etcd in recipes:
            directory = stack.enter_context(prepared(recipe, launch))
            (directory / "logs").mkdir(exist_ok=True)
            if recipe.slurm.all_nodes > 1:
                write_secrets(directory)
            placed.append((directory, Record("slurm", starts_etcd=starts_etcd, folder=str(Path.cwd()))))
            # The job reads it, and may begin before this process goes on.
            write_record(*placed[-1])
        base = Path(str(placed[0][0])[: -len("-0")])
        job = submit(batch_script(first.slurm, base, Path.cwd(), _indices(launch)))
        try:
            for number, (directory, record) in enumerate(placed):
                write_record(directory, replace(record, job=f"{job}_{number}"))
        except BaseException:
            ask("scancel", job)
            raise
    here = [shlex.quote(os.path.relpath(directory)) for directory, _ in placed]
    listed = ", ".join(here[:_SHOWN]) + (f", ... {here[-1]}" if len(here) > _SHOWN else "")
    every = f"{os.path.relpath(base)}-*"
    commands = "\n".join(f"{program()} {command} {every}" for command in ("status", "logs", "cancel"))
    return Placed(base.parent, f"submitted job {job}: {len(here)} runs {listed}\n{commands}")


def _recipes(launch: Launch) -> tuple[Path, list[tuple[AnyRecipe, bool]]]:
    """Returns the path of the runs without their numbers, and each recipe with whether its job starts an etcd. Raises ``UserError`` for one that is invalid."""
    data: Mapping[str, Any] = apply_overrides(read_yaml(recipe_file(launch.recipe)), launch.overrides)
    run = data.get("run")
    own = run if isinstance(run, Mapping) else {}
    name = str(own.get("name") or Path(launch.recipe).stem)
    if not 0 <= launch.array_limit <= MOST_ELEMENTS:
        raise UserError(f"--array-limit is {launch.array_limit}; it must be between 0 (all at once) and {MOST_ELEMENTS}")
    recipes = []
    for number, overrides in enumerate(launch.array):
        element = replace(launch, overrides=(*launch.overrides, *overrides, f"--run.name={name}-{number}"), array=())
        try:
            recipes.append(placed_recipe(element, nodes_of))
        except UserError as error:
            raise UserError(f"run {number} of the array: {error}") from None
    directory = Path(recipes[0][0].run.directory).absolute()
    if any(Path(recipe.run.directory).absolute() != directory for recipe, _ in recipes):
        raise UserError("the runs of an array have different values of 'run.directory'; give it with the command")
    return directory / name, recipes


def _indices(launch: Launch) -> str:
    return f"0-{len(launch.array) - 1}" + (f"%{launch.array_limit}" if launch.array_limit else "")
