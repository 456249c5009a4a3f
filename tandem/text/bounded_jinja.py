"""The environment of chat templates: jinja2's sandbox, in which a template that computes or grows without end is refused.

A template is text of the model's folder, and jinja2 lets it compute for ever: loops in loops, macros that call themselves twice, powers of powers, lists that
hold the last list twice. Each pass through a loop, each call, operator and filter is counted here, and every few of them the time and memory of the rendering
are checked (``rendering_limits``). Operators, methods and filters are asked first how large their result becomes (``template_sizes``), and so is what is
written, compared or hashed. One operation between two counts is not interrupted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import GeneratorType
from typing import Any, cast

from tandem.text.rendering_limits import RenderingLimits, chained, counted
from tandem.text.template_sizes import (
    MOST_CHARACTERS,
    MOST_ITEMS,
    is_large_format,
    is_large_value,
    is_too_large,
    is_too_large_join,
    is_too_large_result,
    is_wide,
)
from tandem.types import UserError

_ITEMS, _JOINED, _MEASURED, _MADE = " items", " joined", " measured", " made"
"""Names of filters that no template can write."""
_PLAIN = frozenset({str, int, float, bool, type(None)})
_COMPARING = frozenset({"eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge", ">=", "in", "lower", "upper"})
"""Tests that compare or write what they are given, ..."""
_HASHING = frozenset({"filter", "test"})
"""... or look it up."""
_COLLECTING = frozenset({"fromkeys", "union", "intersection", "difference", "symmetric_difference", "issubset", "issuperset", "isdisjoint"})
"""Methods that hash each item: items of one hash take the square of their number."""


def bounded_environment(extensions: list[Any], filters: Mapping[str, Callable[..., Any]]) -> Any:
    """Returns an environment of jinja2 with the settings of transformers and further ``filters``, whose ``bounded()`` is the context in which a template of it
    is rendered. Raises ``ImportError`` without jinja2."""
    from jinja2 import nodes, pass_environment, pass_eval_context
    from jinja2.filters import make_attrgetter, sync_do_join, sync_do_unique
    from jinja2.runtime import LoopContext, Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
    from jinja2.visitor import NodeTransformer

    limits = RenderingLimits()

    def too_large(name: str) -> Exception:
        return UserError(f"'{name}' in it makes too large a value")

    def check(name: str, text: Any, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        is_large = is_large_format(text, named or tuple(given)) if name == "format" and isinstance(text, str) else False
        if is_large or is_too_large_result(name, text, given, named):
            raise too_large(name)

    def measured(value: Any) -> Any:
        if type(value) not in _PLAIN and is_large_value(value):
            raise UserError("lists in lists make too large a value in it")
        return value

    @pass_eval_context
    def written(_: Any, value: Any) -> Any:
        # It has the context of a rendering, so that jinja2 writes nothing before one.
        limits.count()
        return measured(value)

    class Measured(SandboxedFormatter):
        """A formatter that is asked first, and refuses what becomes too large."""

        made = 0

        def convert_field(self, value: Any, conversion: Any) -> Any:
            return super().convert_field(measured(value), conversion)

        def format_field(self, value: Any, format_spec: str) -> Any:
            limits.count()
            if is_wide(format_spec):
                raise too_large("format")
            text = super().format_field(measured(value), format_spec)
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

    def total(iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        if isinstance(start, str | bytes):
            raise TypeError("'sum' adds no texts; 'join' does")
        result = start
        for item in iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable):
            limits.count()
            if is_too_large("+", result, item):
                raise too_large("sum")
            result = limits.made(result + item)
        return result

    @pass_environment
    def unique(env: Any, value: Iterable[Any], *given: Any, **named: Any) -> Any:
        return sync_do_unique(env, counted(value, limits.count), *given, **named)

    def through(name: str, node: Any) -> Any:
        return node if _is_constant(node, nodes) else nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    class Through(NodeTransformer):
        """Leads what operators of jinja2 do by themselves through filters."""

        def visit_For(self, node: Any) -> Any:  # noqa: N802 - as in jinja2
            node = self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, _ITEMS, [], [], None, None, lineno=node.lineno)
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED, [], [], None, None, lineno=node.lineno)

        def visit_Compare(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            for side in (node, *node.ops):
                side.expr = through(_MEASURED, side.expr)
            return node

        def visit_Pair(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            node.key = through(_MEASURED, node.key)
            return node

        def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            return through(_MADE, node) if isinstance(node.arg, nodes.Slice) else node

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "-", "%", "//", "/"})

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.filters |= {"join": join, "sum": total, "unique": unique, **filters}
            # Latin of any length, at random, in one call.
            self.globals.pop("lipsum", None)
            self.filters = {name: _bounded_filter(name, function, limits, check) for name, function in self.filters.items()}
            for name in _COMPARING | _HASHING:
                self.tests[name] = _measured_test(cast("Callable[..., Any]", self.tests[name]), written)

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree: nodes.Template = Through().visit(super()._parse(source, name, filename))
            return tree

        def bounded(self, seconds: float | None = None) -> Any:
            return limits.within(seconds)

        def getitem(self, obj: Any, argument: Any) -> Any:
            limits.count()
            return super().getitem(obj, measured(argument))

        def call(__self, __context: Any, __obj: Any, *given: Any, **named: Any) -> Any:  # noqa: N805 - as in jinja2: the names of a template's arguments
            limits.count()
            if isinstance(__obj, Macro | LoopContext):
                return super().call(__context, __obj, *given, **named)
            for value in (*given, *named.values()):
                measured(value)
            # The sandbox wraps the methods that format.
            method = getattr(__obj, "__wrapped__", __obj)
            owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            if isinstance(owner, str | bytes) and name == "join" and given:
                given = (given[0] if isinstance(given[0], str | bytes) else list(given[0]), *given[1:])
                if is_too_large_join(owner, given[0]):
                    raise too_large(name)
            elif isinstance(owner, str) and name in ("format", "format_map"):
                if len(owner) > MOST_ITEMS:
                    raise too_large(name)
                values = given[0] if name == "format_map" and given else named
                Measured(__self).vformat(owner, given if name == "format" else (), values)
            elif isinstance(owner, str | bytes | int) or owner is int:
                check(name, owner, given, named)
            elif isinstance(owner, list | tuple) and name in ("index", "count"):
                measured(owner)
            elif name in _COLLECTING or __obj is dict or __obj is __self.globals["namespace"]:
                given = tuple(counted(value, limits.count) if _is_plain_iterable(value) else value for value in given)
            return limits.made(super().call(__context, __obj, *given, **named))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            limits.count()
            if is_too_large(operator, left, right):
                raise too_large(operator)
            return limits.made(super().call_binop(context, operator, left, right))

        def concat(self, parts: Iterable[str]) -> str:
            every, size = [], 0
            for part in parts:
                size += len(part)
                if size > MOST_CHARACTERS:
                    raise UserError(f"it makes a text of more than {MOST_CHARACTERS:,} characters")
                every.append(part)
            text = "".join(every)
            limits.made(text)
            return text

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=written)
    environment.filters[_ITEMS] = lambda items: counted(items, limits.count)
    environment.filters[_JOINED] = lambda parts: environment.concat(str(measured(part)) for part in parts)
    environment.filters[_MEASURED] = measured
    environment.filters[_MADE] = limits.made
    return environment


def _bounded_filter(name: str, function: Callable[..., Any], limits: RenderingLimits, check: Callable[..., None]) -> Callable[..., Any]:
    has_context = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        limits.count()
        text, *arguments = given[1:] if has_context else given
        check(name, text, arguments, named)
        made = function(*given, **named)
        return chained(made, text, limits.count) if isinstance(made, GeneratorType) else limits.made(made)

    return bounded


def _measured_test(function: Callable[..., Any], written: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @wraps(function)
    def measured(*given: Any) -> Any:
        for value in given:
            written(None, value)
        return function(*given)

    return measured


def _is_plain_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, Mapping | str | bytes)


def _is_constant(node: Any, nodes: Any) -> bool:
    return isinstance(node, nodes.Const) or (isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items))
