"""The ranks of a run on data on several machines, with the calls of a ``WorkerGroup``, as the supervisor of a run makes them. Imports no torch."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tandem.config.pretrain import PretrainRecipe
from tandem.jobs.corrupt_nodes import cordon_corrupt
from tandem.jobs.data_run.machines_watch import MachinesWatch
from tandem.jobs.tiers_of_run import near_tiers
from tandem.pod.data_trainer import data_trainer, release_leaving
from tandem.pod.failures import SidecarDied
from tandem.pod.leadership import leading
from tandem.pod.own_ranks import OwnRanks
from tandem.pod.trainer_pods import TrainerPods
from tandem.runtime.callback import Callback
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.runtime.process.worker_group import RanksLost
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import kept_name, local_folder
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.rpc.calls import Meta, Progress
from tandem.trainer.corruption.finding import CorruptionFinding
from tandem.types.wire import Frame


class MachineRanks:
    """The ranks of ``trainer``, of which ``own`` are here. One start of them lasts until ``close``. ``record``: takes what has become of pods. ``tiers``:
    returns where those that start keep and find checkpoints. ``replaces``: cordons the machines with silent data corruption, and returns whether spares take
    their places. ``watch``: of the machines while they train. ``say``: of messages for the user."""

    def __init__(
        self, trainer: TrainerPods, own: OwnRanks, record: Callable[[], None], tiers: Callable[[], dict[str, Any]],
        replaces: Callable[[CorruptionFinding], bool], watch: MachinesWatch, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._trainer, self._own, self._record, self._tiers, self.replaces, self._watch, self._say = trainer, own, record, tiers, replaces, watch, say

    def signal(self, number: signal.Signals) -> None:
        """Sends ``number`` to the ranks of this machine, which agree with all others on what they are asked."""
        self._own.signal(number)

    def call(
        self, name: str, meta: Meta | None = None, *, deadline_s: float, on_progress: Progress | None = None, on_poll: Callable[[], None] = lambda: None
    ) -> Frame:
        """Starts the ranks where they do not run, with those of pods that may have to be waited for, and calls ``name`` on all. Returns the reply of rank 0.
        Raises ``RanksLost``, and what a rank raised."""
        self._own.lost, self._watch.moving, step = None, {}, 0

        def heard(progress: dict[str, Any]) -> None:
            nonlocal step
            kind, *values = progress["event"]
            if kind == "row":
                step = int(values[0]["step"]) + 1
            if on_progress is not None:
                on_progress(progress)

        def poll() -> None:
            on_poll()
            self._watch.look(step)
            self._record()
            self._obey_cordons()

        wanted = len(self._trainer.shares) - 1
        self._say(f"waiting for {wanted} pod{'' if wanted == 1 else 's'} that train{'s' if wanted == 1 else ''} ('tandem pod' on each further machine)")
        try:
            self._trainer.start()
            self._record()
            with self._watch.watching():
                return self._trainer.call(name, {**(meta or {}), "tiers": self._tiers()}, on_progress=heard, on_poll=poll)
        except SidecarDied as death:
            lost = self._own.lost
            # The ranks of other machines are named in the reason alone.
            raise RanksLost("the run", name, death.reason, () if lost is None else lost.ranks, step) from None

    def _obey_cordons(self) -> None:
        """Raises ``SidecarDied`` where this run has cordoned a node with ranks, which may have what is wrong. Where others have, and a pod waits that can have
        its ranks, they are asked to save their step and stop."""
        assert self._trainer.joined is not None
        if why := self._trainer.joined.why_replaced():
            raise SidecarDied("trainer", "worker", why)
        if moving := self._watch.to_move():
            self._watch.moving = dict(moving)
            self._say(f"the ranks on {' and '.join(moving)} are given to a pod that waits, from the step that is saved now")
            self._own.signal(signal.SIGTERM)

    def close(self) -> None:
        """Ends the ranks of all machines. A pod that does not answer is left out, and joins anew."""
        self._trainer.discard()

    def let_go(self) -> list[str]:
        """Releases the pods that leave, after the ranks have ended. Returns why the ranks of pods have ended, in words: empty if those of none have."""
        left, moving = [f"{pod.name} left the run" for pod in release_leaving(self._trainer)], self._watch.moving
        self._watch.moving = {}
        # The next start of ranks leaves those out.
        return [*left, *(f"node {name} is cordoned" for name in moving)]


@contextlib.contextmanager
def ranks_of_machines(
    recipe: PretrainRecipe, directory: Path, own: OwnRanks, callback: Callback, requests: SignalRequests
) -> Iterator[MachineRanks]:
    """Yields the ranks of ``recipe``, whose lock on ``directory`` this process holds; it leads the run in etcd until the end of the block."""
    journal_path = directory / "journal.sqlite"

    def on_poll() -> None:
        record()
        if requests.stop:
            raise KeyboardInterrupt

    def record() -> None:
        joining = trainer.joined.joining if trainer.joined is not None else None
        news = [] if joining is None else [*joining.told(), *joining.nodes.told()]
        for each in news:
            _note(watch, each, callback)

    with contextlib.ExitStack() as stack:
        with Journal(journal_path) as journal:
            fence = stack.enter_context(leading(recipe.coordination, directory, journal, callback.message, pods_join=True))
        trainer = stack.enter_context(data_trainer(recipe, directory, own, fence, on_poll))
        assert trainer.joined is not None
        watch = stack.enter_context(MachinesWatch(recipe, directory, trainer, callback))
        with Journal(journal_path) as journal, contextlib.closing(MetricsFile(directory / "metrics.jsonl")) as metrics:
            near = near_tiers(recipe, directory, journal, metrics, trainer.joined.joining, callback.message)
        stack.callback(near.close)

        def tiers() -> dict[str, Any]:
            checkpoint = recipe.checkpoint
            with Journal(journal_path) as journal, contextlib.closing(MetricsFile(directory / "metrics.jsonl")) as metrics:
                # What was not trusted has another name from then on.
                near.of = kept_name(directory, journal) if checkpoint.memory_every_steps else ""
                near.local = local_folder(checkpoint.local_directory, directory, journal)
                newest, incarnation = metrics.last_row(), journal.next_incarnation()
            near.recorded = 0 if newest is None else int(newest["step"]) + 1
            return near.describe(incarnation, loads=True)

        yield MachineRanks(trainer, own, record, tiers, partial(cordon_corrupt, recipe, directory.name), watch, callback.message)
        # The run has finished, and nothing reads again what would outlive its keepers.
        near.forget()


def _note(watch: MachinesWatch, news: dict[str, Any], callback: Callback) -> None:
    """Journals and tells that a pod ``left`` or was ``refused``, or that a ``node`` has another state."""
    if "node" in news:
        is_cordoned = news["state"] == "cordoned"
        watch.record("cordon" if is_cordoned else "node", news)
        if is_cordoned:
            callback.message(f"node {news['node']} is cordoned: {news['reason']}")
        return
    watch.record("membership", news)
    what, why = next(key for key in ("joined", "left", "refused") if key in news), f": {news['reason']}" if news.get("reason") else ""
    did = {"joined": "joined the run", "left": "left the run", "refused": "could not join the run"}[what]
    callback.message(f"pod {news[what]} ({news['name']}) {did}{why}")
