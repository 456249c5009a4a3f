"""A sidecar's shim: answers the controller, owns the shared memory, and starts, watches and ends the worker's processes.

``python -m tandem.pod.shim --role trainer|rollout ...``. It imports no torch, so it starts in a tenth of a second, and outlives a worker that is
being replaced. It dies with the controller, and its worker with it. A pod of another machine has the same calls in
``joining_shim``.
"""

import argparse
import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tandem.config.load import build, read_yaml
from tandem.config.recipe import AnyRecipe, Recipe, load_config
from tandem.layout.mesh import MeshShape
from tandem.layout.placement import mesh_of
from tandem.pod.calls import MEASURED_CALLS, ROLLOUT_CALLS, TRAINER_CALLS
from tandem.pod.pod_threads import rank_threads
from tandem.pod.rollout_workers import RolloutWorkers
from tandem.pod.weights_between_pods import WeightsBetweenPods, add_tls
from tandem.runtime.coordination.membership import join
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.coordination.session import Session
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.machine.gpus import pod_device, visible_gpus
from tandem.runtime.process.faults import FaultPlan, no_fault
from tandem.runtime.process.forks import SharedForkServer
from tandem.runtime.process.waits import WAITS
from tandem.runtime.process.worker_group import GroupForks, GroupSettings, Share, WorkerGroup
from tandem.runtime.records.logs import log_uncaught, setup
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply, WorkerDied
from tandem.runtime.rpc.credentials import read_credential
from tandem.runtime.rpc.listener import listen
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.types import UserError, WeightVersion
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.verify import PublishedVerifier

logger = logging.getLogger(__name__)

CALLS = {"trainer": TRAINER_CALLS, "rollout": ROLLOUT_CALLS}


class Shim:
    """``role`` is ``trainer`` or ``rollout``. ``shared``: the fork server of both, if they have one. The lock guards which worker is the current one, not its
    calls."""

    def __init__(self, options: argparse.Namespace, shared: SharedForkServer | None = None) -> None:
        self.options, self.role, self.run = options, str(options.role), Path(options.run)
        self.workers: list[WorkerGroup] = []
        self.rollout_workers: RolloutWorkers | None = None
        self.starts = itertools.count(1)
        self.buffers: WeightBuffers | None = None
        self.between_pods = WeightsBetweenPods(options, lambda: self.buffers)
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.verifier: PublishedVerifier | None = None
        self.forks = GroupForks(shared)

    def prepare(self) -> None:
        """Begins the imports of the worker's processes, before it is asked to start them."""
        with self.lock:
            recipe = load_config(self.run / "config.yaml")
            count = recipe.rollout.workers if self.role == "rollout" and isinstance(recipe, Recipe) else 1
            settings = self._settings(recipe, 0, count)
            if self.role == "trainer" and recipe.pods.trainer_count > 1:
                settings = replace(settings, threads=rank_threads(recipe))
            self.forks.of(settings, self._shape(recipe))

    def join(self, port: int) -> None:
        """Makes this sidecar the ``--member`` of the run in the store ``--join``, on a lease, if there are several pods. ``port``: where it answers."""
        options = self.options
        if options.join:
            self.session = Session(open_store(options.join), float(options.lease))
            facts = {"host": "127.0.0.1", "port": port, "pid": os.getpid(), "pod": options.pod_id}
            join(self.session, options.member, facts)

    def methods(self) -> dict[str, Method]:
        """The shim's own calls, and its worker's passed on."""
        own: dict[str, Method] = {
            "allocate": self.allocate, "start_worker": self.start_worker, "stop_worker": self.stop_worker, "memory": self.memory
        }
        if self.role == "trainer":
            own["serve_weights"], own["start_ranks"] = self.between_pods.serve_weights, self.start_ranks
            own["write_delta"] = self.between_pods.write_delta
        else:
            own["receive_weights"], own["replace_worker"] = self.between_pods.receive_weights, self.replace_worker
            own["verify_weights"], own["receive_early"] = self.verify_weights, self.between_pods.receive_early
        return {**{name: self._pass_on(name) for name in CALLS[self.role]}, **own}

    def allocate(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The two weight buffers, made once and kept for the life of this shim; their names."""
        with self.lock:
            if self.buffers is None:
                self.buffers = WeightBuffers.create(self.options.pod_id, int(meta["bytes"]))
                logger.info("weight buffers %s and %s", *self.buffers.names)
            return {"names": list(self.buffers.names)}, {}

    def start_worker(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Start the worker's processes where none live: the trainer's ranks, or one process for each rollout worker."""
        with self.lock:
            if not self.workers or not all(worker.alive for worker in self.workers):
                self._end(grace_s=0.0)
                recipe = build(Recipe, read_yaml(self.run / "config.yaml"))
                count = recipe.rollout.workers if self.role == "rollout" else 1
                self.workers = [self._start(recipe, number, count) for number in range(count)]
                if count > 1:
                    self.rollout_workers = RolloutWorkers(
                        [*self.workers], lambda number: self._replace(recipe, number), recipe.rollout.engine.max_num_seqs, float(self.options.deadline),
                        verify=self._verify,
                    )  # fmt: skip
            return {"pids": [pid for worker in self.workers for pid in worker.pids]}, {}

    def start_ranks(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Starts the ``ranks`` of a trainer of several pods that are in this pod, anew, with ``threads`` each, for the run in the folder ``directory``. They
        find those of other pods at ``rendezvous``, ``HOST:PORT``; the pod of rank 0 chooses it, at its own ``host``, and its reply has it. ``device``: of ranks
        whose controller chooses it."""
        directory, ranks, host, rendezvous = Path(meta["directory"]), tuple(meta["ranks"]), str(meta["host"]), str(meta["rendezvous"])
        recipe = load_config(directory / "config.yaml")
        with self.lock, contextlib.ExitStack() as stack:
            self._end(grace_s=0.0)
            listener = None
            if 0 in ranks:
                # Its process inherits it, so that the others know the port before it has begun.
                opened = stack.enter_context(listen(host, 0))
                listener, rendezvous = opened.fileno(), f"{host}:{opened.getsockname()[1]}"
            settings = self._settings(recipe, 0, 1)
            settings = replace(
                settings, directory=directory, threads=int(meta["threads"]), share=Share(ranks, host, rendezvous, listener),
                device=str(meta.get("device", settings.device)),
            )  # fmt: skip
            self.workers = [WorkerGroup(settings, mesh_of(recipe.parallel), say=logger.warning, forks=self.forks)]
        return {"pids": self.workers[0].pids, "rendezvous": rendezvous}, {}

    def _start(self, recipe: Recipe, number: int, count: int) -> WorkerGroup:
        """Starts worker ``number`` of ``count``, which divide the cores and, on GPUs, take those after the ones of the worker before."""
        return WorkerGroup(self._settings(recipe, number, count), self._shape(recipe), say=logger.warning, forks=self.forks)

    def _shape(self, recipe: AnyRecipe) -> MeshShape:
        return mesh_of(recipe.parallel) if self.role == "trainer" else MeshShape()

    def _target(self, recipe: AnyRecipe) -> str:
        if self.options.target:
            return str(self.options.target)
        is_vllm = self.role == "rollout" and isinstance(recipe, Recipe) and recipe.rollout.backend == "vllm"
        return "tandem.pod.vllm_worker" if is_vllm else f"tandem.pod.{self.role}_worker"

    def _settings(self, recipe: AnyRecipe, number: int, count: int) -> GroupSettings:
        options, parallel, shape = self.options, recipe.parallel, self._shape(recipe)
        suffix = str(number) if number else ""
        name = (f"the {self.role} worker" if count == 1 else f"{self.role} worker {number}") + (f" of pod {options.pod_number}" if options.pod_number else "")
        backend = recipe.trainer.backend if self.role == "trainer" else "tandem"
        python, environment = None, dict[str, str]()
        if backend != "tandem":
            # A fifth of what a shim imports, and most pods have no other environment.
            from tandem.backends.environment import python_of, tandem_path

            python, environment = python_of(backend), {"PYTHONPATH": tandem_path(self.run / "pod")}
        device, gpus = pod_device(recipe.machine), recipe.rollout.engine.tensor_parallel_size if isinstance(recipe, Recipe) else 1
        return GroupSettings(
            name=name,
            target=self._target(recipe),
            directory=self.run,
            folder=self.run / "pod" / f"{self.role}-{os.getpid()}-{next(self.starts)}",
            threads=max(1, options.threads // (shape.world * count)),
            device=device,
            faults=options.faults,
            hang_timeout_s=parallel.collective_timeout_s,
            heartbeat_timeout_s=parallel.heartbeat_timeout_s,
            log=lambda rank: f"{self.role}_worker{suffix}" + (f"-{rank}" if rank else ""),
            roles=lambda rank: (of_pod(options, f"{self.role}_worker{suffix}" if rank == 0 else f"{self.role}_rank{rank}"),),
            environment=environment | (visible_gpus(number * gpus, gpus) if device == "cuda" and count > 1 else {}),
            python=python,
            forked=recipe.machine.fork_workers,
        )

    def _replace(self, recipe: Recipe, number: int) -> WorkerGroup:
        """Starts a rollout worker in the place of a dead one."""
        with self.lock:
            self._close(self.workers[number], grace_s=0.0)
            self.workers[number] = self._start(recipe, number, len(self.workers))
            return self.workers[number]

    def replace_worker(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Starts another process in the place of rollout worker ``worker``, which is dead."""
        self._replace(build(Recipe, read_yaml(self.run / "config.yaml")), int(meta["worker"]))
        return {}, {}

    def verify_weights(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Compares the published ``version`` in this pod's shared memory with its digests, after every worker has taken it from there. The reply has the
        ``bytes``. ``revisions``: of the publications that the workers took, ``None`` where one took nothing."""
        return {"bytes": self._verify(meta["version"], meta["revisions"])}, {}

    def _verify(self, version: Sequence[int], revisions: Sequence[int | None]) -> int:
        taken = {revision for revision in revisions if revision is not None}
        if not taken:
            return 0
        with self.lock:
            if self.verifier is None:
                recipe = build(Recipe, read_yaml(self.run / "config.yaml"))
                self.verifier = PublishedVerifier(open_store(store_address(recipe.coordination, self.run)), int(self.options.threads))
        incarnation, step = version
        return self.verifier.verify(WeightVersion(incarnation, step), taken)

    def stop_worker(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """End the worker's processes, alive or dead."""
        with self.lock:
            self._end(grace_s=5.0)
        return {}, {}

    def memory(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The fields of ``ProcessMemory``, summed over the worker's processes; zeros where none live."""
        return self._memory(), {}

    def _memory(self) -> dict[str, int]:
        ranks = [rank for worker in self.workers for rank in worker.memory()]
        return {"rss_bytes": sum(rank.rss_bytes for rank in ranks), "shm_bytes": sum(rank.shm_bytes for rank in ranks)}

    def _pass_on(self, name: str) -> Method:
        def call(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
            if not self.workers:
                raise WorkerDied(f"the {self.role} worker", name, f"the {self.role} worker is not running")
            if "worker" in meta:
                # The controller deals the prompts over the workers of all pods.
                own = {key: value for key, value in meta.items() if key != "worker"}
                frame = self.workers[int(meta["worker"])].call(name, own, blobs, deadline_s=float(self.options.deadline), on_progress=progress)
                return frame.meta, frame.blobs
            if self.rollout_workers is not None:
                method: Method = getattr(self.rollout_workers, name)
                reply, payload = method(meta, blobs, progress)
            else:
                frame = self.workers[0].call(name, meta, blobs, deadline_s=float(self.options.deadline), on_progress=progress)
                reply, payload = frame.meta, frame.blobs
            if name == "train":
                reply = {**reply, "step_times": [each.to_json() for each in self.step_times()]}
            if name in MEASURED_CALLS:
                reply = {**reply, "memory": self._memory()}
            return reply, payload

        return call

    def step_times(self) -> list[RankTimes]:
        """Returns where the time of each rank of the worker has gone; none where it does not run."""
        return [each for worker in self.workers[:1] for each in worker.step_times()]

    def signal(self, number: signal.Signals) -> None:
        """Sends ``number`` to the worker's processes."""
        with self.lock:
            for worker in self.workers:
                worker.signal(number)

    def _end(self, grace_s: float) -> None:
        workers, self.workers, self.rollout_workers = self.workers, [], None
        if workers:
            with ThreadPoolExecutor(len(workers)) as pool:
                list(pool.map(lambda worker: self._close(worker, grace_s), workers))

    def _close(self, worker: WorkerGroup, grace_s: float) -> None:
        worker.close(grace_s)
        shutil.rmtree(worker.settings.folder, ignore_errors=True)

    def close(self) -> None:
        """End the workers and remove the shared memory."""
        self._end(grace_s=2.0)
        self.forks.close()
        if self.session is not None:
            self.session.close()
        self.between_pods.close()
        if self.verifier is not None:
            self.verifier.close()
        if self.buffers is not None:
            self.buffers.close()


def of_pod(options: argparse.Namespace, role: str) -> str:
    """Returns the name of ``role`` in a plan of faults."""
    return f"pod{options.pod_number}_{role}" if options.pod_number else role


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=tuple(CALLS), required=True)
    for name in ("--run", "--pod-id", "--credential", "--port-file"):
        parser.add_argument(name, required=True)
    parser.add_argument("--pod-number", type=int, default=0)
    parser.add_argument("--join", metavar="STORE", default="")
    parser.add_argument("--member", default="")
    parser.add_argument("--lease", type=float, default=15.0)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--faults", default="")
    parser.add_argument("--forks", type=int, metavar="FD", help="a connection to the fork server that the sidecars of the pod share")
    parser.add_argument("--target", default="", help="the module of the worker's calls, where it is not that of the role")
    add_tls(parser)
    options = parser.parse_args()
    WAITS.begin(f"the {options.role} shim" + (f" of pod {options.pod_number}" if options.pod_number else ""))
    setup(f"{options.role}_shim", Path(options.run) / "logs")
    log_uncaught()
    shim = Shim(options, None if options.forks is None else SharedForkServer(socket.socket(fileno=options.forks)))
    point = FaultPlan.parse(options.faults).point(of_pod(options, f"{options.role}_shim"), Path(options.run)) if options.faults else no_fault
    methods, credential, name = shim.methods(), read_credential(Path(options.credential)), f"the {options.role} sidecar"
    server = RpcServer(methods, credential, name=name, fault_point=point)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.start()
    shim.prepare()
    shim.join(server.port)
    port_file = Path(options.port_file)
    fresh = port_file.with_suffix(".tmp")
    fresh.write_text(str(server.port), encoding="ascii")
    fresh.replace(port_file)
    logger.info("listening on port %d", server.port)
    ended.wait()
    shim.close()
    # Calls that still run are in daemon threads, which are not joined.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        # A port that is taken, or a store that does not answer: what a user can mend has no traceback.
        logger.error("%s", error)
        sys.exit(f"tandem: {error}")
