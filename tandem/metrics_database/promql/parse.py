"""From the text of a query to its expression, by precedence."""

import math
import re
from collections.abc import Callable
from typing import Literal, TypeVar, cast

from tandem.metrics_database.promql.syntax import (
    NAME,
    Aggregation,
    Binary,
    Call,
    Expression,
    Matcher,
    Matching,
    MatchKind,
    Negated,
    Number,
    Selector,
    Text,
)
from tandem.types import UserError

T = TypeVar("T")
AGGREGATIONS = ("sum", "avg", "min", "max", "count")
FUNCTIONS = (
    "rate", "increase", "delta", "irate", "histogram_quantile", "label_replace", "vector", "abs", "clamp_min", "clamp_max", "time", "max_over_time",
    "min_over_time", "avg_over_time", "sum_over_time", "count_over_time", "last_over_time",
)  # fmt: skip
COMPARISONS = ("==", "!=", "<=", ">=", "<", ">")
_PRECEDENCE = {"or": 1, "and": 2, "unless": 2, **dict.fromkeys(COMPARISONS, 3), "+": 4, "-": 4, "*": 5, "/": 5, "%": 5, "^": 6}
_UNARY = 5.5
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}
_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<duration>(?:\d+(?:ms|[smhdwy]))+(?![\w.]))|(?P<number>0x[0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[a-zA-Z_:][\w:]*)"
    r"|(?P<text>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|`[^`]*`)|(?P<sign>=~|!~|==|!=|<=|>=|[-+*/%^(){}\[\],=<>])"
)
_LONGEST = 20_000
_DEEPEST = 100


def parse(query: str) -> Expression:
    """Returns the expression of ``query``. Raises ``UserError`` with the place where it is no PromQL that is understood."""
    return _Parser(query).whole()


def seconds_of(text: str) -> float:
    """Returns the seconds of a duration such as ``1h30m``, or of a number. Raises ``UserError``."""
    if re.fullmatch(r"(\d+(ms|[smhdwy]))+", text):
        return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)(ms|[smhdwy])", text))
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"'{text[:50]}' is no duration; write for example 15s, 5m or 1h")
    return found


class _Parser:
    def __init__(self, query: str) -> None:
        if len(query) > _LONGEST:
            raise UserError(f"the query has {len(query)} characters; at most {_LONGEST} are read")
        self._query, self._place, self._tokens = query, 0, list[tuple[str, str, int]]()
        self._depth, at = 0, 0
        while at < len(query):
            found = _TOKEN.match(query, at)
            if found is None:
                raise self._wrong(at, "is not understood")
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found[0], at))
            at = found.end()

    def whole(self) -> Expression:
        found = self._expression(0)
        if self._place < len(self._tokens):
            raise self._wrong(self._tokens[self._place][2], "is too much")
        return found

    def _wrong(self, at: int, why: str) -> UserError:
        return UserError(f"the query cannot be read: '{self._query[at : at + 40]}' at character {at + 1} {why}")

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._place][:2] if self._place < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        found = self._peek()
        self._place += 1
        return found

    def _at(self) -> int:
        return self._tokens[self._place][2] if self._place < len(self._tokens) else len(self._query)

    def _is(self, text: str) -> bool:
        """Takes the next token if it is ``text``."""
        if self._peek()[1] != text or self._peek()[0] == "text":
            return False
        self._place += 1
        return True

    def _expect(self, text: str) -> None:
        at = self._at()
        if not self._is(text):
            raise self._wrong(at, f"is where '{text}' should be")

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _expression(self, least: float) -> Expression:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise UserError(f"the query has more than {_DEEPEST} expressions inside each other")
        left = self._operand()
        while (precedence := _PRECEDENCE.get(self._peek()[1], 0)) > least and self._peek()[0] in ("sign", "name"):
            operator = self._next()[1]
            is_bool = operator in COMPARISONS and self._is("bool")
            matching = self._matching()
            # Only ^ is read from the right.
            right = self._expression(precedence - 0.5 if operator == "^" else precedence)
            left = Binary(operator, left, right, matching, is_bool)
        self._depth -= 1
        return left

    def _matching(self) -> Matching:
        is_on = self._is("on")
        if not is_on and not self._is("ignoring"):
            return Matching()
        labels, included = self._labels(), tuple[str, ...]()
        many: Literal["", "left", "right"] = ""
        sides: tuple[Literal["left", "right"], ...] = ("left", "right")
        for side in sides:
            if self._is(f"group_{side}"):
                many = side
                included = self._labels() if self._peek()[1] == "(" else ()
        return Matching(labels, is_on, many, included)

    def _operand(self) -> Expression:
        at, (kind, text) = self._at(), self._next()
        if text == "(" and kind == "sign":
            inner = self._expression(0)
            self._expect(")")
            return inner
        if text in ("-", "+") and kind == "sign":
            value = self._expression(_UNARY)
            return Negated(value) if text == "-" else value
        if kind == "number":
            return Number(float(int(text, 16)) if text.startswith("0x") else float(text))
        if kind == "text":
            return Text(_unquoted(text))
        if kind == "name" and text.lower() in ("inf", "nan"):
            return Number(float(text))
        if kind == "name" and text in AGGREGATIONS and self._peek()[1] in ("(", "by", "without"):
            return self._aggregation(text)
        if kind == "name" and self._peek()[1] == "(":
            if text not in FUNCTIONS:
                raise self._wrong(at, f"is a function that is not there; there are {', '.join((*AGGREGATIONS, *FUNCTIONS))}; a Prometheus has all")
            return Call(text, self._arguments())
        if kind == "name" or text == "{":
            self._place -= kind != "name"
            return self._selector(text if kind == "name" else "")
        raise self._wrong(at, "is where a value should be")

    def _arguments(self) -> tuple[Expression, ...]:
        self._expect("(")
        return self._listed(")", lambda: self._expression(0))

    def _listed(self, end: str, read: Callable[[], T]) -> tuple[T, ...]:
        """Returns what ``read`` reads between commas, up to ``end``, before which there may be one more."""
        read_so_far = list[T]()
        while not self._is(end):
            read_so_far.append(read())
            if not self._is(","):
                self._expect(end)
                break
        return tuple(read_so_far)

    def _aggregation(self, name: str) -> Aggregation:
        labels, is_without = self._grouping()
        at, arguments = self._at(), self._arguments()
        if len(arguments) != 1:
            raise self._wrong(at, f"should be one expression, of '{name}'")
        after = self._grouping()
        return Aggregation(name, arguments[0], *(after if after[0] or after[1] else (labels, is_without)))

    def _grouping(self) -> tuple[tuple[str, ...], bool]:
        for word in ("by", "without"):
            if self._is(word):
                return self._labels(), word == "without"
        return (), False

    def _labels(self) -> tuple[str, ...]:
        self._expect("(")
        return self._listed(")", self._label)

    def _label(self) -> str:
        at, (kind, text) = self._at(), self._next()
        if kind != "name":
            raise self._wrong(at, "is where the name of a label should be")
        return text

    def _selector(self, name: str) -> Selector:
        matchers = [Matcher(NAME, "=", name)] if name else []
        if self._is("{"):
            matchers += self._listed("}", self._matcher)
        if not matchers:
            raise UserError("the query names no series: '{}' would be all of them")
        if not self._is("["):
            return Selector(tuple(matchers))
        at, (kind, text) = self._at(), self._next()
        if kind != "duration":
            raise self._wrong(at, "is where a duration such as 5m should be")
        self._expect("]")
        return Selector(tuple(matchers), seconds_of(text))

    def _matcher(self) -> Matcher:
        at, (kind, label) = self._at(), self._next()
        sign, (value_kind, value) = self._next()[1], self._next()
        if kind != "name" or sign not in ("=", "!=", "=~", "!~") or value_kind != "text":
            raise self._wrong(at, 'is where a condition such as run="sort" should be')
        return _checked(Matcher(label, cast(MatchKind, sign), _unquoted(value)))


def _checked(matcher: Matcher) -> Matcher:
    if matcher.kind in ("=~", "!~"):
        try:
            re.compile(matcher.value)
        except re.error as error:
            raise UserError(f"'{matcher.value[:100]}' is no regular expression ({error})") from None
    return matcher


def _unquoted(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), text[1:-1])
