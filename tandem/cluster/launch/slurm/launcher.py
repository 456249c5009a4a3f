"""Runs as jobs of Slurm. A job is the run's folder and one command, so that Slurm can begin it again wherever it was."""

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.cluster.etcd_process import check_etcd_program
from tandem.cluster.launch.launcher import Launch, LauncherName, Placed, Status
from tandem.cluster.launch.record import CREDENTIAL, FOLDER, Record, read_record, write_record, write_secrets
from tandem.cluster.launch.slurm.commands import SAVED, ask, check_installed, check_place, find_job, submit
from tandem.cluster.launch.slurm.script import batch_script
from tandem.config.bundled import recipe_file
from tandem.config.cluster import ClusterConfig
from tandem.config.load import apply_overrides, build, read_yaml, to_mapping
from tandem.config.recipe import ON_DATA, AnyRecipe, recipe_of
from tandem.config.slurm import SlurmConfig
from tandem.jobs.finished import finished_result
from tandem.jobs.start import check_resume, prepare, read_recipe
from tandem.runtime.process.program import program
from tandem.runtime.records.run_lock import lock_holder
from tandem.types import RunError, UserError

_BROKEN = ("NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")


@dataclass(frozen=True)
class SlurmLauncher:
    name: LauncherName = "slurm"

    def plan(self, launch: Launch) -> str:
        """Returns the batch script. Where Slurm is not installed, its partitions are not looked at."""
        recipe, _ = _placed(launch)
        if shutil.which("sinfo") is not None:
            check_place(recipe.slurm.partition, recipe.slurm.nodes)
        return batch_script(recipe.slurm, _folder(to_mapping(recipe)["run"]), Path.cwd()).rstrip()

    def submit(self, launch: Launch) -> Placed:
        if launch.inline:
            raise UserError("--inline is one process on this machine, and '--on slurm' a job on others; leave one of them out")
        check_installed()
        recipe, starts_etcd = _placed(launch)
        check_place(recipe.slurm.partition, recipe.slurm.nodes)
        is_first = not Path(recipe.run.directory).exists()
        directory = prepare(recipe, launch.recipe).absolute()
        try:
            return _submitted(directory, recipe, Record("slurm", starts_etcd=starts_etcd, folder=str(Path.cwd())))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            if is_first:
                with contextlib.suppress(OSError):
                    directory.parent.rmdir()
            raise

    def resume(self, directory: Path, overrides: Sequence[str]) -> Placed:
        check_installed()
        directory = directory.absolute()
        record = read_record(directory) or Record("slurm", folder=str(Path.cwd()))
        if (status := self.status(directory)).is_active:
            end = f"{program()} cancel {shlex.quote(str(directory))}"
            raise UserError(f"'{directory}' is {status.state} as {status.where}; wait for it, or end it first: {end}")
        if (holder := lock_holder(directory)) is not None:
            raise UserError(f"the run directory {directory} is in use by process {holder} on this machine; wait for it or stop it")
        more, starts_etcd = _for_nodes(to_mapping(read_recipe(directory, overrides)), directory)
        recipe, finished = check_resume(directory, [*overrides, *more])
        if finished:
            return Placed(directory, finished)
        check_place(recipe.slurm.partition, recipe.slurm.nodes)
        is_given = any(override.startswith("--coordination.endpoints=") for override in overrides)
        record = replace(record, starts_etcd=(record.starts_etcd or starts_etcd) and not is_given)
        return _submitted(directory, recipe, replace(record, launcher="slurm", overrides=(*overrides, *more)))

    def status(self, directory: Path) -> Status:
        record, recipe = read_record(directory), read_recipe(directory)
        is_finished = finished_result(recipe, directory) is not None
        if record is None or not record.job:
            return Status("finished" if is_finished else "stopped")
        job = find_job(record.job)
        if job is not None and job.is_queued:
            return Status("queued", f"job {record.job}", f"Slurm's reason: {job.reason}")
        if job is not None and job.is_running:
            return Status("running", f"job {record.job} on {job.nodes}", f"{job.used} of {job.limit}")
        if is_finished:
            return Status("finished", f"job {record.job}")
        if job is None:
            return Status("stopped", f"job {record.job}, which Slurm has forgotten", _last_error(self.logs(directory)))
        is_failed = job.exit_status not in (0, SAVED) or job.state in _BROKEN
        return Status("failed" if is_failed else "stopped", f"job {record.job}", f"{job.state}. {_last_error(self.logs(directory))}".rstrip(" ."))

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


def _placed(launch: Launch) -> tuple[AnyRecipe, bool]:
    """Returns the recipe of a run to submit, with what it needs on several nodes, and whether its job starts an etcd. Raises ``UserError``."""
    data = apply_overrides(read_yaml(recipe_file(launch.recipe)), launch.overrides)
    run = _section(data, "run")
    if not run.get("name"):
        # Pods find the run by its name.
        data = {**data, "run": {**run, "name": _free_name(_folder(run), Path(launch.recipe).stem)}}
    more, starts_etcd = _for_nodes(data, _folder(_section(data, "run")))
    return recipe_of(apply_overrides(data, more)), starts_etcd


def _for_nodes(data: Mapping[str, Any], directory: Path) -> tuple[list[str], bool]:
    """Returns the values that the recipe ``data`` of the run in ``directory`` needs for pods on ``slurm.nodes``, and whether its job starts an etcd."""
    slurm = data.get("slurm") or {}
    nodes = build(SlurmConfig, slurm, "slurm").nodes if isinstance(slurm, Mapping) else 1
    if nodes == 1:
        return [], False
    if _section(data, "algorithm").get("name") in ON_DATA:
        raise UserError(f"'slurm.nodes' is {nodes}, and a run on data trains on one machine in this version; set it to 1")
    pods, coordination = _section(data, "pods"), _section(data, "coordination")
    spares = build(ClusterConfig, _section(data, "cluster"), "cluster").spares
    if spares > nodes - 2:
        raise UserError(f"'cluster.spares' is {spares} and 'slurm.nodes' {nodes}; besides the first node, with the controller, one must hold a pod: lower it")
    count, most = (value if isinstance(value := pods.get(name), int) else 1 for name in ("count", "max_count"))
    values: dict[str, object] = {"coordination.store": "etcd", "pods.max_count": max(most, count + nodes - 1 - spares)}
    if not pods.get("credential_file"):
        values["pods.credential_file"] = json.dumps(str(directory / FOLDER / CREDENTIAL), ensure_ascii=False)
    starts_etcd = coordination.get("store") != "etcd"
    if starts_etcd:
        check_etcd_program()
    return [f"--{key}={value}" for key, value in values.items()], starts_etcd


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _free_name(parent: Path, stem: str) -> str:
    number = 1
    while (parent / (name := stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return name


def _folder(run: Mapping[str, Any]) -> Path:
    """Returns the folder of the run of section ``run``; without a name, that of all runs."""
    return (Path(str(run.get("directory", "runs"))) / str(run.get("name", ""))).absolute()


def _last_error(outputs: Sequence[Path]) -> str:
    """Returns the last line of the newest output that says why the run has ended."""
    if not outputs:
        return ""
    try:
        lines = outputs[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-50:]
    except OSError as error:
        raise RunError(f"'{outputs[-1]}' cannot be read: {error.strerror}") from None
    return next((line.removeprefix("tandem: ") for line in reversed(lines) if line.startswith(("tandem: ", "slurmstepd: error: "))), "")
