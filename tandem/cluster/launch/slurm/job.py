"""What a job of Slurm runs on its first node: ``python -m tandem.cluster.launch.slurm.job RUN``, which the batch script ends with.

It continues the run in ``RUN``, or begins it, with ``tandem resume``, and is the only one who knows Slurm: it starts the run's etcd and a pod on every further
node, passes on the signals, and returns an exit status that Slurm can act on. Imports no torch.

    0   the run has finished
    75  it was stopped and saved, and a resume continues it (``EX_TEMPFAIL``); after the time limit's signal the job queues itself again, with ``slurm.requeue``
    1   it failed;  2  it was refused
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tandem.cluster.etcd_process import own_etcd
from tandem.cluster.health.preflight import check_nodes, check_outcome, preflight, write_outcome
from tandem.cluster.launch.record import FOLDER, PASSWORD, Record, read_record
from tandem.cluster.launch.slurm.addresses import address_of, own_address
from tandem.cluster.launch.slurm.commands import SAVED, ask, node_address, node_names
from tandem.config.recipe import AnyRecipe, Recipe, load_config
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.process.processes import Threads, available_cores, spawn, terminate, wait
from tandem.runtime.records.logs import setup
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

_INTERRUPTED = 130
_POD_ENDS_S = 10.0


class Job:
    """The run in ``directory`` as a job. ``is_over_time``: Slurm has said that its time ends soon."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.is_over_time, self._stops = directory, False, 0
        self._overrides: tuple[str, ...] = ()
        self._controller: subprocess.Popen[bytes] | None = None
        # From the first moment on: Slurm sends them when it wants, and they end a process that does not expect them.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Returns the exit status of the job."""
        record = read_record(self.directory)
        if record is None:
            raise UserError(f"'{self.directory}' was not launched on Slurm: it has no {FOLDER}/record.json")
        self._overrides = record.overrides
        recipe = load_config(self.directory / "config.yaml", record.overrides)
        nodes = node_names(os.environ["SLURM_JOB_NODELIST"])
        logger.info("job %s on %s", os.environ["SLURM_JOB_ID"], ", ".join(nodes))
        with contextlib.ExitStack() as stack:
            overrides = [*record.overrides, *stack.enter_context(self._beside(record, recipe, nodes))]
            arguments = ["resume", str(self.directory), "--on", "local", *overrides]
            threads = Threads(recipe.machine.threads or available_cores())
            self._controller = spawn("tandem.cli.main", arguments, threads=threads, new_session=True)
            for _ in range(self._stops):
                self._controller.terminate()
            status = self._controller.wait()
        logger.info("the controller ended with %d", status)
        # One that was asked to stop before it listened has done nothing.
        is_stopped = status == _INTERRUPTED or (self._stops and status == -signal.SIGTERM)
        if not is_stopped:
            return status if status >= 0 else 128 - status
        if self.is_over_time and recipe.slurm.requeue:
            print(f"[job {os.environ['SLURM_JOB_ID']}] its time ends: it queues itself again, to continue from the checkpoint", flush=True)
            try:
                ask("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
            except (UserError, RunError) as error:
                print(f"tandem: {error}; 'tandem resume' continues the run in a new job", file=sys.stderr, flush=True)
        return SAVED

    @contextlib.contextmanager
    def _beside(self, record: Record, recipe: AnyRecipe, nodes: list[str]) -> Iterator[list[str]]:
        """Inside, the run has its etcd, and the further ``nodes`` pods that join it. Yields the new values of the controller."""
        if not isinstance(recipe, Recipe) or not recipe.pods.may_join:
            yield []
            return
        host = own_address(address_of(node_address(nodes[1]))) if len(nodes) > 1 else "127.0.0.1"
        shared: list[str] = []
        with contextlib.ExitStack() as stack:
            if record.starts_etcd:
                log, password = self.directory / "logs" / "etcd.log", self.directory / FOLDER / PASSWORD
                etcd = stack.enter_context(own_etcd(host, password, log, f"{recipe.coordination.prefix.rstrip('/')}/"))
                logger.info("etcd at %s, cluster %s", etcd.endpoint, etcd.cluster_id)
                shared += etcd.overrides()
            if recipe.cluster.preflight and len(nodes) > 1:
                nodes = self._fit(recipe, nodes, host, shared)
            if others := nodes[1:]:
                stack.callback(_end, self._start_pods(others, host, shared))
            yield [*shared, f"--pods.host={host}"]

    def _fit(self, recipe: Recipe, nodes: list[str], host: str, overrides: list[str]) -> list[str]:
        """Returns the ``nodes`` that have passed the preflight. Raises ``UserError`` if the run cannot begin on them."""
        check_nodes(nodes)
        overrides = [*self._overrides, *overrides]
        with_store = load_config(self.directory / "config.yaml", overrides)
        assert isinstance(with_store, Recipe)
        store = open_store(store_address(with_store.coordination, self.directory))
        measuring = self._start("tandem.cluster.health.on_node", nodes, host, overrides)
        try:
            outcome = preflight(store, nodes, recipe.cluster, lambda: self._stops > 0 or measuring.poll() is not None)
        finally:
            _end(measuring)
            store.close()
        if self._stops:
            return nodes[:1]
        write_outcome(self.directory / FOLDER, outcome)
        for each in check_outcome(outcome, nodes, recipe.cluster):
            print(f"[job {os.environ['SLURM_JOB_ID']}] {each.text}; it is cordoned", flush=True)
        logger.info("preflight: %s are fit", ", ".join(outcome.fit))
        return list(outcome.fit)

    def _start_pods(self, nodes: list[str], host: str, overrides: list[str]) -> "subprocess.Popen[bytes]":
        """Returns the ``srun`` of a pod on each of the ``nodes``. The first node of the run is reached at ``host``."""
        return self._start("tandem.cluster.launch.slurm.pod", nodes, host, overrides)

    def _start(self, module: str, nodes: list[str], host: str, overrides: list[str]) -> "subprocess.Popen[bytes]":
        count = len(nodes)
        step = [f"--nodelist={','.join(nodes)}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
        command = [sys.executable, "-m", module, str(self.directory), host, *overrides]
        return spawn(None, [*step, "--label", "--quiet", *command], program="srun", threads=Threads(1), new_session=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and self.is_over_time:
            return
        self.is_over_time |= number == signal.SIGUSR1
        self._stops += 1
        if self._controller is not None and self._controller.poll() is None:
            self._controller.send_signal(signal.SIGTERM)


def _end(pods: "subprocess.Popen[bytes]") -> None:
    """Lets the pods end, which the run has released, and ends those that it has not."""
    if wait(pods, _POD_ENDS_S) is None:
        terminate(pods, _POD_ENDS_S)


def main() -> int:
    directory = Path(sys.argv[1])
    job = Job(directory)
    began = time.monotonic()
    try:
        setup("job", directory / "logs")
        return job.run()
    except (UserError, RunError) as error:
        print(f"tandem: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        logger.info("the job ends after %.0f s", time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
