"""The files of a run of any job: creates and opens them, and cuts them to the checkpoint that the run continues from."""

import contextlib
import shlex
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from tandem.config.load import to_mapping
from tandem.config.model import ModelConfig
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.config.run_paths import with_run_paths
from tandem.jobs.verify.verify_config import KEY as CONFIG_KEY
from tandem.jobs.verify.verify_config import verify_config
from tandem.layout.mesh import MeshShape
from tandem.model.model_source import found_model
from tandem.report.run_facts import NODE_KEY
from tandem.runtime.callback import Callback
from tandem.runtime.machine.numerics import check_numerics
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.runtime.process.program import program
from tandem.runtime.process.temporary import sweep_temporary
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.logs import setup
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.records.run_lock import RunLock
from tandem.storage.folder_manifest import replace_file
from tandem.types import RunError

PRIVATE = 0o700
"""Permissions of a run's folder: its samples, its logs and the pod's credential are for its user alone."""
SFT_FOLDER = "sft"
"""The folder, in that of a run of reinforcement learning, of the supervised fine-tuning that it begins with."""
CRITIC_FOLDER = "critic"
"""The folder, in that of a run with a critic of its own, of the trained one."""
DRAFT_FOLDER = "draft"
"""The folder, in that of a run that trains a draft head beside the policy, of the trained one."""

INPUTS_FOLDER = "inputs"
"""The folder, in that of a run, with the reward functions and the rows that ``train`` was given as objects."""


class RunStopped(KeyboardInterrupt):
    """The run was stopped by a signal, and the user was told how to continue it."""


def initial_folder(model: ModelConfig, directory: Path) -> Path:
    """Returns the folder of the model that the run in ``directory`` is given or makes."""
    return found_model(model.path).resolve() if model.path is not None else directory / "models" / "initial"


def rl_start_folder(recipe: Recipe, directory: Path) -> Path:
    """Returns the folder, now or later, of the model that the reinforcement learning of the run in ``directory`` starts from."""
    return initial_folder(recipe.model, directory) if recipe.sft is None else directory / SFT_FOLDER / "model"


def folder_to_resume(directory: Path) -> Path:
    """Returns the folder that ``tandem resume`` takes for what runs in ``directory``: if that is the stage ``sft`` of a run, the run's own."""
    is_stage = directory.name == SFT_FOLDER and (directory.parent / "config.yaml").is_file()
    return directory.parent if is_stage else directory


def no_room(directory: Path, error: OSError) -> str:
    """Returns the line for a run in ``directory`` that a full disk has ended: which of its disks have how much room, and the command that continues it."""
    named, free = [Path(error.filename)] if isinstance(error.filename, str) else [], []
    for folder in dict.fromkeys((*named, directory, Path(tempfile.gettempdir()), Path("/dev/shm"))):
        with contextlib.suppress(OSError):
            free.append(f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB of '{folder}'")
    return f"no space left on a disk of the run (free: {', '.join(free)}); make room, then '{resume_command(directory)}' continues it"


def resume_command(directory: Path) -> str:
    """Returns the command that continues what runs in ``directory``."""
    return f"{program()} resume {shlex.quote(str(folder_to_resume(directory)))}"


def write_recipe(recipe: AnyRecipe, directory: Path) -> None:
    """Writes ``config.yaml`` by one atomic rename."""
    data = with_run_paths(to_mapping(recipe), directory, directory.parent if directory.name == SFT_FOLDER else directory)
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    replace_file(directory / "config.yaml", text)


@contextlib.contextmanager
def begun(directory: Path, role: str, callback: Callback, max_steps: int, target: float | None = None) -> Iterator[None]:
    """Holds the run's lock and logs as ``role``. ``target``: the held-out accuracy that the run trains to, ``None`` without one. Raises
    ``RunStopped`` where a signal ends the body, after a message that says how to continue."""
    with RunLock(directory):
        sweep_temporary()
        setup(role, directory / "logs")
        callback.started(str(directory), max_steps, target)
        try:
            yield
        except RunStopped:
            raise
        except KeyboardInterrupt:
            callback.message(f"stopped at once: '{resume_command(directory)}' continues from the newest checkpoint")
            raise RunStopped from None


@contextlib.contextmanager
def opened_files(directory: Path, fault_point: FaultPoint = no_fault) -> Iterator[tuple[Journal, MetricsFile]]:
    """Yields the run's journal and its ``metrics.jsonl``, which only one process of a run writes. Raises ``RunError`` if ``config.yaml`` is not the
    recipe that the run began with."""
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(directory / "journal.sqlite", fault_point=fault_point))
        check_config(directory, journal)
        yield journal, stack.enter_context(contextlib.closing(MetricsFile(directory / "metrics.jsonl")))


def check_config(directory: Path, journal: Journal) -> None:
    """Raises ``RunError`` if ``config.yaml`` has another value than the run began with, of a key that may not change; journals its text."""
    for finding in verify_config(directory, journal, is_stage=folder_to_resume(directory) != directory):
        if finding.stops:
            raise RunError(finding.line())
    record_config(directory, journal)


def record_config(directory: Path, journal: Journal) -> None:
    """Journals the text of ``config.yaml``."""
    text = (directory / "config.yaml").read_text(encoding="utf-8")
    if journal.get(CONFIG_KEY) != text:
        journal.set(CONFIG_KEY, text)


def continue_from(
    step: int, journal: Journal, metrics: MetricsFile, callback: Callback, *, numerics: dict[str, str | int], shape: MeshShape, device: str,
    journal_loaded: Callable[[], None], resumed: bool,
) -> None:
    """Cuts the files to the checkpoint of ``step`` (0: the start), and reports a resume. ``journal_loaded`` journals a checkpoint that was committed
    right before the run died. Raises ``UserError`` where this machine cannot give the same bits."""
    _check_numerics(journal, numerics, shape, device, step, callback)
    if journal.get(NODE_KEY) != socket.gethostname():
        journal.set(NODE_KEY, socket.gethostname())
    if resumed:
        journal.cut_after(step)
    journal_loaded()
    metrics.cut_after(step)
    if resumed:
        journal.record_event("resume", {"step": step, "data": shape.data})
        sampled = [result["accuracy"] for _, kind, result in journal.evaluations() if kind == "sampled"]
        callback.resumed(step, sampled[-1] if sampled else None)


def _check_numerics(journal: Journal, now: dict[str, str | int], shape: MeshShape, device: str, step: int, callback: Callback) -> None:
    """Raises ``UserError`` where results from ``step`` on would not be bit-identical, unless the mesh or the device was changed on purpose."""
    saved, mesh = journal.get("numerics"), asdict(shape)
    before, on = journal.get("mesh", asdict(MeshShape())), journal.get("device", "cpu")
    if saved is not None and before == mesh and on == device:
        check_numerics(saved, now)
        return
    if saved is not None and on != device:
        callback.message(f"Resuming on {device} at step {step}. Results will not be bit-identical to the {on} run.")
    if saved is not None:
        detail: dict[str, Any] = {"step": step, "before": before, "now": mesh, **({"device": device} if on != device else {})}
        journal.record_event("mesh", detail)
    journal.set("numerics", now)
    journal.set("mesh", mesh)
    journal.set("device", device)
