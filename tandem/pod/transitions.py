"""The states of a pod's two sidecars: every transition is checked, timed, journalled and announced."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tandem.pod.states import RolloutState, TrainerState, check_rollout, check_trainer
from tandem.runtime.records.run_records import Records


@dataclass
class Transitions:
    """The state of each sidecar now. ``records`` times and shows each transition, and writes it to the journal."""

    records: Records
    trainer: TrainerState = TrainerState.DOWN
    rollout: RolloutState = RolloutState.DOWN

    @contextmanager
    def trainer_does(self, state: TrainerState, step: int) -> Iterator[dict[str, Any]]:
        """Inside, the trainer is in ``state``; what is added to the detail that is yielded is journalled with it. Raises ``RunError`` for a
        transition that the figure does not have."""
        check_trainer(self.trainer, state)
        self.trainer = state
        with self.records.phase(state, step, "trainer") as detail:
            yield detail

    @contextmanager
    def rollout_does(self, state: RolloutState, step: int) -> Iterator[dict[str, Any]]:
        """The same for the rollout."""
        check_rollout(self.rollout, state)
        self.rollout = state
        with self.records.phase(state, step, "rollout") as detail:
            yield detail

    def rollout_begins(self, state: RolloutState, step: int) -> AbstractContextManager[dict[str, Any]]:
        """The rollout enters ``state`` beside the trainer's work. Returns what the thread that does it is to enter, and journals the transition."""
        check_rollout(self.rollout, state)
        self.rollout = state
        self.records.callback.phase(state, step)
        return nullcontext({}) if self.records.journal is None else self.records.journal.transition(step, "rollout", state)

    def trainer_enters(self, state: TrainerState, step: int) -> None:
        """The trainer enters ``state``, in which nothing is done."""
        with self.trainer_does(state, step):
            pass

    def rollout_enters(self, state: RolloutState, step: int) -> None:
        """The rollout enters ``state``, in which nothing is done."""
        with self.rollout_does(state, step):
            pass
