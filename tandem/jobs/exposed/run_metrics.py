"""The metrics of a run for Prometheus, from its events (``Callback``): newest row, phases, steps, faults, ranks, disk and hardware."""

import math
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import tandem
from tandem.jobs.exposed.hardware import Hardware
from tandem.jobs.run_files import SFT_FOLDER
from tandem.runtime.callback import Callback
from tandem.runtime.exposition.names import metric_name
from tandem.runtime.exposition.sent_spans import SentSpans
from tandem.runtime.exposition.text import exposition
from tandem.runtime.health.gauges import BY_NAME, RESIDENT_MEMORY
from tandem.runtime.health.run_health import EVENTS as HEALTH_EVENTS
from tandem.runtime.process.heartbeat_table import newest_ranks
from tandem.runtime.records.checkpoint_tiers import TierState
from tandem.runtime.records.journal_counts import JournalCounts

EVENTS = (
    "recovery", "resume", "alarm", "damage", "mismatch", "checkpoint_damaged", "weights_damaged", "silent_corruption", "skipped_step", "reward_fault",
    "journal_lost", "cordon", *HEALTH_EVENTS,
)  # fmt: skip
"""Kinds of events that are counted from 0 on, so that an increase can be seen; others appear when they happen."""
_STEPS_IN_MEDIAN = 32
_FEWEST_IN_MEDIAN = 3
_TIMING, _WHOLE = "timing_s/", "timing_s/step"
_SKIPPED = "train/skipped_steps"


class RunMetrics(Callback, Collector):
    """Collects the metrics of one run; ``text`` gives them. ``run`` is set by the event ``started``; until then it is ``run``.

    Args:
        run, job: the labels of every series: the name of the run's folder, and the algorithm.
        exact: whether rollout and trainer compute the same bits; ``None`` where there is no rollout.
    """

    def __init__(self, run: str, job: str, exact: bool | None) -> None:
        self._lock = threading.Lock()
        self._run, self._job, self._exact = run, job, exact
        self._directory: Path | None = None
        self._journal: JournalCounts | None = None
        self._max_steps = 0
        self._phase, self._phase_began = "starting", time.monotonic()
        self._row: dict[str, float] = {_SKIPPED: 0.0}
        self._steps, self._not_finite, self._phase_s = 0, 0, dict[str, float]()
        self._step_s: deque[float] = deque(maxlen=_STEPS_IN_MEDIAN)
        self._sign_of_life = time.monotonic()
        self._is_late = False
        self._health: Sequence[Sequence[Any]] = ()
        self._hardware = Hardware({"run": run, "job": job})
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return exposition(self._registry)

    # -- events --------------------------------------------------------------------------------------------------------

    def started(self, run_directory: str, max_steps: int, target: float | None) -> None:
        with self._lock:
            self._directory, self._max_steps = Path(run_directory), max_steps
            self._journal = JournalCounts(self._directory / "journal.sqlite")

    def phase(self, name: str, step: int) -> None:
        with self._lock:
            self._phase, self._phase_began = name, time.monotonic()

    def progress(self, name: str, done: float, total: float, text: str = "") -> None:
        # The stage before reinforcement learning reports its steps so.
        if name == SFT_FOLDER:
            with self._lock:
                if self._phase != name:
                    self._phase, self._phase_began = name, time.monotonic()
                self._sign_of_life = time.monotonic()

    def row(self, row: Mapping[str, float | int | str]) -> None:
        now = time.monotonic()
        numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
        with self._lock:
            self._row.update(numbers)
            self._steps += 1
            self._not_finite += not all(map(math.isfinite, numbers.values()))
            self._sign_of_life = now
            self._step_s.append(numbers.get(_WHOLE, 0.0))
            for key, seconds in numbers.items():
                if key.startswith(_TIMING) and key != _WHOLE:
                    name = key.removeprefix(_TIMING)
                    self._phase_s[name] = self._phase_s.get(name, 0.0) + seconds

    def waiting(self, text: str) -> None:
        self._is_late = bool(text)

    def health(self, readings: Sequence[Sequence[Any]]) -> None:
        with self._lock:
            self._health = readings

    # -- metrics -------------------------------------------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """Gives the registry nothing to check: the names depend on the rows."""
        return ()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            own = list(self._own())
            row, directory, journal, readings = dict(self._row), self._directory, self._journal, self._health
        yield from own
        yield from self._of_health([each for each in readings if each[0] != RESIDENT_MEMORY])
        yield from SentSpans({"run": self._run, "job": self._job}).collect()
        yield from self._hardware.collect(directory, [(labels, value) for name, labels, value in readings if name == RESIDENT_MEMORY])
        if directory is None or journal is None:
            yield from self._newest(row)
            return
        events, evaluations, tiers = journal.read()
        yield from self._of_tiers(tiers)
        yield self._counter("tandem_events", "Events in the run's journal, earlier processes included.", dict.fromkeys(EVENTS, 0) | events, "kind")
        measured = {f"evaluation/{kind}/{name}": value for kind, result in evaluations.items() for name, value in result.items()}
        row |= {key: float(value) for key, value in measured.items() if type(value) in (int, float)}
        yield from self._newest(row)
        yield from self._ranks(directory)
        disk = shutil.disk_usage(directory)
        yield self._gauge("tandem_run_disk_free_bytes", "Free bytes of the disk with the run's folder.", disk.free)
        yield self._gauge("tandem_run_disk_size_bytes", "Size of that disk.", disk.total)

    def _own(self) -> Iterator[Metric]:
        now = time.monotonic()
        info = GaugeMetricFamily("tandem_run_info", "The run; always 1.", labels=("run", "job", "version", "directory"))
        info.add_metric((self._run, self._job, tandem.__version__, str(self._directory or "")), 1)
        yield info
        yield self._gauge("tandem_run_max_steps", "Steps that the run may take.", self._max_steps)
        if self._exact is not None:
            yield self._gauge("tandem_run_exact", "1 if rollout and trainer compute the same bits, so that mismatch_kl must be 0.", self._exact)
        phase = GaugeMetricFamily("tandem_run_phase", "The phase that the run entered last; always 1.", labels=("run", "job", "phase"))
        phase.add_metric((self._run, self._job, self._phase), 1)
        yield phase
        yield self._gauge("tandem_run_phase_age_seconds", "Seconds since it entered that phase.", now - self._phase_began)
        yield self._gauge("tandem_run_since_step_seconds", "Seconds since a step ended, before the first since the start.", now - self._sign_of_life)
        if len(self._step_s) >= _FEWEST_IN_MEDIAN:
            yield self._gauge("tandem_run_median_step_seconds", f"Median of the last {_STEPS_IN_MEDIAN} steps.", statistics.median(self._step_s))
        yield self._gauge("tandem_run_overdue", "1 while something takes longer than it ever did (the watchdog).", self._is_late)
        yield self._counter("tandem_steps", "Steps that this process has ended.", {"": self._steps})
        yield self._counter("tandem_not_finite_rows", "Steps whose row has a NaN or an infinity.", {"": self._not_finite})
        yield self._counter("tandem_phase_seconds", "Seconds of each phase, added up when a step ends.", self._phase_s, "phase")

    def _newest(self, row: Mapping[str, float]) -> Iterator[Metric]:
        """Yields the newest value of each key, the first of two whose names are the same."""
        seen = set[str]()
        for key, value in row.items():
            name = metric_name(key)
            if name not in seen:
                seen.add(name)
                yield self._gauge(name, f"Newest {key} of metrics.jsonl.", value)

    def _ranks(self, directory: Path) -> Iterator[Metric]:
        labels = ("run", "job", "rank")
        step = GaugeMetricFamily("tandem_rank_step", "The step that the rank is in; its rate is that of the rank's steps.", labels=labels)
        silent = GaugeMetricFamily("tandem_rank_silent_seconds", "Seconds since the rank's last sign of life.", labels=labels)
        waited = CounterMetricFamily("tandem_rank_wait_seconds", "Seconds that the rank has waited for others in collectives.", labels=labels)
        sent = CounterMetricFamily("tandem_rank_sent_bytes", "Bytes that the rank has sent in collectives.", labels=labels)
        for state in newest_ranks(directory):
            values = (self._run, self._job, str(state.rank))
            step.add_metric(values, state.step)
            silent.add_metric(values, max(0.0, time.monotonic() - state.beat_s) if state.beat_s else 0.0)
            waited.add_metric(values, state.waited_s)
            sent.add_metric(values, state.sent_bytes)
        yield from (step, silent, waited, sent)

    def _of_tiers(self, tiers: Sequence[TierState]) -> Iterator[Metric]:
        """Yields what was written to each tier of checkpoints, and how old its newest whole copy is. Counters have the checkpoints of earlier processes."""
        written = {state.tier: state for state in tiers}
        each = lambda value: {tier: float(value(state)) for tier, state in written.items()}
        yield self._counter("tandem_checkpoint_copies", "Checkpoints that were written, by tier.", each(lambda state: state.copies), "tier")
        yield self._counter("tandem_checkpoint_written_bytes", "Their bytes.", each(lambda state: state.all_bytes), "tier")
        yield self._counter("tandem_checkpoint_write_seconds", "Seconds of their writing, in the background.", each(lambda state: state.all_seconds), "tier")
        labels = ("run", "job", "tier")
        step = GaugeMetricFamily("tandem_checkpoint_step", "The step of the newest whole copy in the tier.", labels=labels)
        age = GaugeMetricFamily("tandem_checkpoint_age_seconds", "Seconds since the newest whole copy in the tier was complete.", labels=labels)
        out = GaugeMetricFamily("tandem_checkpoint_tier_left_out", "1 where the tier takes no checkpoint any more.", labels=labels)
        kept = GaugeMetricFamily("tandem_checkpoint_kept_ranks", "Ranks whose part of the newest copy the node keeps.", labels=(*labels, "node"))
        now_s = time.time()
        for tier, state in written.items():
            values = (self._run, self._job, tier)
            out.add_metric(values, float(bool(state.left_out)))
            if (seconds := state.age_s(now_s)) is not None:
                step.add_metric(values, state.step)
                age.add_metric(values, seconds)
            for node, ranks in state.where.items():
                kept.add_metric((*values, node), len(ranks))
        yield from (step, age, out, kept)

    def _of_health(self, readings: Sequence[Sequence[Any]]) -> Iterator[Metric]:
        """Yields what was told last of ranks, links and nodes."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, labels, value in readings:
            metric = BY_NAME[name]
            if name not in families:
                kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
                families[name] = kind(name, metric.text, labels=("run", "job", *metric.labels))
            families[name].add_metric((self._run, self._job, *(str(labels[label]) for label in metric.labels)), float(value))
        yield from families.values()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=("run", "job"))
        gauge.add_metric((self._run, self._job), float(value))
        return gauge

    def _counter(self, name: str, text: str, values: Mapping[str, float], label: str = "") -> Metric:
        counter = CounterMetricFamily(name, text, labels=("run", "job", *([label] if label else [])))
        for key, value in values.items():
            counter.add_metric((self._run, self._job, *([key] if label else [])), float(value))
        return counter
