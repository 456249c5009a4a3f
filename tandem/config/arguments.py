"""Answers wrong keyword arguments with one line: a name that another library has, and what to use here, or the nearest name."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tandem.types.errors import UserError

Kind = TypeVar("Kind")


class NotHere(UserError, AttributeError):
    """An attribute of another library's class. Its text says what has its place."""


def explained(instead: Mapping[str, str]) -> Callable[[type[Kind]], type[Kind]]:
    """Returns a decorator of a dataclass whose constructor then raises ``UserError`` where it would raise ``TypeError``. ``instead``: names that
    users of other libraries know, each with what to use."""

    def decorate(kind: type[Kind]) -> type[Kind]:
        construct: Callable[..., None] = kind.__init__

        @functools.wraps(construct)
        def checked(self: Kind, *args: Any, **kwargs: Any) -> None:
            try:
                construct(self, *args, **kwargs)
            except (TypeError, AttributeError) as error:
                known = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
                check_names(kind.__name__, kwargs, known, instead)
                raise UserError(f"{kind.__name__}: {_without_function(error)}; see help(tandem.{kind.__name__})") from error

        kind.__init__ = checked  # type: ignore[method-assign,assignment]
        return kind

    return decorate


def check_names(what: str, given: Iterable[str], known: Iterable[str], instead: Mapping[str, str]) -> None:
    """Raises ``UserError`` for the first name in ``given`` that is not ``known``."""
    names = list(known)
    for name in given:
        if name in names:
            continue
        if name in instead:
            raise UserError(f"{what} has no '{name}': {instead[name]}")
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(names)}"
        raise UserError(f"{what} has no '{name}'; {hint}")


def _without_function(error: Exception) -> str:
    """Returns the text of a ``TypeError`` without the name of the function that Python begins it with."""
    return str(error).partition("() ")[2] or str(error)
