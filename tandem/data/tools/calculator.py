"""The built-in tool ``calculator``: arithmetic on numbers, without anything else of Python."""

import ast
import operator
from collections.abc import Callable
from typing import Any

_LONGEST = 1000
_MOST_BITS = 4096
"""Of a power or a left operand: larger numbers take long to compute."""
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (12 + 3) * 4.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_LONGEST} are computed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError("the expression is not arithmetic") from None
    value = _value(tree.body)
    # An exact quotient is shown as the whole number that it is.
    return str(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _checked(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > _MOST_BITS or (isinstance(left, int) and left.bit_length() * abs(right) > _MOST_BITS)):
            raise ValueError("the power is too large")
        return _checked(_BINARY[type(node.op)](left, right))
    raise ValueError("the expression is not arithmetic")


def _checked(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("the number is too large")
    if not isinstance(value, int | float):
        raise ValueError("the result is not a real number")
    return value
