"""How often sidecars and rollout workers were replaced in a run, and how often they may be."""

import logging
from dataclasses import dataclass, field
from time import sleep
from typing import Any

from tandem.pod.failures import SidecarDied
from tandem.runtime.callback import Callback
from tandem.runtime.process.backoff import Backoff, describe_wait
from tandem.runtime.records.journal import Journal
from tandem.types import RunError

logger = logging.getLogger(__name__)


@dataclass
class Restarts:
    """``most``: ``run.max_restarts``; ``count``: those so far."""

    journal: Journal
    callback: Callback
    most: int
    count: int = 0
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def left(self) -> int:
        return self.most - self.count

    def begin(self, death: SidecarDied, step: int) -> None:
        """Counts a death, and waits before the replacement if it is not the first one at ``step``. Raises ``RunError`` past ``most``."""
        self.count += 1
        if self.count > self.most:
            raise RunError(f"{death}; that is more than run.max_restarts ({self.most}): see the run's logs")
        wait_s = self.backoff.wait_s(step)
        logger.warning("%s; replacing it %s", death, describe_wait(wait_s))
        self.callback.message(f"{death}; replacing it {describe_wait(wait_s)} (restart {self.count} of {self.most})")
        sleep(wait_s)

    def ended(self, death: SidecarDied, step: int, seconds: float | None = None) -> None:
        """Journals that what died was replaced, after ``seconds``, or discarded."""
        took = {} if seconds is None else {"seconds": round(seconds, 3)}
        self.journal.record_event("recovery", {"role": death.role, "part": death.part, "reason": death.reason, "step": step, **took})

    def note(self, step: int, progress: dict[str, Any]) -> bool:
        """Counts and journals what the ``progress`` of a rollout tells of a worker that was replaced or a pod that was left out. Returns whether it does."""
        if "replaced" in progress:
            self._note_worker(step, progress)
        elif "left_out" in progress:
            self._note_pod(step, progress)
        else:
            return False
        return True

    def _note_pod(self, step: int, lost: dict[str, Any]) -> None:
        self.count += 1
        detail = {"role": "rollout", "part": "pod", "pod": lost["left_out"], "reason": lost["reason"], "groups": lost["groups"]}
        self.journal.record_event("recovery", {**detail, "step": step})
        self.callback.message(
            f"{lost['reason']}; pod {lost['left_out']} is left out until the next update of weights, and its {lost['groups']} unfinished groups are drawn by "
            f"others (restart {self.count} of {self.most})"
        )

    def _note_worker(self, step: int, replaced: dict[str, Any]) -> None:
        self.count += 1
        detail = {"role": "rollout", "part": "worker", "worker": replaced["replaced"], "reason": replaced["reason"], "groups": replaced["groups"]}
        self.journal.record_event("recovery", {**detail, "step": step, "seconds": replaced["seconds"]})
        self.callback.message(
            f"{replaced['reason']}; rollout worker {replaced['replaced']} was replaced and draws its {replaced['groups']} unfinished groups again "
            f"(restart {self.count} of {self.most})"
        )
