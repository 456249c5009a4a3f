"""The description of each configuration key: the string literal under its field, for documents and for the options of commands."""

import ast
import inspect
from functools import cache


@cache
def field_descriptions(section: type) -> dict[str, str]:
    """Returns the description of each field of the dataclass ``section``, on one line; empty if Python's sources are not installed."""
    try:
        source = inspect.getsource(inspect.getmodule(section) or section)
    except OSError:
        return {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == section.__name__:
            return _descriptions(node)
    return {}


def _descriptions(node: ast.ClassDef) -> dict[str, str]:
    descriptions = {}
    for field, under in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant) and isinstance(under.value.value, str):
            descriptions[field.target.id] = " ".join(under.value.value.split())
    return descriptions
