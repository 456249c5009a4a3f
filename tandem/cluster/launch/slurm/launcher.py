"""Runs as jobs of Slurm. A job is the run's folder and one command, so that Slurm can begin it again wherever it was."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.cluster.launch.job import SAVED, last_error
from tandem.cluster.launch.launcher import Launch, LauncherName, Placed, Status
from tandem.cluster.launch.placing import placed, recorded, refuse_inline, resumed
from tandem.cluster.launch.record import Record, read_record, write_record, write_secrets
from tandem.cluster.launch.several_nodes import placed_recipe, prepared, run_folder
from tandem.cluster.launch.slurm import array
from tandem.cluster.launch.slurm.check import check, nodes_of
from tandem.cluster.launch.slurm.commands import ask, check_installed, find_job, submit
from tandem.cluster.launch.slurm.kept import folders_of
from tandem.cluster.launch.slurm.script import batch_script
from tandem.config.load import to_mapping
from tandem.config.recipe import AnyRecipe
from tandem.jobs.finished import finished_result
from tandem.jobs.prepare import read_recipe
from tandem.runtime.records.checkpoint_tiers import tiers_of
from tandem.types import UserError

_BEGINNINGS = ("tandem: ", "slurmstepd: error: ")
_BROKEN = ("NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")


@dataclass(frozen=True)
class SlurmLauncher:
    name: LauncherName = "slurm"

    def plan(self, launch: Launch) -> str:
        """Returns the batch script; of an array also its runs. Where Slurm is not installed, its partitions are not looked at."""
        if launch.array:
            return array.plan(launch)
        recipe, _ = placed_recipe(launch, nodes_of)
        if shutil.which("sinfo") is not None:
            check(recipe, run_folder(to_mapping(recipe)["run"]), Path.cwd())
        return batch_script(recipe.slurm, run_folder(to_mapping(recipe)["run"]), Path.cwd()).rstrip()

    def submit(self, launch: Launch) -> Placed:
        refuse_inline(launch, self.name, "a job")
        check_installed()
        if launch.array:
            return array.submit_array(launch)
        recipe, starts_etcd = placed_recipe(launch, nodes_of)
        check(recipe, run_folder(to_mapping(recipe)["run"]), Path.cwd())
        with prepared(recipe, launch) as directory:
            return _submitted(directory, recipe, Record("slurm", starts_etcd=starts_etcd, folder=str(Path.cwd())))

    def resume(self, directory: Path, overrides: Sequence[str]) -> Placed:
        check_installed()
        directory = directory.absolute()
        run = resumed(directory, overrides, self.name, self.status, nodes_of)
        if run.finished:
            return Placed(directory, run.finished)
        check(run.recipe, directory, Path(run.record.folder))
        return _submitted(directory, run.recipe, run.record)

    def status(self, directory: Path) -> Status:
        record, recipe = read_record(directory), read_recipe(directory)
        job = find_job(record.job) if record is not None and record.job else None
        # After Slurm was asked: a run that ends meanwhile has written its result before its job ends.
        is_finished = finished_result(recipe, directory) is not None
        if record is None or not record.job:
            return Status("finished" if is_finished else "stopped")
        if job is not None and job.is_queued:
            return Status("queued", f"job {record.job}", f"Slurm's reason: {job.reason}")
        if job is not None and job.is_running:
            return Status("running", f"job {record.job} on {job.nodes}", f"{job.used} of {job.limit}")
        if is_finished:
            return Status("finished", f"job {record.job}")
        if job is None:
            return Status("stopped", f"job {record.job}, which Slurm has forgotten", last_error(self.logs(directory), _BEGINNINGS))
        is_failed = job.exit_status not in (0, SAVED) or job.state in _BROKEN
        return Status("failed" if is_failed else "stopped", f"job {record.job}", f"{job.state}. {last_error(self.logs(directory), _BEGINNINGS)}".rstrip(" ."))

    def logs(self, directory: Path) -> tuple[Path, ...]:
        """The outputs of the run's jobs. Slurm appends what a job that was queued again writes."""
        return tuple(sorted((directory / "logs").glob("slurm-*.out"), key=lambda path: path.stat().st_mtime))

    def cancel(self, directory: Path, *, at_once: bool) -> str:
        record, status = read_record(directory), self.status(directory)
        if record is None or not status.is_active:
            raise UserError(f"the run in '{directory}' is not running on Slurm, so there is nothing to cancel")
        # A run that waits may have been on nodes before.
        is_kept = bool(folders_of(read_recipe(directory).checkpoint)) and (status.state == "running" or bool(tiers_of(directory)))
        if at_once or status.state == "queued":
            ask("scancel", record.job)
            kept = "; checkpoints that its nodes keep stay there for 'tandem resume', until the next job of Tandem on the node" if is_kept else ""
            return f"cancelled job {record.job}{kept}"
        ask("scancel", "--batch", "--signal=TERM", record.job)
        kept = "; then it removes the checkpoints that its nodes keep" if is_kept else ""
        return f"asked job {record.job} to stop after its step, which it saves first{kept}"


def _submitted(directory: Path, recipe: AnyRecipe, record: Record) -> Placed:
    (directory / "logs").mkdir(exist_ok=True)
    if recipe.slurm.all_nodes > 1:
        write_secrets(directory)
    with recorded(directory, record):
        job = submit(batch_script(recipe.slurm, directory, Path(record.folder)))
    try:
        write_record(directory, replace(record, job=job))
    except BaseException:
        ask("scancel", job)
        raise
    return placed(directory, f"submitted job {job}")
