"""Runs as JobSets of Kubernetes, queued by Kueue where the recipe names a queue. A JobSet is the run's folder on a shared volume and a command for each pod, so
that Kubernetes can begin it again on other nodes."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tandem.cluster.launch.job import last_error
from tandem.cluster.launch.kubernetes import manifests
from tandem.cluster.launch.kubernetes.api import Api, Forbidden, Missing
from tandem.cluster.launch.kubernetes.check_place import check_place
from tandem.cluster.launch.kubernetes.connection import check_installed, connect
from tandem.cluster.launch.kubernetes.image import check_image
from tandem.cluster.launch.kubernetes.job import output_of
from tandem.cluster.launch.kubernetes.manifests import RunObjects
from tandem.cluster.launch.kubernetes.state import is_suspended, state_of
from tandem.cluster.launch.launcher import Launch, LauncherName, Placed, State, Status
from tandem.cluster.launch.placing import placed, recorded, refuse_inline, resumed
from tandem.cluster.launch.record import Record, read_record
from tandem.cluster.launch.several_nodes import placed_recipe, prepared, run_folder, section
from tandem.config.kubernetes import KubernetesConfig
from tandem.config.load import build, to_mapping
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.jobs.checks.check_rl import weight_buffers_bytes
from tandem.jobs.finished import finished_result
from tandem.jobs.prepare import read_recipe
from tandem.runtime.rpc.credentials import new_credential
from tandem.types import RunError, UserError

_LONGEST_NAME = 30
_MORE_SHARED_MIB = 1024
"""What NCCL and PyTorch take of shared memory, beside the weight buffers."""


@dataclass(frozen=True)
class KubernetesLauncher:
    name: LauncherName = "kubernetes"

    def plan(self, launch: Launch) -> str:
        """Returns the manifests, without the values of the Secret. Asks no cluster."""
        recipe, _ = placed_recipe(launch, _nodes, etcd_is_here=False)
        objects = _objects(recipe, run_folder(to_mapping(recipe)["run"]), Path.cwd(), _user(recipe.kubernetes))
        made = _made(recipe, objects, manifests.new_secrets("(made when it is submitted)", "(made when it is submitted)"))
        return yaml.safe_dump_all(made, sort_keys=False).rstrip()

    def submit(self, launch: Launch) -> Placed:
        refuse_inline(launch, self.name, "pods")
        check_installed()
        recipe, starts_etcd = placed_recipe(launch, _nodes, etcd_is_here=False)
        user = _user(recipe.kubernetes)
        objects = _objects(recipe, run_folder(to_mapping(recipe)["run"]), Path.cwd(), user)
        api = _api(recipe.kubernetes)
        _check(api, recipe, objects)
        record = Record("kubernetes", starts_etcd=starts_etcd, folder=str(Path.cwd()))
        with prepared(recipe, launch) as directory:
            return _submitted(api, directory, recipe, replace(objects, directory=directory), record)

    def resume(self, directory: Path, overrides: Sequence[str]) -> Placed:
        check_installed()
        directory = directory.absolute()
        run = resumed(directory, overrides, self.name, self.status, _nodes, etcd_is_here=False)
        if run.finished:
            return Placed(directory, run.finished)
        before, record = read_record(directory), run.record
        objects = _objects(run.recipe, directory, Path(record.folder), _user(run.recipe.kubernetes))
        api = _api(run.recipe.kubernetes)
        _check(api, run.recipe, objects)
        continued = _submitted(api, directory, run.recipe, objects, record)
        if before is not None:
            _forget(before)
        return continued

    def status(self, directory: Path) -> Status:
        record, recipe = read_record(directory), read_recipe(directory)
        if record is None or record.launcher != "kubernetes" or not record.job:
            return Status("finished" if finished_result(recipe, directory) is not None else "stopped")
        api, name = _api_of(record)
        found = api.jobset(name)
        # After the cluster was asked: a run that ends meanwhile has written its result before its JobSet ends.
        is_finished = finished_result(recipe, directory) is not None
        ended: State = "finished" if is_finished else "stopped"
        if found is None:
            return Status(ended, f"JobSet {record.job}, which Kubernetes no longer has", "" if is_finished else last_error(self.logs(directory)))
        pods = api.pods(name)
        workloads = []
        with suppress(Forbidden, Missing):
            # Without Kueue there are none.
            workloads = api.workloads(found["metadata"]["uid"]) if recipe.kubernetes.queue and is_suspended(found) else []
        status = state_of(found, pods, workloads)
        if status.is_active:
            return status
        if status.state == "failed":
            return replace(status, reason=last_error(self.logs(directory)) or status.reason)
        return replace(status, state=ended, reason="" if is_finished else last_error(self.logs(directory)))

    def logs(self, directory: Path) -> tuple[Path, ...]:
        """The outputs of the run's JobSets, each with those of all its first pods."""
        return tuple(sorted((directory / "logs").glob(output_of(Path(), "*").name), key=lambda path: path.stat().st_mtime))

    def cancel(self, directory: Path, *, at_once: bool) -> str:
        record, status = read_record(directory), self.status(directory)
        if record is None or not status.is_active:
            raise UserError(f"the run in '{directory}' is not running on Kubernetes, so there is nothing to cancel")
        api, name = _api_of(record)
        api.delete_jobset(name, at_once=at_once)
        if at_once or status.state == "queued":
            return f"deleted JobSet {record.job}"
        return f"deleted JobSet {record.job}: its pods finish their step, which the run saves first"


def _check(api: Api, recipe: AnyRecipe, objects: RunObjects) -> None:
    """Raises ``UserError`` for what the cluster does not have, or would refuse. Nothing is made."""
    config = recipe.kubernetes
    check_place(api, config)
    check_image(config.image)
    for manifest in _made(recipe, objects, manifests.new_secrets(new_credential(), new_credential())):
        try:
            api.create(manifest, dry_run=True)
        except Missing as error:
            if manifest["kind"] == "JobSet" and error.is_kind:
                raise UserError("this cluster has no JobSet (jobset.x-k8s.io/v1alpha2); install it, see docs/cluster/kubernetes.md") from None
            raise UserError(f"'kubernetes.namespace' is '{api.namespace}': {error}") from None


def _submitted(api: Api, directory: Path, recipe: AnyRecipe, objects: RunObjects, record: Record) -> Placed:
    (directory / "logs").mkdir(exist_ok=True)
    _own(directory, objects.user)
    record = replace(record, job=f"{api.namespace}/{objects.name}", address=api.context)
    with recorded(directory, record):
        _own(directory, objects.user)
        _create(api, _made(recipe, objects, manifests.new_secrets(new_credential(), new_credential())))
    return placed(directory, f"created JobSet {record.job}")


def _create(api: Api, made: list[manifests.Manifest]) -> None:
    """Creates all of ``made``, of which the others belong to the first one, a JobSet, or nothing."""
    first, *others = made
    name, is_made = first["metadata"]["name"], False
    try:
        owner = api.create(first)
        is_made = True
        # Its pods wait for the Secret.
        for manifest in others:
            api.create(manifests.belonging_to(manifest, owner))
    except BaseException as error:
        # A server that did not answer may have made it. One that refuses has not, and a JobSet of this name is another's.
        if is_made or isinstance(error, RunError):
            try:
                api.delete_jobset(name, at_once=True)
            except UserError as left:
                raise RunError(f"{error}; delete what may be left of it: kubectl delete jobset {name} --namespace {api.namespace} ({left})") from None
        raise


def _made(recipe: AnyRecipe, objects: RunObjects, values: dict[str, str]) -> list[manifests.Manifest]:
    """Returns the objects of a run, the JobSet first, to which the others belong."""
    secret = [manifests.secret(objects, values)] if objects.shares_secret else []
    return [manifests.jobset(recipe.kubernetes, objects), *secret, manifests.network_policy(objects)]


def _objects(recipe: AnyRecipe, directory: Path, folder: Path, user: int) -> RunObjects:
    """Returns what the objects of a run in ``directory`` depend on. Raises ``UserError`` for keys that are missing, and folders that pods do not have."""
    config = recipe.kubernetes
    for key, example in (("image", "registry.example.com/tandem:0.1.0"), ("claim", "runs")):
        if not getattr(config, key):
            raise UserError(f"'kubernetes.{key}' is empty, and a run on Kubernetes needs it; set it, for example --kubernetes.{key}={example}")
    for what, path in (("the run's folder", directory), ("the folder of this command", folder)):
        if not path.is_relative_to(config.mount_path):
            raise UserError(
                f"{what} is '{path}', which is not under kubernetes.mount_path ('{config.mount_path}'), so no pod has it; give the command in a folder of the "
                "shared volume, or set kubernetes.mount_path to where it is mounted here"
            )
    stem = re.sub(r"[^a-z0-9]+", "-", directory.name.lower()).strip("-")[:_LONGEST_NAME].rstrip("-")
    name = f"tandem-{stem}-{secrets.token_hex(3)}" if stem else f"tandem-{secrets.token_hex(3)}"
    return RunObjects(
        name, directory, folder, user, config.shared_memory or _shared_memory(recipe), recipe.metrics is None,
        recipe.pods.may_join, _local_folders(recipe),
    )  # fmt: skip


def _local_folders(recipe: AnyRecipe) -> tuple[str, ...]:
    """Returns the folders of checkpoints that are to be on each node's own disk: all else of a container but its volumes is read only."""
    folders: list[str] = []
    for key in ("local_directory", "memory_directory"):
        path = str(getattr(recipe.checkpoint, key))
        if path and not any(Path(path).is_relative_to(other) for other in (recipe.kubernetes.mount_path, "/tmp", "/dev/shm", *folders)):
            if ":" in path or ".." in Path(path).parts:
                raise UserError(f"'checkpoint.{key}' is '{path}', where Kubernetes mounts nothing; give a path without ':' and '..', for example /nvme/tandem")
            folders.append(path)
    return tuple(folders)


def _shared_memory(recipe: AnyRecipe) -> str:
    buffers = weight_buffers_bytes(recipe) if isinstance(recipe, Recipe) else 0
    return f"{-(-buffers // 2**20) + _MORE_SHARED_MIB}Mi"


def _user(config: KubernetesConfig) -> int:
    """Returns the user of the pods' processes, who owns the run's folder. Raises ``UserError`` for root, and for one to whom this process cannot give it."""
    own = os.getuid()
    user = config.user_id or own
    if user == 0:
        raise UserError("pods of a run are not root; give the command as another user, or set kubernetes.user_id to the one who owns the shared folder")
    if own not in (0, user):
        raise UserError(f"'kubernetes.user_id' is {user}, and this command is of user {own}, whose run {user} could not write; leave it out")
    return user


def _own(directory: Path, user: int) -> None:
    """Gives the run's folder to ``user``, where this process is root."""
    if os.getuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)


def _api(config: KubernetesConfig) -> Api:
    connection = connect(config.context)
    return Api(connection, config.namespace or connection.namespace)


def _api_of(record: Record) -> tuple[Api, str]:
    """Returns the API of the cluster on which the run was placed, and the name of its JobSet."""
    namespace, _, name = record.job.partition("/")
    return Api(connect(record.address), namespace), name


def _forget(record: Record) -> None:
    """Deletes the JobSet that has ended, whose run another one continues."""
    if record.launcher == "kubernetes" and record.job:
        with suppress(UserError):
            api, name = _api_of(record)
            api.delete_jobset(name)


def _nodes(data: Mapping[str, Any]) -> tuple[int, str]:
    return build(KubernetesConfig, section(data, "kubernetes"), "kubernetes").nodes, "kubernetes.nodes"
