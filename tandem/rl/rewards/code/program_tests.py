"""Tests of a program from a ground truth, in the forms that data sets of programming tasks have, and what a program must do to pass one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.rl.rewards.code.runner import Other


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """The tests of one prompt: exactly one of the fields has any.

    ``inputs``: standard input and expected output. ``calls``: the arguments of ``function`` and the expected value. ``assertions``: Python texts, each a test,
    which call functions of the program."""

    inputs: tuple[tuple[str, str], ...] = ()
    function: str = ""
    calls: tuple[tuple[list[Any], Any], ...] = ()
    assertions: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.inputs) + len(self.calls) + len(self.assertions)


def read_tests(ground_truth: Any, columns: Mapping[str, Any]) -> ProgramTests:
    """Returns the tests in ``ground_truth``, which may be their JSON text. Raises ``ValueError`` if it has none.

    - ``{"inputs": [...], "outputs": [...]}`` (APPS, TACO, verl's prime_code), or ``input`` and ``output`` (CodeContests); with ``fn_name``, of calls.
    - a list of ``{"input": ..., "output": ...}`` (LiveCodeBench); with a column ``fn_name``, of calls with an argument a line.
    - a list of assertions (MBPP), or the text of a test program; with a column ``entry_point``, followed by ``check(entry_point)`` (HumanEval)."""
    data = ground_truth
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError):
            entry = columns.get("entry_point")
            data = [f"{data}\ncheck({entry})" if isinstance(entry, str) and "def check(" in data else data]
    function = columns.get("fn_name")
    if isinstance(data, Mapping):
        function = data.get("fn_name", function)
        given, wanted = data.get("inputs", data.get("input")), data.get("outputs", data.get("output"))
        if not isinstance(given, list) or not isinstance(wanted, list) or len(given) != len(wanted):
            raise ValueError("the ground truth has no lists 'inputs' and 'outputs' of one length")
        pairs = list(zip(given, wanted, strict=True))
    elif isinstance(data, list) and data and all(isinstance(each, Mapping) and {"input", "output"} <= set(each) for each in data):
        pairs = [(each["input"], each["output"]) for each in data]
    elif isinstance(data, list) and data and all(isinstance(each, str) and each.strip() for each in data):
        return ProgramTests(assertions=tuple(data))
    else:
        raise ValueError("the ground truth is neither inputs with outputs nor assertions")
    if not pairs:
        raise ValueError("the ground truth has no test")
    if function:
        return ProgramTests(function=str(function), calls=tuple((_arguments(given), _value(wanted)) for given, wanted in pairs))
    return ProgramTests(inputs=tuple((_text(given), _text(wanted)) for given, wanted in pairs))


def is_output(output: str, wanted: str) -> bool:
    """Returns whether two outputs have the same lines, but for white space at the end of lines and of the text."""
    return _lines(output) == _lines(wanted)


def is_value(value: Any, wanted: Any) -> bool:
    """Returns whether ``value`` is the one ``wanted``, which was JSON: tuples count as lists. APPS has each value in a list of one."""
    plain = _plain(value)
    return plain == wanted or (isinstance(wanted, list) and len(wanted) == 1 and plain == wanted[0])


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return float("nan") if isinstance(value, Other) else value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"an input or output of the ground truth is a {type(value).__name__}, not a text")
    return value


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    if not isinstance(value, list):
        raise ValueError(f"the arguments of a call are a {type(value).__name__}, not a list")
    return value


def _value(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
