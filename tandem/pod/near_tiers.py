"""The tiers of checkpoints before a run's folder, as the controller of a pod gives them to the trainer's ranks: which keepers there are, found in the store of
the run, and the folder on a local disk. Imports no torch.

The keeper of this machine is a process of the controller, which outlives the trainer's shim and ranks. Every pod that joined from another machine has one,
if it was told to: a process of its command, or of the launcher that started it, which outlives the controller, and which each life of the pod publishes in the
store on its lease. Keepers at one address are on one node.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.config.recipe import AnyRecipe
from tandem.pod.weights_between_pods import tls_arguments
from tandem.runtime.coordination.store import Store
from tandem.runtime.rpc.calls import CallError
from tandem.trainer.checkpoint.format.manifest import data_name, index_name
from tandem.trainer.checkpoint.memory.keeper_process import LOOPBACK, KeeperProcess
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)
KEEPERS = "checkpoint_memory/"
"""Beginning of the keys of the keepers of pods that joined, by name."""


def keeper_of(recipe: AnyRecipe, directory: Path, credential: str) -> KeeperProcess | None:
    """Returns the keeper of the controller's machine for the run in ``directory``, which does not run yet; ``None`` without checkpoints in memory."""
    if not recipe.checkpoint.memory_every_steps:
        return None
    pods = recipe.pods
    host = pods.host if pods.may_join else LOOPBACK
    kept_in = recipe.checkpoint.memory_directory
    return KeeperProcess(socket.gethostname(), directory, credential, host=host, tls=tls_arguments(pods)[1:], kept_in=kept_in, run=directory.name)


_PATIENCE = 3
"""Checkpoints that one node alone keeps before it is said, where pods may join."""
_AWAIT_S, _LOOK_S = 30.0, 0.2
"""How long a resume waits for keepers to be in the store: a pod that lost its lease with the controller joins again within this time."""


@dataclass
class NearTiers:
    """``own``: the keeper of this machine (``None``: no checkpoint is kept in memory). ``ranks``: how many the trainer has. ``local``: the folder on a local
    disk, of this machine, or of each that has ranks (``is_spread``); ``host``: how others reach this machine. ``copies``: where copies of the run's checkpoints
    are (``checkpoint.upload``). ``open_store``: opens the store of the run, where pods may join; ``joined``: the names of those that take part now. ``say`` is
    told when one node alone keeps the checkpoints in memory. ``of``: the name under which the keepers have the run's checkpoints. ``recorded``: the step up to
    which the run's folder has rows, while a resume begins; ``expected``: by rank, the keepers on other machines than the controller's that had its files of the
    newest checkpoint, where that is no older than those of the folder. ``launched``: returns the keepers of the run's launcher that answer, which no store has
    to name."""

    own: KeeperProcess | None = None
    ranks: int = 1
    credential: str = ""
    local: Path | None = None
    copies: str = ""
    open_store: Callable[[], Store] | None = None
    joined: Callable[[], Collection[str]] = tuple
    say: Callable[[str], None] = lambda line: None
    of: str = ""
    host: str = LOOPBACK
    is_spread: bool = False
    recorded: int | None = None
    expected: Mapping[int, Collection[str]] = field(default_factory=dict)
    launched: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    _store: Store | None = field(default=None, init=False)
    _alone: int = field(default=0, init=False)

    def describe(self, incarnation: int = 0, *, loads: bool = False) -> dict[str, Any]:
        """Returns what the ranks of ``incarnation`` of the trainer are told: the keepers in ``memory``, as of ``Keepers.of``, the ``local`` folder, and the
        step up to which they count (``recorded``). One that ``loads`` reads from every keeper in the store, also where the pod does not take part yet."""
        memory = None
        if self.own is not None:
            if loads:
                self._await_expected()
            keepers = [*self._here(self.own), *(self._all() if loads else self._joined())]
            memory = {
                "keepers": keepers, "credential": self.credential, "nodes": [self.own.host] * self.ranks, "of": self.of, "incarnation": incarnation,
            }  # fmt: skip
        local = None
        if self.local is not None:
            local = {"folder": str(self.local), "is_spread": self.is_spread, "node": self.host, "credential": self.credential}
        return {"memory": memory, "local": local, "recorded": self.recorded}

    def begun(self) -> None:
        """A resume has loaded its checkpoint: what it was to begin with is no limit any more."""
        self.recorded, self.expected = None, {}

    def _await_expected(self) -> None:
        """Waits until every rank's files that other machines had are in reach again, for a while and once."""
        expected, self.expected = self.expected, {}
        missing = self._missing(expected)
        if not missing:
            return
        self.say(f"waiting up to {_AWAIT_S:g} s for the checkpoints in the memory of {' and '.join(sorted(missing))}")
        ends = time.monotonic() + _AWAIT_S
        while missing and time.monotonic() < ends:
            time.sleep(_LOOK_S)
            missing = self._missing(expected)
        if missing:
            self.say(f"the memory of {' and '.join(sorted(missing))} is not in reach; what it had is read from the next tier")

    def _missing(self, expected: Mapping[int, Collection[str]]) -> set[str]:
        """Returns the keepers of ``expected`` of which a rank has none in reach."""
        if not expected:
            return set()
        there, here = {str(keeper["name"]) for keeper in self._all()}, self._held_here()
        return {name for rank, names in expected.items() if rank not in here and not there & set(names) for name in names}

    def _held_here(self) -> set[int]:
        """Returns the ranks whose files of the newest checkpoint the keeper of this machine has found here: those of a pod that was here before."""
        assert self.own is not None
        self._here(self.own)
        newest = set(self.own.held[max(self.own.held)]) if self.own.held else set()
        return {rank for rank in range(self.ranks) if {index_name(rank), data_name(rank)} <= newest}

    def tell_of_nodes(self, nodes: int) -> None:
        """Says that checkpoints are kept by one node alone, where they have come to be: of pods that may join the first may be on their way."""
        self._alone = 0 if nodes > 1 else self._alone + 1
        if self._alone == (1 if self.open_store is None else _PATIENCE):
            self.say(
                "checkpoint.memory_every_steps: the checkpoints in memory are kept by one node alone, and do not survive its loss; let a pod of another "
                "machine join (pods.max_count), or set checkpoint.upload"
            )

    @staticmethod
    def _here(own: KeeperProcess) -> list[Mapping[str, Any]]:
        """Returns the keeper of this machine, started again if it has died; without it others may keep the checkpoints."""
        try:
            return [{**own.start(), "node": own.host}]
        except (CallError, RunError, UserError, OSError) as error:
            logger.warning("the keeper of this machine does not start: %s", error)
            return []

    def _joined(self, every: bool = False) -> list[Mapping[str, Any]]:
        """Returns the keepers of pods that joined, by name: of those that take part, or of ``every`` one in the store. The store may be away for a while: those
        of this machine remain."""
        if self.open_store is None:
            return []
        names = set(self.joined())
        try:
            self._store = self._store or self.open_store()
            entries = self._store.list(KEEPERS)
        except (RunError, UserError) as error:
            logger.warning("the keepers of other machines were not read from the store: %s", error)
            return []
        return [json.loads(entry.value) for entry in entries if every or entry.key.removeprefix(KEEPERS) in names]

    def _all(self) -> list[Mapping[str, Any]]:
        """Returns the keepers of other machines that may have checkpoints: every one in the store, and those of the launcher that no pod has told of yet."""
        return list({(keeper["host"], keeper["port"]): keeper for keeper in (*self.launched(), *self._joined(every=True))}.values())

    def forget(self) -> None:
        """Removes what would outlive this machine's keeper: the run has finished."""
        if self.own is not None:
            self.own.forget()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        if self.own is not None:
            self.own.close()
