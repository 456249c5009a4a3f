"""Runs on Ray. A job of a run is a detached actor, which Ray starts again on another node when its node is lost, with an actor for each further pod."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tandem.cluster.launch.ended import CANCELLED, Ended, read_end, write_end
from tandem.cluster.launch.job import SAVED, last_error
from tandem.cluster.launch.launcher import Launch, LauncherName, Placed, State, Status
from tandem.cluster.launch.placing import placed, recorded, refuse_inline, resumed
from tandem.cluster.launch.ray.commands import Driver, RayAt, check_installed
from tandem.cluster.launch.ray.own_cluster import TOKEN, own_address_of, start_cluster
from tandem.cluster.launch.record import FOLDER, Record, read_record, write_secrets
from tandem.cluster.launch.several_nodes import placed_recipe, prepared, run_folder
from tandem.config.load import build, to_mapping
from tandem.config.ray import RayConfig
from tandem.config.recipe import AnyRecipe
from tandem.jobs.prepare import read_recipe
from tandem.runtime.machine.gpus import DRIVER, probe
from tandem.types import UserError


@dataclass(frozen=True)
class RayLauncher:
    name: LauncherName = "ray"

    def plan(self, launch: Launch) -> str:
        """Returns what would be placed where. A cluster that would be started for the run is not."""
        check_installed()
        recipe, _ = placed_recipe(launch, _nodes)
        config = recipe.ray
        groups = f"{config.nodes} placement group{'s' if config.nodes > 1 else ''} (strict pack)"
        if not config.address:
            _check_own(recipe)
            return f"starts a Ray cluster of {config.most_nodes} nodes on this machine for the run, and places {groups} of one core and {config.num_gpus} GPUs"
        planned = RayAt(config.address).ask("plan", **_asked(recipe, run_folder(to_mapping(recipe)["run"]), str(Path.cwd())))
        asked = ", ".join(f"{name} {amount:g}" for name, amount in planned["bundle"].items())
        return f"places {groups} of {asked} on the Ray cluster at {config.address}, which has room for {planned['room']} on {', '.join(planned['nodes'])}"

    def submit(self, launch: Launch) -> Placed:
        refuse_inline(launch, self.name, "a job")
        check_installed()
        recipe, starts_etcd = placed_recipe(launch, _nodes)
        with _connecting(recipe) as driver, prepared(recipe, launch) as directory:
            return _submitted(directory, recipe, Record("ray", starts_etcd=starts_etcd, folder=str(Path.cwd())), driver)

    def resume(self, directory: Path, overrides: Sequence[str]) -> Placed:
        check_installed()
        directory = directory.absolute()
        run = resumed(directory, overrides, self.name, self.status, _nodes)
        if run.finished:
            return Placed(directory, run.finished)
        with _connecting(run.recipe) as driver:
            return _submitted(directory, run.recipe, run.record, driver)

    def status(self, directory: Path) -> Status:
        record = read_record(directory)
        if record is None or not record.job:
            return Status("finished" if _is_finished(directory) else "stopped")
        if (ended := self._ended(directory, record.job)) is not None:
            return ended
        where = f"job {record.job}"
        try:
            roles = _at(directory, record).ask("status", job=record.job)["roles"]
        except UserError as error:
            # It may have ended meanwhile, and its cluster with it.
            return self._ended(directory, record.job) or Status("finished" if _is_finished(directory) else "stopped", where, str(error))
        if not roles:
            return self._ended(directory, record.job) or Status("failed", f"{where}, which Ray has lost", last_error(self.logs(directory)))
        there = ", ".join(f"{role} on {node}" for role, (_, node) in sorted(roles.items()) if node)
        waiting = [role for role, (_, node) in sorted(roles.items()) if not node]
        reason = f"{', '.join(waiting)} waiting for room on the cluster" if waiting else ""
        if "controller" in waiting:
            return Status("queued", where, reason)
        return Status("running", f"{where}, {there}", reason)

    def _ended(self, directory: Path, job: str) -> Status | None:
        """Returns how a job has ended; ``None`` if that is not known. The end is written after the run's result, so it is looked at first."""
        ended, where = read_end(directory, job), f"job {job}"
        if ended is None:
            return None
        if _is_finished(directory):
            return Status("finished", where)
        is_failed = ended.exit_status not in (0, SAVED, CANCELLED)
        state: State = "failed" if is_failed else "stopped"
        return Status(state, where, last_error(self.logs(directory)) if is_failed else "")

    def logs(self, directory: Path) -> tuple[Path, ...]:
        """The outputs of the run's jobs. What a job writes that goes on elsewhere is appended."""
        return tuple(sorted((directory / "logs").glob("ray-*.out"), key=lambda path: path.stat().st_mtime))

    def cancel(self, directory: Path, *, at_once: bool) -> str:
        record, status = read_record(directory), self.status(directory)
        if record is None or not status.is_active:
            raise UserError(f"the run in '{directory}' is not running on Ray, so there is nothing to cancel")
        if _at(directory, record).ask("stop", job=record.job, now=at_once)["is_asked"]:
            return f"asked job {record.job} to stop after its step, which it saves first"
        if read_end(directory, record.job) is None:
            write_end(directory, Ended(record.job, CANCELLED))
        return f"cancelled job {record.job}"

    def scale(self, directory: Path, nodes: int) -> str:
        """Sets the number of placement groups of a run: pods join it, or leave it after their iteration."""
        record, status, recipe = read_record(directory), self.status(directory), read_recipe(directory)
        if record is None or not status.is_active:
            raise UserError(f"the run in '{directory}' is not running on Ray; resume it with --ray.nodes={nodes}")
        most = 1 + recipe.pods.max_count - recipe.pods.count if recipe.pods.may_join else 1
        if not 1 <= nodes <= most:
            raise UserError(f"NODES is {nodes}, and this run may have 1 to {most} nodes; for more resume it with a higher ray.max_nodes")
        _at(directory, record).ask("scale", job=record.job, nodes=nodes)
        return f"asked job {record.job} for {nodes} node{'s' if nodes > 1 else ''}"


@contextlib.contextmanager
def _connecting(recipe: AnyRecipe) -> Iterator[Driver | None]:
    """Yields what connects to the cluster that exists, while the run is prepared; ``None`` for one that is started for the run, once that could be."""
    if not recipe.ray.address:
        _check_own(recipe)
        yield None
        return
    with RayAt(recipe.ray.address).connecting() as driver:
        yield driver


def _submitted(directory: Path, recipe: AnyRecipe, record: Record, driver: Driver | None) -> Placed:
    """Places a job of the run. ``driver``: which the cluster is asked by; ``None``: one is started."""
    (directory / "logs").mkdir(exist_ok=True)
    if recipe.ray.most_nodes > 1:
        write_secrets(directory)
    attempt = 1 + max((int(path.stem.rpartition("-")[2]) for path in (directory / "logs").glob("ray-*.out")), default=0)
    job = f"{directory.name}-{hashlib.sha256(str(directory).encode()).hexdigest()[:8]}-{attempt}"
    config = recipe.ray
    record = replace(record, job=job, address=config.address)
    request = {**_asked(recipe, directory, record.folder), "job": job, "directory": str(directory), "folder": record.folder}
    with recorded(directory, record):
        if driver is None:
            starting = start_cluster(directory, job, config.most_nodes, config.num_gpus)
            try:
                starting.at.ask("place", **request)
                starting.keep()
            except BaseException:
                starting.end()
                raise
        else:
            driver.ask("place", **request)
    where = "a Ray cluster on this machine" if driver is None else f"the Ray cluster at {config.address}"
    return placed(directory, f"submitted job {job} to {where}")


def _is_finished(directory: Path) -> bool:
    # It imports the report of a run, which placing one does not need.
    from tandem.jobs.finished import finished_result

    return finished_result(read_recipe(directory), directory) is not None


def _at(directory: Path, record: Record) -> RayAt:
    """Returns the cluster of a job. Raises ``UserError`` if it was the run's own and is not there any more."""
    if record.address:
        return RayAt(record.address)
    if not (address := own_address_of(directory)):
        raise UserError("its Ray cluster has ended")
    return RayAt(address, directory / FOLDER / TOKEN)


def _asked(recipe: AnyRecipe, directory: Path, folder: str) -> dict[str, Any]:
    config = recipe.ray
    return {
        "ray": asdict(config), "nodes": config.nodes, "is_own": not config.address, "folders": [str(_existing(directory)), folder],
        "ports": _fixed_ports(recipe),
        "max_clock_offset_s": recipe.cluster.max_clock_offset_s if recipe.cluster.preflight else 0.0,
    }  # fmt: skip


def _fixed_ports(recipe: AnyRecipe) -> list[tuple[str, int]]:
    """Returns the ports that the recipe names, each with its host; empty: the address of the node."""
    ports = [] if recipe.metrics is None else [(recipe.metrics.host, recipe.metrics.port)]
    if recipe.pods.may_join:
        ports.append(("", recipe.pods.port))
    return [(host, port) for host, port in ports if port]


def _existing(folder: Path) -> Path:
    """Returns the first folder above ``folder``, or itself, that there is."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _check_own(recipe: AnyRecipe) -> None:
    """Raises ``UserError`` for what a cluster on this machine could not have."""
    from tandem.jobs.exposed.exposed_run import check_metrics

    config = recipe.ray
    check_metrics(recipe.metrics)
    for name, value in (("num_cpus", config.num_cpus > 1), ("memory_gib", config.memory_gib), ("resources", config.resources)):
        if value:
            raise UserError(f"'ray.{name}' is {getattr(config, name)}, and the cluster that is started on this machine has nodes of one core; leave it out")
    needed = config.most_nodes * config.num_gpus
    if needed and needed > (there := len(probe().gpus) if any(path.exists() for path in DRIVER) else 0):
        raise UserError(f"'ray.num_gpus' is {config.num_gpus} for each of {config.most_nodes} nodes, and this machine has {there} GPUs; lower one of them")


def _nodes(data: Mapping[str, Any]) -> tuple[int, str]:
    section = data.get("ray") or {}
    config = build(RayConfig, section, "ray") if isinstance(section, Mapping) else RayConfig()
    return config.most_nodes, "ray.nodes" if config.nodes == config.most_nodes else "ray.max_nodes"

