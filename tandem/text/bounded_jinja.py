"""The environment of chat templates: jinja2's sandbox, in which a template that loops without end is refused.

A template is text of the model's folder, and jinja2 lets it compute for ever: loops in loops, macros that call themselves twice, powers of powers. Each pass
through a loop, each call and each filter is counted here, and every few of them the processor time of the thread that renders is read. Strings and numbers are
bounded where operators, methods and filters make them. One operation between two counts is not interrupted."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import wraps
from typing import Any

from tandem.text.template_sizes import MOST_CHARACTERS, is_too_large, is_too_large_join, is_too_large_result, is_wide
from tandem.types import EndlessTemplate

MOST_SECONDS = 10.0
"""Of processor time, for one text: some hundred times what long conversations with many tools take."""
_EVERY = 16
_ITEMS, _JOINED = " items", " joined"
"""Names of filters that no template can write."""


class _Spent(threading.local):
    """The counts of a thread's rendering: ``until``, when it has to end (``None``: nothing is rendered), after ``seconds``."""

    until: float | None = None
    seconds = 0.0
    count = 0


class _Counted:
    """``items``, of which each is counted. It has a length where they have one: templates ask for that of a loop."""

    def __init__(self, items: Iterable[Any], count: Callable[[], None]) -> None:
        self._items, self._count = items, count

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._count()
            yield item


class _SizedCounted(_Counted):
    def __len__(self) -> int:
        assert isinstance(self._items, Sized)
        return len(self._items)


def bounded_environment(extensions: list[Any]) -> Any:
    """Returns an environment of jinja2 with the settings of transformers, whose ``bounded()`` is the context in which a template of it is rendered. Raises
    ``ImportError`` without jinja2."""
    from jinja2 import nodes, pass_eval_context
    from jinja2.exceptions import SecurityError
    from jinja2.filters import make_attrgetter, sync_do_join
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

    def too_large(name: str) -> Exception:
        return SecurityError(f"'{name}' in it makes too large a value")

    def check(name: str, text: Any, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        is_large = is_too_large("%", text, named or tuple(given)) if name == "format" else is_too_large_result(name, text, given, named)
        if is_large:
            raise too_large(name)

    class Measured(SandboxedFormatter):
        """A formatter that is asked first, and refuses what becomes too large."""

        made = 0

        def format_field(self, value: Any, format_spec: str) -> Any:
            if is_wide(format_spec):
                raise too_large("format")
            text = super().format_field(value, format_spec)
            self.made += len(text)
            if self.made > MOST_CHARACTERS:
                raise too_large("format")
            return text

    @pass_eval_context
    def join(eval_context: Any, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> Any:
        every = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
        if is_too_large_join(d, every):
            raise too_large("join")
        return sync_do_join(eval_context, every, d)

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "%"})

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self._spent = _Spent()
            self.filters["join"] = join
            # Latin of any length, at random, in one call.
            self.globals.pop("lipsum", None)
            self.filters = {name: _with_count(name, function, self._count, check) for name, function in self.filters.items()}

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, _ITEMS, [], [], None, None, lineno=loop.lineno)
            for joined in list(tree.find_all(nodes.Concat)):
                joined.nodes = [nodes.Filter(nodes.List(joined.nodes, lineno=joined.lineno), _JOINED, [], [], None, None, lineno=joined.lineno)]
            return tree

        def bounded(self, seconds: float | None = None) -> "_Rendering":
            return _Rendering(self._spent, MOST_SECONDS if seconds is None else seconds)

        def _count(self) -> None:
            spent = self._spent
            spent.count += 1
            if spent.count % _EVERY == 0 and spent.until is not None and time.thread_time() > spent.until:
                raise EndlessTemplate(f"it takes more than {spent.seconds:g} seconds of processor time, as one that loops without end")

        def items(self, items: Any) -> Any:
            return (_SizedCounted if isinstance(items, Sized) else _Counted)(items, self._count)

        def call(__self, __context: Any, __obj: Any, *given: Any, **named: Any) -> Any:  # noqa: N805 - as in jinja2: the names of a template's arguments
            __self._count()
            # The sandbox wraps the methods that format.
            method = getattr(__obj, "__wrapped__", __obj)
            owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            if isinstance(owner, str | bytes) and name == "join" and given:
                given = (list(given[0]), *given[1:])
                if is_too_large_join(owner, given[0]):
                    raise too_large(name)
            elif isinstance(owner, str) and name == "format":
                Measured(__self).vformat(owner, given, named)
            elif isinstance(owner, str) and name == "format_map" and given:
                Measured(__self).vformat(owner, (), given[0])
            elif isinstance(owner, str | bytes | int):
                check(name, owner, given, named)
            return super().call(__context, __obj, *given, **named)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            self._count()
            if is_too_large(operator, left, right):
                raise too_large(operator)
            return super().call_binop(context, operator, left, right)

        def concat(self, parts: Iterable[str]) -> str:
            every = list(parts)
            if sum(map(len, every)) > MOST_CHARACTERS:
                raise SecurityError(f"it makes a text of more than {MOST_CHARACTERS:,} characters")
            return "".join(every)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters[_ITEMS] = environment.items
    environment.filters[_JOINED] = lambda parts: environment.concat(map(str, parts))
    return environment


def _with_count(name: str, function: Callable[..., Any], count: Callable[[], None], check: Callable[..., None]) -> Callable[..., Any]:
    has_context = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def counted(*given: Any, **named: Any) -> Any:
        count()
        text, *arguments = given[1:] if has_context else given
        check(name, text, arguments, named)
        return function(*given, **named)

    return counted


class _Rendering:
    """The context in which texts are rendered in this thread, within ``seconds`` or what is left of those of a context around it."""

    def __init__(self, spent: _Spent, seconds: float) -> None:
        self._spent, self._seconds = spent, seconds

    def __enter__(self) -> None:
        spent = self._spent
        self._around = spent.until, spent.seconds
        until = time.thread_time() + self._seconds
        if spent.until is None or until < spent.until:
            spent.until, spent.seconds = until, self._seconds

    def __exit__(self, *_: object) -> None:
        self._spent.until, self._spent.seconds = self._around
