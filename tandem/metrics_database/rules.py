"""Recording rules and alert rules, evaluated at the times of the scrapes as Prometheus does, so that their series can be asked for like any other.

An alert is ``pending`` from the first evaluation in which its expression has a value, and ``firing`` once that has lasted for its ``wait_s``; its series are
``ALERTS`` with the value 1 and ``ALERTS_FOR_STATE`` with the time since when. As in Prometheus, a wait begins again where the process does.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.metrics_database.promql.evaluate import Evaluator, Labels, Read, with_label, without_name
from tandem.metrics_database.promql.parse import parse, seconds_of
from tandem.metrics_database.promql.syntax import NAME, Expression
from tandem.types import UserError

logger = logging.getLogger(__name__)
Sample = tuple[Labels, int, float | None]
ALERTS, SINCE = "ALERTS", "ALERTS_FOR_STATE"


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """The series ``name`` has the values of ``expression``."""

    name: str
    expression: Expression

    @classmethod
    def of(cls, name: str, expr: str) -> "RecordingRule":
        return cls(name, parse(expr))


@dataclass(frozen=True, slots=True)
class AlertRule:
    """``expression`` must have a value for ``wait_s`` before the alert ``name``, with ``labels``, fires."""

    name: str
    expression: Expression
    wait_s: float
    labels: Labels = ()

    @classmethod
    def of(cls, name: str, expr: str, wait: str, **labels: str) -> "AlertRule":
        return cls(name, parse(expr), seconds_of(wait), tuple(sorted(labels.items())))


@dataclass
class Rules:
    """``recording`` rules, evaluated in their order, and then those of ``alerts``."""

    recording: Sequence[RecordingRule] = ()
    alerts: Sequence[AlertRule] = ()
    _active: dict[tuple[str, Labels], int] = field(default_factory=dict)
    """Since when each alert has a value, in milliseconds, by the name of its rule and its labels."""
    _before: dict[str, set[Labels]] = field(default_factory=dict)
    """The series of each rule in the evaluation before."""
    _failed: set[str] = field(default_factory=set)

    def record(self, rule: RecordingRule, read: Read, time_ms: int) -> list[Sample]:
        """Returns the samples of ``rule`` now, with the ends of series that it has no more."""
        vector = self._evaluated(rule.name, rule.expression, read, time_ms)
        if vector is None:
            return []
        return self._with_ends(rule.name, {with_label(labels, NAME, rule.name): value for labels, value in vector}, time_ms)

    def alert(self, rule: AlertRule, read: Read, time_ms: int) -> list[Sample]:
        """Returns the samples of the alerts of ``rule`` now, with the ends of those that have another state or none."""
        vector = self._evaluated(rule.name, rule.expression, read, time_ms)
        if vector is None:
            return []
        own = {*rule.labels, ("alertname", rule.name)}
        labelled = {tuple(sorted({**dict(without_name(labels)), **dict(own)}.items())) for labels, _ in vector}
        for key in [key for key in self._active if key[0] == rule.name and key[1] not in labelled]:
            del self._active[key]
        values: dict[Labels, float] = {}
        for labels in labelled:
            since_ms = self._active.setdefault((rule.name, labels), time_ms)
            state = "firing" if time_ms - since_ms >= rule.wait_s * 1000 else "pending"
            values[with_label(with_label(labels, "alertstate", state), NAME, ALERTS)] = 1.0
            # Whole seconds, as Prometheus keeps them.
            values[with_label(labels, NAME, SINCE)] = float(since_ms // 1000)
        return self._with_ends(rule.name, values, time_ms)

    def _evaluated(self, name: str, expression: Expression, read: Read, time_ms: int) -> "list[tuple[Labels, float]] | None":
        """Returns the value of a rule's expression; ``None`` where it has none, which is logged once."""
        try:
            value = Evaluator(read, [time_ms]).at(expression, time_ms)
        except UserError as error:
            if name not in self._failed:
                logger.warning("rule %s has no value: %s", name, error)
                self._failed.add(name)
            return None
        self._failed.discard(name)
        return [((), value)] if isinstance(value, float) else value if isinstance(value, list) else None

    def _with_ends(self, name: str, values: dict[Labels, float], time_ms: int) -> list[Sample]:
        ended = self._before.get(name, set()) - values.keys()
        self._before[name] = set(values)
        return [*((labels, time_ms, value) for labels, value in values.items()), *((labels, time_ms, None) for labels in ended)]
