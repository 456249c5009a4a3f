"""Recording rules and alert rules of Prometheus, as the text of their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml


@dataclass(frozen=True, slots=True)
class Record:
    """A recording rule: the series ``name`` has the values of ``expr``."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert rule. ``wait``: how long ``expr`` must have a value before it fires. ``severity``: ``critical`` is for now, ``warning`` for today.
    ``summary``, ``fix``: templates for people; what is wrong, and what to look at."""

    name: str
    expr: str
    severity: Literal["critical", "warning"]
    summary: str
    fix: str
    wait: str = "0s"


def rules_file(group: str, rules: Sequence[Record | Alert]) -> str:
    """Returns the YAML of a rule file with one group."""
    listed = [_alert(rule) if isinstance(rule, Alert) else {"record": rule.name, "expr": rule.expr} for rule in rules]
    return yaml.safe_dump({"groups": [{"name": group, "rules": listed}]}, sort_keys=False, width=160, allow_unicode=True)


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name, "expr": alert.expr, "for": alert.wait, "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.fix},
    }  # fmt: skip
