"""The keeper of checkpoints in the memory of a pod that joined: started, published in the store of the run, and started again if it dies. Imports no torch."""

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from tandem.pod.near_tiers import KEEPERS
from tandem.runtime.coordination.session import Session
from tandem.runtime.rpc.calls import CallError
from tandem.trainer.checkpoint.memory.keeper_process import KeeperProcess
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)
_LOOK_S = 1.0


class JoinedKeeper:
    """Keeps the keeper of the pod ``name`` running, from a thread, and its key on the lease of ``session``, until ``close``."""

    def __init__(self, name: str, folder: Path, credential: str, host: str, tls: Sequence[str], session: Session) -> None:
        self._name, self._host, self._session = name, host, session
        self._process = KeeperProcess(name, folder, credential, host=host, tls=tls)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keeper", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        told, troubles = None, set[str]()
        while not self._ended.is_set():
            try:
                # Where it has died, its checkpoints are lost, and the next ones are kept again.
                facts = json.dumps({**self._process.start(), "node": self._host}).encode()
                if facts != told:
                    self._session.store.put(KEEPERS + self._name, facts, self._session.lease)
                    logger.info("keeps checkpoints in memory: %s", facts.decode())
                    told = facts
            except (RunError, UserError, CallError, OSError) as error:
                if str(error) not in troubles:
                    troubles.add(str(error))
                    logger.warning("keeps no checkpoints in memory: %s", error)
            self._ended.wait(_LOOK_S)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=_LOOK_S)
        self._process.close()
