"""Starts or resumes a run of any job: checks it and chooses the job."""

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, Recipe, load_config, recipe_of
from tandem.jobs.callbacks import Callbacks
from tandem.jobs.checks.chosen_layout import on_this_machine
from tandem.jobs.exposed.exposed_run import check_metrics, exposed, metrics_listener
from tandem.jobs.finished import check_steps, describe_finished, finished_result
from tandem.jobs.hub_models import describe_download, with_commits
from tandem.jobs.prepare import check_may_change, new_directory, read_recipe
from tandem.jobs.python_inputs import Rewards, python_inputs, with_dataset_task, written_for_checks
from tandem.jobs.result import RunResult
from tandem.jobs.run_files import INPUTS_FOLDER, SFT_FOLDER, no_room, record_config, write_recipe
from tandem.jobs.tracked import Tracked
from tandem.jobs.uploads import check_upload_is_free
from tandem.jobs.verify.resume_checks import check_recipe_text, check_records
from tandem.runtime.callback import Callback
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_lock import RunLock
from tandem.runtime.traces.exporter import check_traces, exporting
from tandem.trackers.open import check_trackers
from tandem.trackers.tracker import Status
from tandem.types import RunError, UserError


def train(
    recipe: AnyRecipe | str | Path | Mapping[str, Any], *, rewards: Rewards | None = None, dataset: Any = None, callbacks: Sequence[Callback] = (),
    progress: bool = True, inline: bool = False, recipe_path: str | Path = "", faults: FaultPlan | None = None,
) -> RunResult:
    """Trains as ``recipe`` says, in a new folder, and returns the result.

    Ctrl-C, and SIGTERM, finish the step, save it and raise ``KeyboardInterrupt``; a second one stops at once. ``resume`` continues the run in both
    cases. Outside the main thread of a program signals do not reach the run.

    Args:
        recipe: A YAML file, the name of a recipe that comes with Tandem, a mapping of sections, or what ``load_config`` returns.
        rewards: Reward functions instead of the recipe's: functions, ``module:function`` or addresses, each alone or in a pair with its weight.
        dataset: Prompts instead of the recipe's: a ``datasets.Dataset``, a list of dicts, a pandas data frame, a path or a name on the Hub.
        callbacks: Receive the events of the run; see ``tandem.Callback``.
        progress: Show the progress: a panel in a terminal, a display that updates itself in a notebook, otherwise lines on standard error.
        inline: Run everything of reinforcement learning in this process, for a debugger, instead of a pod of processes.
        recipe_path: Names the run's folder, where ``recipe`` is not a file and ``run.name`` is empty.
        faults: Faults to inject, for tests.

    Raises:
        UserError: The run cannot work; before any work.
        RunError: The run failed, or a callback raised or stopped it.
        KeyboardInterrupt: The run was stopped by a signal.
    """
    if isinstance(recipe, str | Path):
        recipe_path = recipe_path or recipe
        recipe = load_config(recipe)
    elif isinstance(recipe, Mapping):
        recipe = recipe_of(recipe if dataset is None else with_dataset_task(recipe))
    told = Callbacks(callbacks)
    _check_inline(recipe, inline)
    check_metrics(recipe.metrics)
    check_traces(recipe.traces)
    recipe, layout = on_this_machine(with_commits(recipe))
    inputs = python_inputs(recipe, rewards, dataset)
    with written_for_checks(inputs) as checked:
        warnings = [line for line in _check(checked) if line.startswith("warning: ")]
    check_upload_is_free(recipe.checkpoint)
    with metrics_listener(recipe.metrics) as listener:
        directory = new_directory(recipe.run, Path(recipe_path).stem or "run")
        recipe = inputs.write(directory / INPUTS_FOLDER)
        write_recipe(recipe, directory)
        with _shown(told, progress):
            for line in [layout, *warnings] if layout else warnings:
                told.message(line)
            return _execute(recipe, directory, inline, told, faults, listener)


def _check(recipe: AnyRecipe) -> list[str]:
    """Returns what the run will need, one line for each figure. Raises ``UserError`` or ``RunError`` where the run cannot work."""
    check_trackers(recipe.trackers)
    # Of each kind of run, what it needs alone is imported: all of it takes as long as the rest of the start.
    if isinstance(recipe, PretrainRecipe):
        from tandem.jobs.checks.check_data import check_data_run

        return check_data_run(recipe)
    from tandem.jobs.checks.check_rl import check_rl_run

    return check_rl_run(recipe).lines()


def _check_inline(recipe: AnyRecipe, inline: bool) -> None:
    """Raises ``UserError`` if a run that is to be ``inline`` needs processes."""
    if isinstance(recipe, Recipe):
        from tandem.pod.start import check_inline

        check_inline(recipe, inline)
    elif inline and recipe.parallel.world > 1:
        raise UserError(f"--inline is one process and this run has {recipe.parallel.world} ranks; leave --inline out or set parallel to 1")


def resume(
    run_directory: str | Path, *, callbacks: Sequence[Callback] = (), progress: bool = True, inline: bool = False, overrides: Sequence[str] = (),
    faults: FaultPlan | None = None,
) -> RunResult:
    """Resumes the run in ``run_directory`` from its newest whole checkpoint, after its records were verified. ``overrides``: new values of the keys
    that ``may_change`` allows; they are written to the run's recipe, unless the run is refused with them. A run that has finished is only reported,
    unless they ask for further steps. The other arguments are those of ``train``."""
    told = Callbacks(callbacks)
    with _shown(told, progress):
        return _resume(Path(run_directory), told, inline, overrides, faults)


def _resume(directory: Path, callback: Callbacks, inline: bool, overrides: Sequence[str], faults: FaultPlan | None) -> RunResult:
    try:
        recipe = read_recipe(directory, overrides)
    except UserError:
        check_recipe_text(directory)
        raise
    _check_inline(recipe, inline)
    check_records(directory, isinstance(recipe, Recipe), callback)
    check_may_change(overrides)
    finished = finished_result(recipe, directory)
    if finished is not None:
        callback.message(describe_finished(recipe, finished, overrides))
        return finished
    check_steps(recipe, directory)
    # On another machine, or after its cache was emptied, they are not there. Nothing reads the weights again once the stage has ended.
    recipe = with_commits(recipe, "description" if (directory / SFT_FOLDER / "model").is_dir() else "model")
    if overrides or not (directory / "journal.sqlite").exists():
        # A run that was only prepared was checked by no machine that it works on.
        for line in _check(recipe):
            if line.startswith("warning: "):
                callback.message(line)
    before = _write_new_values(recipe, directory) if overrides else recipe
    try:
        check_traces(recipe.traces)
        with metrics_listener(recipe.metrics) as listener:
            return _execute(recipe, directory, inline, callback, faults, listener, resumed=True)
    except UserError as error:
        # A run that failed at work goes on with the new values; one that was refused keeps the old ones.
        if overrides and not isinstance(error, RunError):
            _write_new_values(before, directory)
        raise


def _write_new_values(recipe: AnyRecipe, directory: Path) -> AnyRecipe:
    """Writes ``recipe`` to the run's folder and returns the one that was there. Raises ``UserError`` where the run is in use: its processes
    read the file whenever they are replaced."""
    with RunLock(directory):
        before = read_recipe(directory)
        write_recipe(recipe, directory)
        if (directory / "journal.sqlite").exists():
            with Journal(directory / "journal.sqlite") as journal:
                record_config(directory, journal)
    return before


@contextlib.contextmanager
def _shown(told: Callbacks, progress: bool) -> Iterator[None]:
    """Shows the events that ``told`` is told of, if ``progress`` is true."""
    if not progress:
        yield
        return
    from tandem.jobs.display import python_display

    with python_display() as shown:
        told.add(shown)
        yield


def _execute(
    recipe: AnyRecipe, directory: Path, inline: bool, callback: Callbacks, faults: FaultPlan | None, listener: socket.socket | None, resumed: bool = False
) -> RunResult:
    """Runs ``recipe`` in ``directory``, whose metrics are answered on ``listener``. Raises ``RunError`` where a callback failed or stopped the run."""
    tracked = Tracked(recipe.trackers, callback.message)
    if recipe.trackers.names:
        callback.add(tracked)
    status: Status = "stopped"
    try:
        with exposed(recipe, directory, listener, callback), exporting(recipe.traces):
            result = _run_job(recipe, directory, inline, callback, faults, resumed)
        status = "finished"
    except KeyboardInterrupt:
        callback.raise_why(directory, is_stopped=True)
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunError(no_room(directory, error)) from error
    finally:
        with contextlib.suppress(OSError):  # A full disk ends the run in a line of its own.
            tracked.close(status)
    callback.raise_why(directory, is_stopped=False)
    return result


def _run_job(
    recipe: AnyRecipe, directory: Path, inline: bool, callback: Callback, faults: FaultPlan | None, resumed: bool
) -> RunResult:
    if isinstance(recipe, PretrainRecipe) and recipe.parallel.world > 1:
        from tandem.jobs.data_run.supervise import supervise

        return supervise(recipe, directory, callback, resumed, faults)
    if isinstance(recipe, PretrainRecipe):
        # It needs torch, which a pod's controller runs without.
        from tandem.jobs.data_run.start_data import execute_data_run

        return execute_data_run(recipe, directory, callback, resumed)
    from tandem.jobs.start_rl import execute_rl

    return execute_rl(recipe, directory, inline, callback, faults, resumed)


def dry_run(recipe: AnyRecipe, recipe_path: str | Path, inline: bool = False) -> str:
    """Returns what the run will need, after every check of ``train`` that needs no work."""
    _check_inline(recipe, inline)
    check_metrics(recipe.metrics)
    check_traces(recipe.traces)
    check_trackers(recipe.trackers)
    from tandem.jobs.checks.predicted_time import describe_data_time, describe_rl_time

    recipe, layout = on_this_machine(with_commits(recipe, "description"))
    if isinstance(recipe, PretrainRecipe):
        from tandem.jobs.checks.check_data import check_data_run

        lines = [*check_data_run(recipe), describe_data_time(recipe)]
    else:
        from tandem.jobs.checks.check_rl import check_rl_run

        plan = check_rl_run(recipe)
        lines = [*plan.lines(), describe_rl_time(recipe, plan.prompts)]
    return "\n".join([f"recipe {recipe_path} is valid", *describe_download(recipe.model), *([layout] if layout else []), *lines])
