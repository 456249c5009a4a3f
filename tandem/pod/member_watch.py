"""Follows the members of a run, so that a pod that was started elsewhere and dies is noticed also while no call of it is in progress. Imports no torch.

The key of a pod ends with its lease, or when it leaves. One that leaves still answers; one that does not is lost, and its calls end at once, so that others
draw its groups without waiting for its heartbeat. One thread follows all pods, by one watch of etcd.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tandem.pod.failures import SidecarDied
from tandem.pod.joined_channel import JoinedChannel
from tandem.pod.rollout_pod import RolloutPod
from tandem.runtime.coordination.membership import Member, members, watch_members
from tandem.runtime.coordination.store import Store, WatchTimeout
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
_ANSWER_S = 5.0
_AT_ONCE = 32
"""Pods that are asked at the same time: those of a rack that lost its power."""


class MemberWatch:
    """``open_store``: opens the store that the watch has for itself. ``pods``: returns those that take part or are prepared. ``on_lost``: is told of each that
    was found dead, in a thread of the watch."""

    def __init__(
        self, open_store: Callable[[], Store], pods: Callable[[], Sequence[RolloutPod]], on_lost: Callable[[RolloutPod], None] = lambda pod: None
    ) -> None:
        self._open_store, self._pods, self._on_lost = open_store, pods, on_lost
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="member-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch. A call that waits for the store ends with the process."""
        self._ended.set()

    def _follow(self) -> None:
        store = self._open_store()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="member-watch") as pool:
            known: Sequence[Member] | None = None
            while not self._ended.is_set():
                try:
                    present = members(store) if known is None else watch_members(store, known, _LOOK_S)
                except WatchTimeout:
                    continue
                except (RunError, UserError) as error:
                    # The run itself ends where the store stays away; its members are looked at anew when it is back.
                    logger.warning("the members of the run cannot be followed: %s", error)
                    self._ended.wait(1.0)
                    continue
                there = {(member.name, member.revision) for member in present}
                gone = {(member.name, member.revision) for member in known or ()} - there
                for pod in [pod for pod in self._pods() if (pod.name, pod.revision) in gone]:
                    pool.submit(self._ask, pod)
                known = present
        store.close()

    def _ask(self, pod: RolloutPod) -> None:
        """Ends the calls of a pod without a key, unless it answers because it only leaves."""
        channel = pod.channel
        if not isinstance(channel, JoinedChannel) or channel.is_ended:
            return
        try:
            channel.ask_alive(_ANSWER_S)
        except SidecarDied as death:
            reason = f"its lease is over and it does not answer ({death.reason})"
            logger.warning("pod %d (%s) is lost: %s", pod.number, pod.name, reason)
            channel.lose(reason)
            self._on_lost(pod)
