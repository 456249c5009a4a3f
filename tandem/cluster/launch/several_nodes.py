"""The recipe of a run that a scheduler places: its name, and what it needs on several nodes, each of which has a pod."""

import contextlib
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.cluster.etcd_process import check_etcd_program
from tandem.cluster.launch.launcher import Launch, Status
from tandem.cluster.launch.record import CREDENTIAL, FOLDER
from tandem.config.bundled import recipe_file
from tandem.config.cluster import ClusterConfig
from tandem.config.load import apply_overrides, build, read_yaml
from tandem.config.parallel import how_to_divide, pods_of_a_replica
from tandem.config.recipe import ON_DATA, AnyRecipe, recipe_of
from tandem.jobs.prepare import prepare
from tandem.runtime.process.program import program
from tandem.runtime.records.run_lock import RunLock, lock_holder
from tandem.types import UserError

NodesOf = Callable[[Mapping[str, Any]], tuple[int, str]]
"""Returns the most nodes that the run of a recipe, as a mapping, may have, and the key that says so."""


def placed_recipe(launch: Launch, nodes_of: NodesOf, *, etcd_is_here: bool = True) -> tuple[AnyRecipe, bool]:
    """Returns the recipe of a run to submit, with what it needs on several nodes, and whether its job starts an etcd. Raises ``UserError``."""
    data = apply_overrides(read_yaml(recipe_file(launch.recipe)), launch.overrides)
    run = section(data, "run")
    if not run.get("name"):
        # Pods find the run by its name.
        data = {**data, "run": {**run, "name": _free_name(run_folder(run), Path(launch.recipe).stem)}}
    more, starts_etcd = for_nodes(data, run_folder(section(data, "run")), nodes_of, etcd_is_here=etcd_is_here)
    return recipe_of(apply_overrides(data, more)), starts_etcd


def for_nodes(data: Mapping[str, Any], directory: Path, nodes_of: NodesOf, *, etcd_is_here: bool = True) -> tuple[list[str], bool]:
    """Returns the values that the recipe ``data`` of the run in ``directory`` needs for pods on its nodes, and whether its job starts an etcd, which
    ``etcd_is_here`` says is the one that is installed here."""
    nodes, key = nodes_of(data)
    is_on_data = section(data, "algorithm").get("name") in ON_DATA
    if nodes == 1 and not (is_on_data and section(data, "pods").get("trainer_count", 1) != 1):
        return [], False
    pods, coordination = section(data, "pods"), section(data, "coordination")
    spares = build(ClusterConfig, section(data, "cluster"), "cluster").spares
    if nodes > 1 and spares > nodes - 2:
        raise UserError(f"'cluster.spares' is {spares} and '{key}' {nodes}; besides the first node, with the controller, one must hold a pod: lower it")
    count, most, train = (value if isinstance(value := pods.get(name), int) else 1 for name in ("count", "max_count", "trainer_count"))
    values: dict[str, object] = {"coordination.store": "etcd", "pods.max_count": max(most, count + nodes - 1 - spares)}
    if is_on_data:
        # Every node that is no spare has ranks, unless the recipe says how many have: the others would do nothing else.
        train = nodes - spares if train == 1 else train
        if train > nodes - spares:
            raise UserError(
                f"'pods.trainer_count' is {train}, and {nodes - spares} of the nodes can train ('{key}' {nodes}, cluster.spares {spares}); lower it, or raise "
                f"{key}"
            )
        replicas, stages = (section(data, "parallel").get(name, 1) for name in ("data", "pipeline"))
        # A value that is not a positive number is refused with the rest of the section.
        is_mesh = all(isinstance(size, int) and size > 0 for size in (replicas, stages, train))
        if is_mesh and not pods_of_a_replica(replicas, stages, train):
            raise UserError(
                f"'{key}' is {nodes} and 'parallel.data' {replicas}, which {train} nodes with ranks do not divide; {how_to_divide(replicas, train)}"
            )
        values |= {"pods.trainer_count": train, "pods.max_count": max(most, train)}
    if not pods.get("credential_file"):
        values["pods.credential_file"] = json.dumps(str(directory / FOLDER / CREDENTIAL), ensure_ascii=False)
    starts_etcd = coordination.get("store") != "etcd"
    if starts_etcd and etcd_is_here:
        check_etcd_program()
    return [f"--{key}={value}" for key, value in values.items()], starts_etcd


@contextlib.contextmanager
def prepared(recipe: AnyRecipe, launch: Launch) -> Iterator[Path]:
    """Yields the new folder of a run, which is removed if the block raises."""
    is_first = not Path(recipe.run.directory).exists()
    directory = prepare(recipe, launch.recipe).absolute()
    try:
        yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        if is_first:
            with contextlib.suppress(OSError):
                directory.parent.rmdir()
        raise


def check_not_running(directory: Path, status: Status) -> None:
    """Raises ``UserError`` for a run that cannot be resumed because it is queued or running as ``status`` says, or because a process, here or on another
    machine, holds its lock."""
    if status.is_active:
        end = f"{program()} cancel {shlex.quote(str(directory))}"
        raise UserError(f"'{directory}' is {status.state} as {status.where}; wait for it, or end it first: {end}")
    if (holder := lock_holder(directory)) is not None:
        raise UserError(f"the run directory {directory} is in use by process {holder} on this machine; wait for it or stop it")
    # Holders in other containers and on other machines are not listed here.
    RunLock(directory).release()


def section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the section of a recipe as a mapping, which may not be checked yet; empty without it."""
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def run_folder(run: Mapping[str, Any]) -> Path:
    """Returns the folder of the run of section ``run``; without a name, that of all runs."""
    return (Path(str(run.get("directory", "runs"))) / str(run.get("name", ""))).absolute()


def _free_name(parent: Path, stem: str) -> str:
    number = 1
    while (parent / (name := stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return name
