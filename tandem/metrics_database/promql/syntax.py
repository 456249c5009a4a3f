"""The expressions of PromQL that are understood, as values.

What is there is what the dashboards, the recording rules and the alert rules of Tandem use, and the functions next to them; the language is
https://prometheus.io/docs/prometheus/latest/querying/basics/.
"""

from dataclasses import dataclass
from typing import Literal

MatchKind = Literal["=", "!=", "=~", "!~"]
NAME = "__name__"
"""The label that has the name of a series."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on a label. ``value`` is a regular expression for the whole value where the kind has ``~``."""

    label: str
    kind: MatchKind
    value: str


@dataclass(frozen=True, slots=True)
class Number:
    value: float


@dataclass(frozen=True, slots=True)
class Text:
    value: str


@dataclass(frozen=True, slots=True)
class Selector:
    """Series with their newest values, or with those of the last ``range_s`` seconds."""

    matchers: tuple[Matcher, ...]
    range_s: float | None = None


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Negated:
    value: "Expression"


@dataclass(frozen=True, slots=True)
class Aggregation:
    """``labels``: those that stay, or with ``is_without`` those that go."""

    name: str
    value: "Expression"
    labels: tuple[str, ...]
    is_without: bool


@dataclass(frozen=True, slots=True)
class Matching:
    """Which series of two sides belong together: those with equal ``labels``, or with equal others. ``many``: the side of which several may have the
    same one of the other side, from which they take the labels ``included``."""

    labels: tuple[str, ...] = ()
    is_on: bool = False
    many: Literal["", "left", "right"] = ""
    included: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Binary:
    """``is_bool``: a comparison gives 0 or 1 in place of leaving out."""

    operator: str
    left: "Expression"
    right: "Expression"
    matching: Matching
    is_bool: bool = False


Expression = Number | Text | Selector | Call | Negated | Aggregation | Binary
