"""The operators between two sides of a query: numbers, or series that belong together by their labels."""

import math
import operator
from collections.abc import Callable, Mapping

from tandem.metrics_database.promql.syntax import NAME, Binary, Matching
from tandem.types import UserError

Labels = tuple[tuple[str, str], ...]
Vector = list[tuple[Labels, float]]


def _divided(left: float, right: float) -> float:
    """As IEEE 754 has it."""
    if right != 0:
        return left / right
    return math.nan if left == 0 or left != left else math.copysign(math.inf, left) * math.copysign(1, right)


def _remainder(left: float, right: float) -> float:
    return math.fmod(left, right) if right != 0 and math.isfinite(left) else math.nan


def _power(left: float, right: float) -> float:
    try:
        return math.pow(left, right)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divided, "%": _remainder, "^": _power,
}  # fmt: skip
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def combined(node: Binary, left: float | Vector, right: float | Vector) -> float | Vector:
    """Returns the value of ``node``, whose sides have these values. Raises ``UserError`` where they do not fit together."""
    if isinstance(left, list) and isinstance(right, list):
        return _sets(node, left, right) if node.operator in ("and", "or", "unless") else _joined(node, left, right)
    if node.operator in ("and", "or", "unless"):
        raise UserError(f"'{node.operator}' is between series; write vector(...) around a number")
    if isinstance(left, float) and isinstance(right, float):
        if node.operator in COMPARE and not node.is_bool:
            raise UserError(f"'{node.operator}' between two numbers needs 'bool' after it")
        return float(_applied(node.operator, left, right))
    found: Vector = []
    for labels, value in left if isinstance(left, list) else right if isinstance(right, list) else []:
        pair = (value, right) if isinstance(left, list) else (left, value)
        result = _result(node, pair[0], pair[1], value)  # type: ignore[arg-type]
        if result is not None:
            keeps_name = node.operator in COMPARE and not node.is_bool
            found.append((labels if keeps_name else _without(labels, (NAME,)), result))
    return found


def _applied(sign: str, left: float, right: float) -> float:
    return ARITHMETIC[sign](left, right) if sign in ARITHMETIC else float(COMPARE[sign](left, right))


def _result(node: Binary, left: float, right: float, kept: float) -> float | None:
    """Returns the value of a pair; ``None`` where a comparison leaves it out, else ``kept`` of one that does not."""
    if node.operator in COMPARE and not node.is_bool:
        return kept if COMPARE[node.operator](left, right) else None
    return _applied(node.operator, left, right)


def _without(labels: Labels, names: tuple[str, ...]) -> Labels:
    return tuple(pair for pair in labels if pair[0] not in names)


def _signature(matching: Matching, labels: Labels) -> Labels:
    """Returns what series that belong together have in common."""
    if matching.is_on:
        return tuple(pair for pair in labels if pair[0] in matching.labels)
    return _without(labels, (NAME, *matching.labels))


def _sets(node: Binary, left: Vector, right: Vector) -> Vector:
    of_right = {_signature(node.matching, labels) for labels, _ in right}
    if node.operator == "or":
        of_left = {_signature(node.matching, labels) for labels, _ in left}
        return [*left, *(each for each in right if _signature(node.matching, each[0]) not in of_left)]
    return [each for each in left if (_signature(node.matching, each[0]) in of_right) == (node.operator == "and")]


def _joined(node: Binary, left: Vector, right: Vector) -> Vector:
    matching = node.matching
    many, one = (right, left) if matching.many == "right" else (left, right)
    single: dict[Labels, tuple[Labels, float]] = {}
    for labels, value in one:
        signature = _signature(matching, labels)
        if signature in single:
            raise UserError(f"several series of one side of '{node.operator}' have the labels {dict(signature)}; aggregate that side, or use group_left")
        single[signature] = (labels, value)
    found: dict[Labels, float] = {}
    for labels, value in many:
        signature = _signature(matching, labels)
        if signature not in single:
            continue
        other_labels, other = single[signature]
        pair = (other, value) if matching.many == "right" else (value, other)
        result = _result(node, *pair, pair[0])
        if result is None:
            continue
        named = _labels_of(node, labels, other_labels)
        if named in found:
            raise UserError(f"several series of '{node.operator}' would have the labels {dict(named)}; use group_left or group_right")
        found[named] = result
    return list(found.items())


def _labels_of(node: Binary, labels: Labels, other: Labels) -> Labels:
    """Returns the labels of a pair, of which ``labels`` are those of the side with several."""
    matching = node.matching
    if node.operator not in COMPARE or node.is_bool:
        labels = _without(labels, (NAME,))
    if not matching.many:
        return tuple(pair for pair in labels if pair[0] in matching.labels) if matching.is_on else _without(labels, matching.labels)
    taken = dict(other)
    kept = {**dict(_without(labels, matching.included)), **{name: taken[name] for name in matching.included if name in taken}}
    return tuple(sorted(kept.items()))
