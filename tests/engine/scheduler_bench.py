"""A scheduler with the parts of an engine around it, without a model."""

from typing import Any

from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler import Scheduler
from tandem.engine.core.scheduler_output import SchedulerOutput


class SchedulerBench:
    """A scheduler with ``config``, ``kv_cache`` and preemption ``policy``. Every decoding row draws token 7 in every step."""

    def __init__(self, config: Any, kv_cache: Any, *policy: Any) -> None:
        self.scheduler = Scheduler(config, kv_cache, self.read_back, *policy)
        self.drawn: dict[Sequence, int] = {}
        self.arrivals = 0

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        for row in output.decode_rows + tuple(row for chunk in output.prefills for row in chunk.rows):
            sequence = self.scheduler.running.by_row[row]
            self.drawn[sequence] = self.drawn.get(sequence, 0) + 1
        return output

    def read_back(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.token_ids += [7] * self.drawn.pop(sequence, 0)

    def finish(self, *sequences: Sequence) -> None:
        self.scheduler.finish(sequences)
        for sequence in sequences:
            move(sequence, Transition.STOP, self.scheduler.counts)
