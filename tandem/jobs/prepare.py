"""The folder of a run before it works: made, read again, and what a resume may change of it. Launchers import it before anything is placed, so it imports
neither the loops nor their checks."""

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from tandem.config.load import read_yaml
from tandem.config.recipe import AnyRecipe, load_config
from tandem.config.run import RunConfig
from tandem.jobs.hub_models import with_commits
from tandem.jobs.run_files import PRIVATE, SFT_FOLDER, write_recipe
from tandem.jobs.uploads import check_upload_is_free
from tandem.jobs.verify.verify_config import MAY_CHANGE, may_change
from tandem.trainer.checkpoint.format.older_version import checkpoint_of_older_version
from tandem.types import UserError


def prepare(recipe: AnyRecipe, recipe_path: str | Path = "") -> Path:
    """Makes the folder of a run that ``resume`` begins, now or later and on this machine or another one, and returns it. What depends on the machine is
    checked there."""
    refuse_automatic(recipe)
    recipe = with_commits(recipe, "description")
    check_upload_is_free(recipe.checkpoint)
    directory = new_directory(recipe.run, Path(recipe_path).stem or "run")
    write_recipe(recipe, directory)
    return directory


def refuse_automatic(recipe: AnyRecipe) -> None:
    """Raises ``UserError`` for a layout that is to be chosen where the machines of the run are not known yet."""
    if recipe.parallel.layout == "auto":
        raise UserError(
            "'parallel.layout' is 'auto', which chooses for the GPUs of this machine, and the run is placed on others; write its layout into a recipe with "
            "'tandem plan RECIPE --gpu KIND --gpus N --emit recipe'"
        )


def check_resume(directory: Path, overrides: Sequence[str]) -> tuple[AnyRecipe, str]:
    """Returns the recipe with which the run in ``directory`` would be resumed and, if it has finished and is only reported, a line that says so. Raises
    ``UserError`` for ``overrides`` that it cannot continue with."""
    from tandem.jobs.finished import check_steps, describe_finished, finished_result

    recipe = read_recipe(directory, overrides)
    check_may_change(overrides)
    finished = finished_result(recipe, directory)
    if finished is not None:
        return recipe, describe_finished(recipe, finished, overrides)
    check_steps(recipe, directory)
    return recipe, ""


def check_may_change(overrides: Sequence[str]) -> None:
    for override in overrides:
        key = override.lstrip("-").split("=")[0]
        if not may_change(key):
            raise UserError(
                f"'{override}' cannot change when a run is resumed: a run may continue with other values of {MAY_CHANGE}, everything else stays; leave "
                "it out or start a new run"
            )


def read_recipe(directory: Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Returns the recipe of the run in ``directory``. Raises ``UserError`` where there is none, and for a run of an older version."""
    if not (directory / "config.yaml").is_file():
        raise UserError(f"'{directory}' is not a run: it has no config.yaml; name a folder under runs/")
    path, model = directory / "config.yaml", directory / "model"
    read_yaml(path)
    start = f"start a new run with --model.path={shlex.quote(str(model))}" if model.is_dir() else "start a new run"
    try:
        recipe = load_config(path)
    except UserError as error:
        # A recipe is valid when it is written.
        raise UserError(f"'{directory}' was written by another version of Tandem ({error}); resume it with that version, or {start}") from None
    for run in (directory, directory / SFT_FOLDER):
        if (checkpoint := checkpoint_of_older_version(run)) is not None:
            raise UserError(
                f"'{directory}' was written by an older version of Tandem (its checkpoint '{checkpoint.name}' has the layout of version 0.1); resume it "
                f"with that version, or {start}"
            )
    return load_config(path, overrides) if overrides else recipe


def new_directory(run: RunConfig, stem: str) -> Path:
    """Makes the run's folder: ``run.name``, or the first free name of STEM, STEM-2, STEM-3, ..."""
    parent, name = Path(run.directory), run.name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if name:
            with contextlib.suppress(FileExistsError):
                (parent / name).mkdir(PRIVATE)
                return parent / name
            raise UserError(f"the run '{parent / name}' exists; use 'tandem resume {shlex.quote(str(parent / name))}' or another run.name")
        number = 1
        while True:
            chosen = parent / (stem if number == 1 else f"{stem}-{number}")
            with contextlib.suppress(FileExistsError):
                chosen.mkdir(PRIVATE)
                return chosen
            number += 1
    except OSError as error:
        raise UserError(f"'run.directory' is '{parent}', where a folder cannot be made: {error.strerror}") from None
