"""What holds up a run or is wrong with its nodes, for its records: events of the journal, lines for the user, and metrics. Imports no torch."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.config.health import HealthConfig
from tandem.layout.mesh import MeshShape
from tandem.runtime.callback import Callback
from tandem.runtime.health.gauges import as_values, of_node, of_ranks
from tandem.runtime.health.node_watch import NodeReading
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.health.stragglers import StragglerWatch

logger = logging.getLogger(__name__)

STRAGGLER, SLOW_LINK, GPU_FAULT, MEMORY_GROWTH, UNFIT = "straggler", "slow_link", "gpu_fault", "memory_growth", "node_unfit"
EVENTS = (STRAGGLER, SLOW_LINK, GPU_FAULT, MEMORY_GROWTH, UNFIT)
"""Kinds of events. What goes away again has an event of the same kind with ``_over`` behind it."""
_TELL_S = 1.0
"""Time between two messages to those who keep the metrics."""
_QUIET_LOOKS = 2
"""A fault of a GPU is over when so many looks in a row do not find it: throttling comes and goes."""


class RunHealth:
    """Of the process that writes the journal. ``record``: journals an event. ``unfit``: is told of a node that must not be used any more, with the reason.

    ``reading`` may be called from any thread; what it finds is recorded by ``look``, which the loop calls."""

    def __init__(
        self, shape: MeshShape, config: HealthConfig, record: Callable[[str, dict[str, Any]], None], callback: Callback,
        unfit: Callable[[str, str], None] = lambda node, reason: None,
    ) -> None:  # fmt: skip
        self._watch = StragglerWatch(shape, config.straggler_factor, config.straggler_steps)
        self._record, self._callback, self._unfit = record, callback, unfit
        self._lock = threading.Lock()
        self._readings: dict[str, NodeReading] = {}
        self._new: list[NodeReading] = []
        self._told_s = 0.0
        self._open: dict[tuple[str, str, str], int] = {}
        self._fatal: set[tuple[str, str]] = set()

    def reading(self, reading: NodeReading) -> None:
        """Takes what was found on a node; the same again changes nothing."""
        with self._lock:
            before = self._readings.get(reading.node)
            if before is None or before.at_s != reading.at_s:
                self._readings[reading.node] = reading
                self._new.append(reading)

    def look(self, step: int, times: Sequence[RankTimes]) -> None:
        """Records what has changed in ``step``. ``times``: of all ranks."""
        begun, ended = self._watch.look(times)
        for each in begun:
            self._begins(SLOW_LINK if each.is_link else STRAGGLER, step, each.text, each.detail)
        for each in ended:
            self._ends(SLOW_LINK if each.is_link else STRAGGLER, step, f"{each.key} holds up the run no longer", each.detail)
        with self._lock:
            new, self._new = self._new, []
        for reading in new:
            self._of_node(step, reading)
        if new or begun or ended or (times and time.monotonic() - self._told_s >= _TELL_S):
            self._told_s = time.monotonic()
            with self._lock:
                of_nodes = [each for reading in self._readings.values() for each in of_node(reading)]
            self._callback.health(as_values([*of_ranks(times, self._watch.excesses(), self._watch.late), *of_nodes]))

    def _of_node(self, step: int, reading: NodeReading) -> None:
        for text in reading.fatal:
            if (reading.node, text) not in self._fatal:
                self._fatal.add((reading.node, text))
                self._begins(UNFIT, step, f"node {reading.node} is not fit any more: {text}", {"node": reading.node})
                self._unfit(reading.node, text)
        faults = {(GPU_FAULT, reading.node, f"{gpu}: {what}") for gpu, what in reading.faults.items()}
        leaks = {(MEMORY_GROWTH, reading.node, name) for name in reading.leaks}
        for key in sorted((faults | leaks) - self._open.keys()):
            kind, node, what = key
            text = f"node {node}: {what}" if kind == GPU_FAULT else self._leak(reading, what)
            self._begins(kind, step, text, {"node": node, **({"process": what} if kind == MEMORY_GROWTH else {})})
        for key in faults | leaks:
            self._open[key] = 0
        for key in [key for key in self._open if key[1] == reading.node and key not in faults | leaks]:
            self._open[key] += 1
            if self._open[key] >= _QUIET_LOOKS:
                del self._open[key]
                self._ends(key[0], step, f"node {key[1]}: no longer: {key[2]}", {"node": key[1]})

    def _leak(self, reading: NodeReading, name: str) -> str:
        size, grows = reading.processes[name]
        return (
            f"node {reading.node}: the memory of {name} grows without end: {size / 2**30:.2f} GiB now, and {grows * 3600 / 2**30:.2f} GiB more each hour "
            "(health.memory_growth_gib_per_h)"
        )

    def _begins(self, kind: str, step: int, text: str, detail: Mapping[str, Any]) -> None:
        logger.warning("step %d: %s", step, text)
        self._record(kind, {"step": step, **detail, "reason": text})
        self._callback.message(f"step {step}: {text}")

    def _ends(self, kind: str, step: int, text: str, detail: Mapping[str, Any]) -> None:
        logger.warning("step %d: %s", step, text)
        who = {key: value for key, value in detail.items() if key in ("rank", "node", "link", "process")}
        self._record(f"{kind}_over", {"step": step, **who, "reason": text})
        self._callback.message(f"step {step}: {text}")
