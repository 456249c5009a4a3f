"""Watches the machine that it runs on while a run works: GPUs, memory of the run's processes, and whether this process gets its turn. Imports no torch."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.config.health import HealthConfig
from tandem.runtime.health.gpu_faults import GpuFaults, GpuLook, may_have_gpus
from tandem.runtime.health.memory_growth import Growth, MemoryGrowth
from tandem.runtime.health.run_processes import named, ranks_by_pid, run_processes

logger = logging.getLogger(__name__)
HEALTH = "health/"
"""The beginning of the keys, in the store of a run, of what the nodes with pods that joined find."""
_LAG_LOOK_S = 0.5
_END_S = 2.0


@dataclass(frozen=True, slots=True)
class NodeReading:
    """What was found on ``node`` at ``at_s``, Unix seconds.

    Args:
        gpus: of each its ``bus``, ``name``, ``temperature_c``, ``power_w``, ``utilization_percent`` and ``uncorrected`` ECC errors.
        faults: of GPUs, in words, that the run goes on with.
        fatal: after which the node must not be used, one line each.
        xids: since the run began on this node, by number.
        processes: resident bytes of each process of the run and their growth in bytes a second, by name and id; ``leaks``: those that grow without end.
        ranks: the trainer rank of each process that is one.
        lag_s: the longest time that this process had to wait for its turn since the last reading.
    """

    node: str
    at_s: float
    gpus: Sequence[Mapping[str, Any]] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    fatal: Sequence[str] = ()
    xids: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    leaks: Sequence[str] = ()
    lag_s: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "NodeReading":
        return cls(**{**content, "processes": {name: (int(size), float(grows)) for name, (size, grows) in content["processes"].items()}})


class NodeWatch:
    """A thread that looks at this machine, as ``node``, every ``config.every_s`` and gives what it finds to ``tell``.

    ``root``: the process whose tree is that of the run here; ``logs_of``: the folder whose logs name the processes; ``own``: the name of this one.
    ``gpus``: looks at the GPUs (``None``: as ``nvidia-smi`` tells, if there may be any)."""

    def __init__(
        self, node: str, config: HealthConfig, tell: Callable[[NodeReading], None], *, logs_of: Path, own: str, root: int = 0,
        gpus: Callable[[], GpuLook] | None = None,
    ) -> None:  # fmt: skip
        self._node, self._config, self._tell, self._logs_of, self._own, self._root = node, config, tell, logs_of, own, root or os.getpid()
        self._gpus = gpus or (GpuFaults().look if may_have_gpus() else None)
        self._growth = MemoryGrowth(config.memory_growth_gib_per_h * 2**30 / 3600)
        self._lag_s, self._fatal = 0.0, list[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="node-watch", daemon=True)

    def start(self) -> None:
        """Begins to look, unless that is switched off."""
        if self._config.every_s:
            self._thread.start()

    def __enter__(self) -> "NodeWatch":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._thread.is_alive():
            # A driver that does not answer holds up no end of a run.
            self._thread.join(timeout=_END_S)

    def look(self) -> NodeReading:
        """Returns what is found now. What was fatal once stays so, for a reader that has missed a reading."""
        looked = GpuLook() if self._gpus is None else self._gpus()
        self._fatal += [each for each in looked.fatal if each not in self._fatal]
        processes, ranks = {named(each): each for each in run_processes(self._root, self._logs_of, self._own)}, ranks_by_pid(self._logs_of)
        grown: dict[str, Growth] = self._growth.look(time.monotonic(), {name: each.resident_bytes for name, each in processes.items()})
        lag_s, self._lag_s = self._lag_s, 0.0
        shown = [
            {"bus": gpu.bus, "name": gpu.name, "temperature_c": gpu.temperature_c, "power_w": gpu.power_w, "utilization_percent": gpu.utilization_percent,
             "uncorrected": gpu.uncorrected} for gpu in looked.gpus
        ]  # fmt: skip
        return NodeReading(
            self._node, time.time(), shown, dict(looked.faults), list(self._fatal), {str(number): count for number, count in looked.xids.items()},
            {name: (each.rss_bytes, each.bytes_per_s) for name, each in grown.items()}, [name for name, each in grown.items() if each.is_leak], lag_s,
            {name: ranks[each.pid] for name, each in processes.items() if each.pid in ranks},
        )  # fmt: skip

    def _watch(self) -> None:
        last = before = time.monotonic()
        self._try()
        while not self._ended.wait(min(_LAG_LOOK_S, self._config.every_s)):
            now = time.monotonic()
            self._lag_s = max(self._lag_s, now - before - min(_LAG_LOOK_S, self._config.every_s))
            if now - last >= self._config.every_s:
                last = now
                self._try()
            before = time.monotonic()

    def _try(self) -> None:
        try:
            self._tell(self.look())
        except Exception:
            # A look that fails must not end a run, and the next one may not.
            logger.exception("the health of this machine could not be looked at")
