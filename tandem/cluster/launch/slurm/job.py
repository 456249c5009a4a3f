"""What a job of Slurm runs on its first node: ``python -m tandem.cluster.launch.slurm.job RUN``, which the batch script ends with.

It is the only one who knows Slurm: it starts the run's etcd and a pod on every further node beside the run's process, passes on the signals, and returns an
exit status that Slurm can act on (``tandem.cluster.launch.job``). After the time limit's signal the job queues itself again, with ``slurm.requeue``. Imports
no torch.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from tandem.cluster.health.preflight import check_nodes, check_outcome, preflight, write_outcome
from tandem.cluster.launch.addresses import own_address
from tandem.cluster.launch.job import SAVED, RunProcess, exit_status, read_job, store_of_run, wait_for_earlier
from tandem.cluster.launch.record import FOLDER, Record
from tandem.cluster.launch.slurm.addresses import address_of
from tandem.cluster.launch.slurm.commands import ask, node_address
from tandem.cluster.launch.slurm.kept import folders_of, kept_on_node
from tandem.cluster.launch.slurm.parts import Part, end_earlier_steps, parts_of_job
from tandem.config.recipe import AnyRecipe, load_config
from tandem.jobs.verify.verify_records import steps_on_disk
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.process.processes import Threads, spawn, terminate, wait
from tandem.runtime.records.checkpoint_tiers import tiers_of
from tandem.runtime.records.logs import setup
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

_POD_ENDS_S = 10.0
_FORGETS_S = 60.0


class Job:
    """The run in ``directory`` as a job. ``is_over_time``: Slurm has said that its time ends soon."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.is_over_time = directory, False
        self._process = RunProcess(directory)
        self._parts: tuple[Part, ...] = ()
        # From the first moment on: Slurm sends them when it wants, and they end a process that does not expect them.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Returns the exit status of the job."""
        record, recipe = read_job(self.directory)
        self._parts = parts_of_job()
        nodes = [node for part in self._parts for node in part.nodes]
        logger.info("job %s on %s", os.environ["SLURM_JOB_ID"], ", ".join(nodes))
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")):
            wait_for_earlier(self.directory, _say, lambda: self._process.stops > 0)
        if ended := end_earlier_steps(self._parts):
            logger.info("ended %d steps of the job's earlier life", ended)
        with kept_on_node(recipe.checkpoint, self.directory, nodes[0]), self._beside(record, recipe, nodes) as overrides:
            status = self._process.run(recipe, [*record.overrides, *overrides])
        is_queued_again = self.is_over_time and recipe.slurm.requeue
        if status == SAVED and not is_queued_again:
            self._forget(recipe, nodes)
        if status == SAVED and is_queued_again:
            _say("its time ends: it queues itself again, to continue from the checkpoint")
            try:
                ask("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
            except (UserError, RunError) as error:
                print(f"tandem: {error}; 'tandem resume' continues the run in a new job", file=sys.stderr, flush=True)
        return status

    def _forget(self, recipe: AnyRecipe, nodes: list[str]) -> None:
        """Removes what the ``nodes`` keep of the run's checkpoints, which its user has stopped: its folder has the newest. What is newer stays, and is said."""
        if not folders_of(recipe.checkpoint):
            return
        newest = max(steps_on_disk(self.directory), default=0)
        newer = [tier for tier in tiers_of(self.directory) if tier.tier in ("memory", "local") and tier.step > newest]
        for tier in newer:
            where = " and ".join(sorted(tier.where))
            _say(f"the checkpoint of step {tier.step} stays in tier {tier.tier} of {where}: the run's folder has none that is as new")
        if newer:
            return
        _end(self._start("tandem.cluster.launch.slurm.kept", nodes, "", lambda part: []), _FORGETS_S)

    @contextlib.contextmanager
    def _beside(self, record: Record, recipe: AnyRecipe, nodes: list[str]) -> Iterator[list[str]]:
        """Inside, the run has its etcd, and the further ``nodes`` pods that join it. Yields the new values of the controller."""
        if not recipe.pods.may_join:
            yield []
            return
        host = own_address(address_of(node_address(nodes[1]))) if len(nodes) > 1 else "127.0.0.1"
        with contextlib.ExitStack() as stack:
            shared = stack.enter_context(store_of_run(self.directory, record, recipe, host, self._process, _say))
            if recipe.cluster.preflight and len(nodes) > 1:
                nodes = self._fit(recipe, nodes, host, [*record.overrides, *shared])
            if others := nodes[1:]:
                pods = self._start_pods(others, host, shared)
                stack.callback(_end, pods)
            yield [*shared, f"--pods.host={host}"]

    def _fit(self, recipe: AnyRecipe, nodes: list[str], host: str, overrides: list[str]) -> list[str]:
        """Returns the ``nodes`` that have passed the preflight. Raises ``UserError`` if the run cannot begin on them."""
        check_nodes(nodes)
        with_store = load_config(self.directory / "config.yaml", overrides)
        store = open_store(store_address(with_store.coordination, self.directory))
        measuring = self._start("tandem.cluster.health.on_node", nodes, host, lambda part: overrides)

        def is_over() -> bool:
            return self._process.stops > 0 or all(each.poll() is not None for each in measuring)

        try:
            kinds = {node: str(part.group) for part in self._parts for node in part.nodes}
            outcome = preflight(store, nodes, recipe.cluster, is_over, kinds)
        finally:
            _end(measuring)
            store.close()
        if self._process.stops:
            return nodes[:1]
        write_outcome(self.directory / FOLDER, outcome)
        for each in check_outcome(outcome, nodes, recipe.cluster):
            _say(f"{each.text}; it is cordoned")
        logger.info("preflight: %s are fit", ", ".join(outcome.fit))
        return list(outcome.fit)

    def _start_pods(self, nodes: list[str], host: str, overrides: list[str]) -> "list[subprocess.Popen[bytes]]":
        """Returns the ``srun`` of the pods on those ``nodes`` of each part. The first node of the run is reached at ``host``."""
        # They have passed the preflight, all at the same time.
        given = [*overrides, "--cluster.preflight=false"]
        return self._start("tandem.cluster.launch.slurm.pod", nodes, host, lambda part: given if part.trains else [*given, "--rollout-only"])

    def _start(self, module: str, nodes: list[str], host: str, words: Callable[[Part], list[str]]) -> "list[subprocess.Popen[bytes]]":
        """Returns the ``srun`` of ``module`` on those ``nodes`` of each part of the job, with the ``words`` for it."""
        steps = []
        for part in self._parts:
            if not (own := [node for node in nodes if node in part.nodes]):
                continue
            options = [*part.step(own), "--cpu-bind=none", "--kill-on-bad-exit=0", "--label", "--quiet"]
            command = [sys.executable, "-m", module, str(self.directory), host, *words(part)]
            steps.append(spawn(None, [*options, *command], program="srun", threads=Threads(1), new_session=True))
        return steps

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and self.is_over_time:
            return
        self.is_over_time |= number == signal.SIGUSR1
        self._process.stop()


def _say(text: str) -> None:
    print(f"[job {os.environ['SLURM_JOB_ID']}] {text}", flush=True)


def _end(steps: "list[subprocess.Popen[bytes]]", within_s: float = _POD_ENDS_S) -> None:
    """Lets the steps end, such as pods that the run has released, and ends those that have not ``within_s``."""
    ends = time.monotonic() + within_s
    for step in steps:
        wait(step, max(0.0, ends - time.monotonic()))
    for step in steps:
        terminate(step, _POD_ENDS_S)


def main() -> int:
    job = Job(Path(sys.argv[1]))

    def run() -> int:
        setup("job", job.directory / "logs")
        return job.run()

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
