"""Runs as jobs of Slurm. A job is the run's folder and one command, so that Slurm can begin it again wherever it was."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.cluster.launch.job import SAVED, last_error
from tandem.cluster.launch.launcher import Launch, LauncherName, Placed, Status
from tandem.cluster.launch.record import Record, read_record, write_record, write_secrets
from tandem.cluster.launch.several_nodes import check_not_running, for_nodes, placed_recipe, prepared, run_folder
from tandem.cluster.launch.slurm import array
from tandem.cluster.launch.slurm.check import check, nodes_of
from tandem.cluster.launch.slurm.commands import ask, check_installed, find_job, submit
from tandem.cluster.launch.slurm.script import batch_script
from tandem.config.load import to_mapping
from tandem.config.recipe import AnyRecipe
from tandem.jobs.finished import finished_result
from tandem.jobs.start import check_resume, read_recipe
from tandem.runtime.process.program import program
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
        if launch.inline:
            raise UserError("--inline is one process on this machine, and '--on slurm' a job on others; leave one of them out")
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
        record = read_record(directory) or Record("slurm", folder=str(Path.cwd()))
        check_not_running(directory, self.status(directory))
        more, starts_etcd = for_nodes(to_mapping(read_recipe(directory, overrides)), directory, nodes_of)
        recipe, finished = check_resume(directory, [*overrides, *more])
        if finished:
            return Placed(directory, finished)
        check(recipe, directory, Path(record.folder))
        is_given = any(override.startswith("--coordination.endpoints=") for override in overrides)
        record = replace(record, starts_etcd=(record.starts_etcd or starts_etcd) and not is_given)
        return _submitted(directory, recipe, replace(record, launcher="slurm", overrides=(*overrides, *more)))

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
        if at_once or status.state == "queued":
            ask("scancel", record.job)
            return f"cancelled job {record.job}"
        ask("scancel", "--batch", "--signal=TERM", record.job)
        return f"asked job {record.job} to stop after its step, which it saves first"


def _submitted(directory: Path, recipe: AnyRecipe, record: Record) -> Placed:
    (directory / "logs").mkdir(exist_ok=True)
    if recipe.slurm.nodes > 1:
        write_secrets(directory)
    before = read_record(directory)
    # The job reads it, and may begin before this process goes on.
    write_record(directory, record)
    try:
        job = submit(batch_script(recipe.slurm, directory, Path(record.folder)))
    except BaseException:
        if before is not None:
            write_record(directory, before)
        raise
    try:
        write_record(directory, replace(record, job=job))
    except BaseException:
        ask("scancel", job)
        raise
    here = shlex.quote(os.path.relpath(directory))
    return Placed(directory, f"submitted job {job}: run {here}\n{program()} status {here}\n{program()} logs {here} --follow\n{program()} cancel {here}")
