"""Failure rates of GPU clusters, from published counts."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["process", "node", "hang"]
"""What a failure takes and how it shows: a ``process`` ends and may start again where it was; a ``node`` must be replaced; a ``hang`` shows as silence alone,
after which its node is replaced."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Cause:
    """``count`` failures of one cause within the ``gpu_days`` of its source."""

    name: str
    count: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class FailureRates:
    """Failures by cause, counted in ``gpu_days`` of work. ``source``: where they are published."""

    source: str
    gpu_days: float
    causes: tuple[Cause, ...]

    def between_failures_s(self, gpus: int) -> float:
        """Returns the mean seconds between two failures of a run on ``gpus`` GPUs, all causes together."""
        return DAY_S * self.gpu_days / gpus / sum(cause.count for cause in self.causes)

    def scaled(self, factor: float) -> "FailureRates":
        """Returns ``factor`` times as many failures of each cause."""
        return FailureRates(self.source, self.gpu_days / factor, self.causes)

    def moments(self, gpus: int, chosen: random.Random) -> Iterator[tuple[float, Cause]]:
        """Yields failures of a run on ``gpus`` GPUs in order of time, with their seconds from the beginning: a Poisson process of each cause."""
        between_s, weights, now_s = self.between_failures_s(gpus), [cause.count for cause in self.causes], 0.0
        while True:
            now_s += chosen.expovariate(1 / between_s)
            yield now_s, chosen.choices(self.causes, weights)[0]


def _causes(counts: Mapping[Kind, Mapping[str, float]]) -> tuple[Cause, ...]:
    return tuple(Cause(name, count, kind) for kind, of_kind in counts.items() for name, count in of_kind.items())


LLAMA3_GPUS, LLAMA3_DAYS = 16_384, 54.0
LLAMA3 = FailureRates(
    "The Llama 3 Herd of Models, arXiv 2407.21783, table 5: 419 unexpected interruptions in 54 days on 16,384 H100", LLAMA3_GPUS * LLAMA3_DAYS,
    _causes({
        "process": {"software bug": 54, "dependency": 2},
        "node": {
            "faulty GPU": 148, "GPU HBM3 memory": 72, "host maintenance": 32, "GPU SRAM memory": 19, "GPU system processor": 17, "network interface": 7,
            "silent data corruption": 6, "GPU thermal interface and sensor": 6, "SSD": 3, "power supply": 3, "server chassis": 2, "IO expansion board": 2,
            "CPU": 2, "system memory": 2,
        },
        "hang": {"network switch or cable": 35, "NCCL watchdog timeout": 7},
    }),
)  # fmt: skip
"""The counts are those of the table; the kinds are an assumption: a network fault leaves the others waiting in a collective, all hardware takes its node."""
