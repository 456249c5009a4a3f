"""Whether a run has finished, and whether it may take another number of steps than it began with. Imports no torch."""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from tandem.config.evaluation import EvaluationConfig
from tandem.config.load import build
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import ON_DATA, AnyRecipe, Recipe
from tandem.config.yaml_text import parse_yaml
from tandem.jobs.result import RunResult
from tandem.jobs.verify.verify_config import KEY as CONFIG_KEY
from tandem.jobs.verify.verify_records import steps_on_disk
from tandem.report.run_facts import REPORT, RESULT_KEY
from tandem.runtime.records.journal import Journal
from tandem.trainer.lr_schedule import learning_rate
from tandem.types import UserError


def target_reached(journal: Journal, settings: EvaluationConfig, step: int) -> bool:
    """Returns whether the last ``consecutive`` sampled evaluations up to ``step`` all reached the target."""
    last = step - step % settings.every_steps
    # Lazily: ``consecutive`` may be more than there are evaluations.
    recent = (journal.evaluation(last - k * settings.every_steps, "sampled") for k in range(settings.consecutive))
    return all(each is not None and each["accuracy"] >= settings.target_accuracy for each in recent)


def finished_result(recipe: AnyRecipe, directory: Path) -> RunResult | None:
    """Returns the result of the run in ``directory`` if it has finished, its last checkpoint is there and ``recipe`` asks for no further step, else
    ``None``."""
    if not (directory / "journal.sqlite").is_file() or not (directory / "model" / "config.json").is_file():
        return None
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        saved = journal.get(RESULT_KEY)
        if saved is None:
            return None
        result = RunResult.from_json(saved)
        reached = target_reached(journal, recipe.evaluation, result.steps) if isinstance(recipe, Recipe) else None
    if (result.steps != recipe.run.max_steps and not reached) or max(steps_on_disk(directory), default=0) != result.steps:
        return None
    model = directory / "model"
    commands = tuple(command.replace(shlex.quote(str(result.model)), shlex.quote(str(model))) for command in result.commands)
    return replace(result, directory=directory, model=model, report=directory / REPORT, commands=commands, reached=reached)


def describe_finished(recipe: AnyRecipe, result: RunResult, overrides: Sequence[str] = ()) -> str:
    """Returns one line: that the run has finished, why, and how to train it further."""
    resume = f"tandem resume {shlex.quote(str(result.directory))}"
    if result.reached:
        assert isinstance(recipe, Recipe)
        why = f"it reached its target, a held-out accuracy of {recipe.evaluation.target_accuracy:g}, after {result.steps} steps"
        more = f"To train it further, give a higher target: '{resume} --evaluation.target_accuracy=VALUE'"
        if any("run.max_steps=" in override for override in overrides):
            more += "; more steps alone change nothing"
    else:
        why = f"it has taken all of its {result.steps} steps"
        more = f"To train it further, give it more steps: '{resume} --run.max_steps={2 * result.steps}'"
        if first_other_rate(recipe, 2 * result.steps, result.steps) is not None:
            more = f"To train it further, start a new run with --model.path={shlex.quote(str(result.model))}"
            more += " --model.create=null" if recipe.model.create is not None else ""
            more += " --sft=null" if isinstance(recipe, Recipe) and recipe.sft is not None else ""
            more += f": trainer.schedule '{recipe.trainer.schedule}' ended with its last step"
    return f"'{result.directory}' has finished: {why}; nothing is repeated. {more}"


def check_steps(recipe: AnyRecipe, directory: Path) -> None:
    """Raises ``UserError`` where the run in ``directory`` cannot continue with the ``run.max_steps`` of ``recipe``: it has taken more steps, or the
    learning rates of the steps that it has taken would have been others."""
    taken, steps = max(steps_on_disk(directory), default=0), recipe.run.max_steps
    if steps < taken:
        raise UserError(f"'run.max_steps' is {steps}, and '{directory}' has taken {taken} steps; give {taken} or more")
    begun = _begun_with(directory)
    if begun is None or begun.run.max_steps == steps:
        return
    other = first_other_rate(begun, steps, taken)
    if other is not None:
        raise UserError(
            f"'run.max_steps' cannot change from {begun.run.max_steps} to {steps}: it is where trainer.schedule '{begun.trainer.schedule}' ends, and step "
            f"{other}, already taken, would have had another learning rate; resume without it, or start a new run with "
            f"--model.path={shlex.quote(str(directory / 'model'))}"
        )


def first_other_rate(recipe: AnyRecipe, steps: int, taken: int) -> int | None:
    """Returns the first of the ``taken`` steps whose learning rate would be another if the run had ``steps`` in all, ``None`` if all are the same."""
    trainer, before = recipe.trainer, recipe.run.max_steps
    if trainer.schedule == "constant":
        return None
    same = (learning_rate(trainer, step, before) == learning_rate(trainer, step, steps) for step in range(taken))
    return next((step for step, is_same in enumerate(same) if not is_same), None)


def remove_model(folder: Path) -> None:
    """Removes the exported model of an earlier end of the run, which a later one replaces."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _begun_with(directory: Path) -> AnyRecipe | None:
    """Returns the recipe that the journal has, with which the steps so far were taken; ``None`` without one."""
    if not (directory / "journal.sqlite").is_file():
        return None
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        text = journal.get(CONFIG_KEY)
    if text is None:
        return None
    try:
        data = parse_yaml(text, "config.yaml")
        return build(PretrainRecipe, data) if data["algorithm"]["name"] in ON_DATA else build(Recipe, data)
    except (yaml.YAMLError, UserError, KeyError):
        return None
