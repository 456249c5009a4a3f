"""Watches the machines of a run on data while their ranks train: the time of each rank, the health of the nodes, and which are cordoned. Imports no torch.

The call of the ranks lasts as long as the run, so a thread asks the pods and the store beside it. What it finds is recorded by the thread that waits for the
ranks (``look``). The journal has several writers then, whom SQLite orders: the controller its events, and rank 0 the rest.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tandem.config.pretrain import PretrainRecipe
from tandem.layout.placement import mesh_of
from tandem.pod.failures import SidecarDied
from tandem.pod.joined_trainers import JoinedTrainer
from tandem.pod.own_ranks import OwnRanks
from tandem.pod.trainer_pods import TrainerPod, TrainerPods
from tandem.runtime.callback import Callback
from tandem.runtime.coordination.membership import Member, members
from tandem.runtime.health.node_watch import NodeWatch
from tandem.runtime.health.run_health import RunHealth
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.records.journal import Journal
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_ANSWER_S = 5.0
_AT_ONCE = 32
"""Pods that are asked at the same time."""
_END_S = 1.0


class MachinesWatch:
    """Of the run of ``recipe`` in ``directory``, with the ranks of ``trainer``. ``moving``: the nodes whose ranks stop now because they are cordoned, with the
    reasons."""

    def __init__(self, recipe: PretrainRecipe, directory: Path, trainer: TrainerPods, callback: Callback) -> None:
        assert trainer.joined is not None
        self._trainer, self._joined, self._joining, self._callback = trainer, trainer.joined, trainer.joined.joining, callback
        self._journal_path = directory / "journal.sqlite"
        nodes = self._joining.nodes
        self._health = RunHealth(mesh_of(recipe.parallel), recipe.health, self.record, callback, nodes.unfit)
        nodes.on_reading = self._health.reading
        self._own_node = NodeWatch(socket.gethostname(), recipe.health, self._health.reading, logs_of=directory, own="the controller")
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="machines-watch")
        self._lock = threading.Lock()
        self._times: list[RankTimes] | None = None
        self._present: Sequence[Member] = ()
        self._kept: frozenset[str] = frozenset()
        self.moving: dict[str, str] = {}

    def __enter__(self) -> "MachinesWatch":
        self._own_node.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._own_node.__exit__(*error)
        self._pool.shutdown(wait=False)

    def record(self, kind: str, detail: dict[str, Any]) -> None:
        """Journals an event, also while rank 0 writes."""
        with Journal(self._journal_path, brief=True, is_beside=True) as journal:
            journal.record_event(kind, detail)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the pods that have the ranks are asked."""
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(ended,), name="machines-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            # A pod or a store that does not answer holds up no restart.
            thread.join(timeout=_END_S)
            with self._lock:
                self._times, self._present = None, ()

    def look(self, step: int) -> None:
        """Records what was found since the last look. ``step``: the one that the ranks are in."""
        with self._lock:
            times, self._times = self._times, None
        if times is not None:
            self._health.look(step, times)

    def to_move(self) -> Mapping[str, str]:
        """Returns the nodes, with the reasons, that others have cordoned and whose ranks pods that wait can have, as far as there are enough of those; none
        while some move already. A node whose ranks must stay is told once."""
        with self._lock:
            present = {member.name: member for member in self._present}
        if self.moving or not present:
            return {}
        nodes, chosen = self._joining.nodes, [pod.name for pod in self._joined.chosen if pod.channel.is_running]
        held = {name: cordon for name in chosen if name in present and (cordon := nodes.cordon_of(present[name])) is not None and cordon.by != nodes.run}
        waiting = [each for each in present.values() if each.name not in chosen and self._joining.may_train(each)]
        moving = {name: held[name].reason for name in sorted(held)[: len(waiting)]}
        kept = frozenset(held.keys() - moving.keys())
        for name in sorted(kept - self._kept):
            self._callback.message(f"node {name} keeps its ranks, though it is cordoned: no other pod waits for them")
        self._kept = kept
        return moving

    def _follow(self, ended: threading.Event) -> None:
        troubles = set[str]()
        with contextlib.ExitStack() as stack:
            store = None
            while not ended.wait(_LOOK_S):
                times = [each for of_pod in self._pool.map(_step_times, self._trainer.pods) for each in of_pod]
                with self._lock:
                    self._times = times if not ended.is_set() else None
                try:
                    store = store or stack.enter_context(contextlib.closing(self._joined.open_store()))
                    present = members(store)
                    self._joining.nodes.look(store)
                    self._joining.nodes.note(present, [pod.name for pod in self._joining.all_lives()])
                except Exception as error:
                    # A look that fails must not end the watch: the run itself ends where the store stays away.
                    if str(error) not in troubles:
                        troubles.add(str(error))
                        logger.warning("the nodes cannot be looked at: %s", error, exc_info=not isinstance(error, RunError | UserError))
                    continue
                with self._lock:
                    self._present = present if not ended.is_set() else ()


def _step_times(pod: TrainerPod) -> list[RankTimes]:
    """Returns the times of the ranks of ``pod`` with its machine; none if it does not answer, which other parts judge."""
    channel = pod.channel
    assert isinstance(channel, OwnRanks | JoinedTrainer)
    try:
        return [each.on(pod.node, pod.host) for each in channel.step_times(_ANSWER_S)]
    except SidecarDied:
        return []
