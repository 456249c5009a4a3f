"""The actors of a run: one for the controller and one a pod, each in its own placement group. An actor does no work of the run; it owns a process that does,
with the environment and the threads of any other launcher, and the kernel ends that process with it. The keepers of checkpoints are actors of their own.

Ray starts an actor again on another node when its node is lost. The controller's then continues the run from its newest checkpoint; it owns the others, so
that Ray ends them with it, and makes them again.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from tandem.cluster.launch.ended import Ended, read_end, write_end
from tandem.cluster.launch.job import RunProcess, read_job, store_of_run, wait_for_earlier
from tandem.cluster.launch.kept_pod import KeptPod
from tandem.cluster.launch.node_pod import node_pod
from tandem.cluster.launch.ray.keeper import end_node_keeper, node_keeper
from tandem.cluster.launch.ray.nodes import end_with_node, node_name
from tandem.cluster.launch.ray.placement import CONTROLLER, group_name, groups_of, in_group, make_group, remove_groups
from tandem.runtime.records.logs import setup
from tandem.trainer.checkpoint.memory.launched_keepers import FOLDER as KEEPERS
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

_POD_ENDS_S = 10.0
_LOOK_S = 2.0


class RunActor:
    """The controller of ``job``, the run in ``directory``. ``bundle``: what the run's placement groups ask for; ``nodes``: how many there are."""

    def __init__(self, job: str, directory: str, folder: str, bundle: Mapping[str, float], nodes: int) -> None:
        os.chdir(folder)
        self._job, self._directory, self._bundle = job, Path(directory), dict(bundle)
        self._output = self._directory / "logs" / f"ray-{job.rpartition('-')[2]}.out"
        self._process, self._pods = RunProcess(self._directory), _Pods(self, nodes - 1)
        end_with_node()
        threading.Thread(target=self._work, name="job", daemon=True).start()

    def stop(self) -> None:
        """Asks the run to finish its step, save it and stop."""
        self._process.stop()

    def scale(self, nodes: int) -> None:
        """Sets the number of placement groups."""
        self._pods.scale(nodes - 1)
        self.say(f"{nodes} nodes are asked for")

    def make_pod(self, name: str, host: str, overrides: Sequence[str]) -> Any:
        """Returns a new actor with a pod, which is started as soon as there is room."""
        options = in_group(make_group(self._job, name, self._bundle, detached=False), self._bundle)
        actor = ray.remote(PodActor).options(name=group_name(self._job, name), **options)
        return actor.remote(self._job, str(self._directory), str(Path.cwd()), host, name, list(overrides))

    def groups(self) -> dict[str, tuple[str, str]]:
        return groups_of(self._job)

    def remove_pod(self, name: str) -> None:
        with contextlib.suppress(ValueError):
            remove_placement_group(ray.util.get_placement_group(group_name(self._job, name)))

    def say(self, text: str) -> None:
        with self._output.open("a", encoding="utf-8") as file:
            file.write(f"{text if text.startswith('tandem: ') else f'[ray] {text}'}\n")

    def _work(self) -> None:
        status = 1
        try:
            setup("job", self._directory / "logs")
            status = self._run()
        except (UserError, RunError) as error:
            status = error.exit_code
            self.say(f"tandem: {error}")
        except BaseException as error:
            logger.exception("the job failed")
            self.say(f"tandem: the job failed: {traceback.format_exception_only(error)[-1].strip()}")
        logger.info("the job ends with %d", status)
        with contextlib.suppress(OSError):
            if read_end(self._directory, self._job) is None:
                write_end(self._directory, Ended(self._job, status))
        # Those of nodes that were lost; the others remove their own.
        shutil.rmtree(self._directory / KEEPERS, ignore_errors=True)
        # The last one is that of this process, which ends with it.
        remove_groups(self._job)

    def _run(self) -> int:
        record, recipe = read_job(self._directory)
        if record.job != self._job:
            raise RunError(f"job {self._job} is not that of the run any more, which is {record.job}")
        if (ended := read_end(self._directory, self._job)) is not None:
            return ended.exit_status
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.say(f"the run continues on node '{node_name()}' from its newest checkpoint")
            _kill_pods(self._job)
            wait_for_earlier(self._directory, self.say, lambda: self._process.stops > 0)
        else:
            self.say(f"job {self._job} on node '{node_name()}'")
        if not recipe.pods.may_join:
            return self._process.run(recipe, record.overrides, self._output)
        host = str(ray.util.get_node_ip_address())
        with store_of_run(self._directory, record, recipe, host, self._process, self.say) as shared:
            self._pods.start(host, shared)
            try:
                return self._process.run(recipe, [*record.overrides, *shared, f"--pods.host={host}"], self._output)
            finally:
                self._pods.end()


class _Pods:
    """The pods on further nodes, as many as are ``wanted``."""

    def __init__(self, actor: RunActor, wanted: int) -> None:
        self._actor, self._wanted = actor, wanted
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._make: Callable[[str], Any] | None = None

    def start(self, host: str, overrides: Sequence[str]) -> None:
        self._make = lambda name: self._actor.make_pod(name, host, overrides)
        self.scale(self._wanted)

    def scale(self, wanted: int) -> None:
        """Adds pods with the lowest free numbers, or lets those with the highest leave after their iteration."""
        with self._lock:
            self._wanted = wanted
            if self._make is None:
                return
            number = 1
            while len(self._handles) < wanted:
                if (name := f"ray-{number}") not in self._handles:
                    self._handles[name] = self._make(name)
                number += 1
            leaving = sorted(self._handles, key=lambda name: int(name.rpartition("-")[2]))[wanted:]
            for name in leaving:
                threading.Thread(target=self._leave, args=(name, self._handles.pop(name)), name=f"leave {name}", daemon=True).start()

    def end(self) -> None:
        """Lets the pods end, which the run has released, and ends those that it has not."""
        with self._lock:
            handles, self._handles, self._make = self._handles, {}, None
        there = self._actor.groups()
        leaving = [handle.leave.remote() for name, handle in handles.items() if there.get(name, ("", ""))[0] == "CREATED"]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=_POD_ENDS_S)
        for name in handles:
            self._actor.remove_pod(name)

    def _leave(self, name: str, handle: Any) -> None:
        if self._actor.groups().get(name, ("", ""))[0] == "CREATED":
            # Lost with its node, it has left too.
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(handle.leave.remote())
        self._actor.remove_pod(name)
        self._actor.say(f"pod {name} has left")


class PodActor:
    """The pod ``name`` of ``job``, the run in ``directory``, whose controller is at ``host``."""

    def __init__(self, job: str, directory: str, folder: str, host: str, name: str, overrides: Sequence[str]) -> None:
        os.chdir(folder)
        self._job, self._directory, self._host, self._name, self._overrides = job, Path(directory), host, name, list(overrides)
        self._logs = self._directory / "logs" / "pods" / name
        self._pod = KeptPod(self._start, lambda text: self._say(f"pod {name} {text}"))
        end_with_node()
        self._thread = threading.Thread(target=self._pod.run, name="pod", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Lets the pod leave after its iteration; returns when it has."""
        self._pod.leave()
        self._thread.join()
        end_node_keeper(self._job, self._name)

    def _start(self) -> "AbstractContextManager[subprocess.Popen[bytes]]":
        self._logs.mkdir(parents=True, exist_ok=True)
        return node_pod(self._directory, self._host, self._name, self._overrides, self._logs / "pod.log", self._keeper())

    def _keeper(self) -> Path | None:
        """Returns the file of the node's keeper; ``None`` where the pod is to have its own, or none."""
        try:
            return node_keeper(self._job, self._directory, self._host)
        except (UserError, RunError) as error:
            self._say(str(error))
            return None

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError), (self._logs / "pod.log").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def _kill_pods(job: str) -> None:
    """Ends the pods of the controller's earlier life, which listen to an etcd that has ended. Ray removes their groups with their owner too, but only after a
    while: one that is still found by its name then would be taken for that of a new pod, and vanish under it."""
    for role in groups_of(job):
        if role != CONTROLLER:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(group_name(job, role)))
    remove_groups(job, but=CONTROLLER)
