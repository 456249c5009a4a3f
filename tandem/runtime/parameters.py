"""What a function of the user can be called with, by the names of its parameters."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters by name; empty where the signature is not known."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether the function takes arguments of every name, or does not say which it takes."""
    parameters = parameters_of(function)
    return not parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def accepted(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of ``known`` that the function has a parameter for."""
    parameters = parameters_of(function)
    return {name: value for name, value in known.items() if name in parameters or takes_any(function)}


def needed(function: Callable[..., Any], given: Collection[str]) -> tuple[str, ...]:
    """Returns the parameters without a default that are not ``given``: those that the function cannot do without."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name, each in parameters_of(function).items() if each.kind in named and each.default is each.empty and name not in given)
