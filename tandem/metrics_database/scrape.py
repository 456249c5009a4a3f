"""Asks processes for ``/metrics`` and makes samples of their answers, as Prometheus does with ``honor_labels``. Needs ``prometheus_client``."""

import contextlib
import http.client
import json
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tandem.metrics_database.promql.syntax import NAME

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, int, float | None]
MOST_BYTES = 64 * 2**20
"""Of one answer."""
MOST_AT_ONCE = 64
"""Targets that are asked at the same time."""
DEFAULT_JOB = "tandem"
"""The label ``job`` of a target that names none, as in the configuration of Prometheus."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a process answers. ``labels``: those of all its series."""

    url: str
    labels: Labels

    @classmethod
    def of(cls, address: str, labels: Mapping[str, str]) -> "Target":
        """Returns the target at ``address`` (host and port) with the labels of its file in the targets folder."""
        url = f"{labels.get('__scheme__', 'http')}://{address}{labels.get('__metrics_path__', '/metrics')}"
        shown = {name: value for name, value in labels.items() if not name.startswith("__")}
        return cls(url, tuple(sorted({"job": DEFAULT_JOB, "instance": address, **shown}.items())))


def targets_in(folder: Path) -> list[Target]:
    """Returns the targets that processes have written to ``folder``; a file that cannot be read is left out."""
    found = []
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found += [Target.of(address, group.get("labels", {})) for group in json.loads(file.read_text()) for address in group["targets"]]
    return list(dict.fromkeys(found))


@dataclass
class Scraper:
    """Scrapes targets again and again, and knows which series each had before: one that is missing has ended, and a target that does not answer has none."""

    timeout_s: float = 10.0
    _before: dict[Target, set[Labels]] = field(default_factory=dict)

    def scrape(self, targets: Sequence[Target]) -> Iterator[list[Sample]]:
        """Yields the samples of the answer of each target, with ``up`` and ``scrape_duration_seconds``. All are asked at the same time, so that one that does
        not answer holds up no other."""
        with ThreadPoolExecutor(max_workers=max(1, min(MOST_AT_ONCE, len(targets)))) as asking:
            for target, answer in zip(targets, asking.map(self._ask, targets), strict=True):
                yield self._samples(target, *answer)

    def _ask(self, target: Target) -> tuple[int, float, dict[Labels, float] | None]:
        """Returns when ``target`` was asked (milliseconds), the seconds that it took, and its values, ``None`` where it did not answer in time."""
        began, when = time.perf_counter(), round(time.time() * 1000)
        try:
            with urllib.request.urlopen(target.url, timeout=self.timeout_s) as answer:
                body = _body(answer, began + self.timeout_s)
            values = samples_of(body.decode("utf-8", "replace"), target.labels)
        except (OSError, ValueError, http.client.HTTPException):
            values = None
        return when, time.perf_counter() - began, values

    def _samples(self, target: Target, when: int, seconds: float, answered: dict[Labels, float] | None) -> list[Sample]:
        values = answered or {}
        own = {"up": float(answered is not None), "scrape_duration_seconds": seconds, "scrape_samples_scraped": float(len(values))}
        ended = self._before.get(target, set()) - values.keys()
        self._before[target] = set(values)
        samples: list[Sample] = [(labels, when, value) for labels, value in values.items()]
        return [*samples, *((labels, when, None) for labels in ended), *((_named(name, target.labels), when, value) for name, value in own.items())]

    def leave(self, kept: Iterable[Target]) -> list[Sample]:
        """Returns the ends of all series of targets that are gone."""
        gone, when = set(self._before) - set(kept), round(time.time() * 1000)
        ended: list[Sample] = []
        for target in gone:
            own = {_named(name, target.labels) for name in ("up", "scrape_duration_seconds", "scrape_samples_scraped")}
            ended += [(labels, when, None) for labels in self._before.pop(target) | own]
        return ended


def _body(answer: http.client.HTTPResponse, ends: float) -> bytes:
    """Returns an answer, of at most ``MOST_BYTES``. Raises ``TimeoutError`` for one that is not whole at ``ends`` (``time.perf_counter``): the limit of the
    socket is for each of its parts. Raises ``IncompleteRead`` for one that was cut."""
    parts, size = [], 0
    while size < MOST_BYTES and (part := answer.read1(min(2**16, MOST_BYTES - size))):
        parts.append(part)
        size += len(part)
        if time.perf_counter() > ends:
            raise TimeoutError
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(parts)


def _named(name: str, labels: Iterable[tuple[str, str]]) -> Labels:
    return tuple(sorted({**dict(labels), NAME: name}.items()))


def samples_of(text: str, labels: Labels) -> dict[Labels, float]:
    """Returns the values of an exposition by their labels, to which ``labels`` are added where the exposition does not have them. Raises ``ValueError``."""
    found: dict[Labels, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if value}
            found[_named(sample.name, {**dict(labels), **own}.items())] = float(sample.value)
    return found
