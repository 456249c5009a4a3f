"""The program inside the sandbox. Standard library alone, imports nothing of Tandem: its text is handed to ``python -c``.

Reads requests as Python literals, a line each, and answers each with a line of JSON, on descriptors of its own; what a program prints, however much, goes
elsewhere. No expected output ever comes in here, so a program that takes this process over can only give answers of its own. Few modules are imported, because
starting takes most of the time of a short program.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys
from _json import encode_basestring_ascii

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from collections.abc import Callable
    from typing import Any

SIGKILL = 9
LARGEST = 2**16
"""Characters of one number as text, and of the text of an error."""


# -- values between processes ------------------------------------------------------------------------------------------


def pack(value: Any, depth: int = 0) -> Any:
    """Returns a literal as JSON: lists as they are, everything else that JSON does not have as an object with one key."""
    if depth > 60:
        return {"other": "nested"}
    if value is None or (isinstance(value, (bool, str)) and type(value) in (bool, str)):
        return value
    if type(value) is int:
        return value if abs(value) < 2**53 else {"int": hex(value)[:LARGEST]}
    if type(value) is float:
        return value if value == value and value not in (float("inf"), float("-inf")) else {"float": repr(value)}
    inner = lambda values: [pack(each, depth + 1) for each in values]
    if type(value) is list:
        return inner(value)
    if type(value) is dict:
        return {"dict": [inner(pair) for pair in value.items()]}
    for kind in (tuple, set, frozenset):
        if type(value) is kind:
            return {kind.__name__: inner(value)}
    if type(value) in (bytes, bytearray):
        return {type(value).__name__: value.hex()}
    if type(value) is complex:
        return {"complex": [pack(value.real), pack(value.imag)]}
    return {"other": type(value).__name__}


class Other:
    """A value that is no literal; equal to nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


def unpack(data: Any) -> Any:
    """Returns the value that ``pack`` packed. Raises ``ValueError`` or ``TypeError`` for anything else."""
    if isinstance(data, list):
        return [unpack(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return float(inner)
    if kind == "dict":
        return {unpack(key): unpack(value) for key, value in inner}
    if kind in ("tuple", "set", "frozenset"):
        return getattr(builtins, kind)(unpack(each) for each in inner)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind).fromhex(inner)
    if kind == "complex":
        return complex(*(unpack(each) for each in inner))
    return Other(str(inner))


def described(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = type(error).__name__
    return text[:500]


def to_json(value: Any) -> str:
    """Returns a value that JSON has as JSON."""
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, dict):
        return "{" + ",".join(encode_basestring_ascii(key) + ":" + to_json(each) for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(to_json, value)) + "]"
    return {None: "null", True: "true", False: "false"}[value] if value is None or value is True or value is False else repr(value)


# -- the process -------------------------------------------------------------------------------------------------------


class Lines:
    """Lines over descriptors that no program is handed."""

    def __init__(self) -> None:
        self.source, self.sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
        empty, full = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
        os.dup2(empty, 0)
        os.dup2(full, 1)
        os.dup2(full, 2)

    def read(self) -> dict[str, Any]:
        line = self.source.readline()
        if not line:
            os._exit(0)
        request: dict[str, Any] = eval(line, {})  # A literal, from the process that started this one.
        return request

    def write(self, **answer: Any) -> None:
        data = to_json(answer).encode() + b"\n"
        while data:
            data = data[os.write(self.sink, data) :]


def limit(limits: dict[str, int]) -> None:
    """Lowers what this process and its children may use, for good."""
    for name, most in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def run_command(command: list[str] | Callable[[], Any], text: str, output_bytes: int, limits: dict[str, int]) -> dict[str, Any]:
    """Runs ``command``, or in a copy of this process the function ``command``, with ``text`` as standard input. Returns its output and how it ended."""
    given, taken = os.memfd_create("input"), os.memfd_create("output")
    with os.fdopen(given, "w+b") as source, os.fdopen(taken, "w+b") as sink:
        source.write(text.encode("utf-8", "surrogatepass"))
        source.seek(0)
        child = os.fork()
        if child == 0:
            run_child(command, given, taken, limits)
        _, status = os.waitpid(child, 0)
        try:  # noqa: SIM105  # contextlib takes a millisecond to import.
            os.killpg(child, SIGKILL)  # what it left behind
        except ProcessLookupError:
            pass
        sink.seek(0)
        output = sink.read(output_bytes + 1)
    how = ""
    if len(output) > output_bytes:
        how = f"more than {output_bytes} bytes of output"
    elif os.WIFSIGNALED(status):
        import signal

        how = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    elif os.WEXITSTATUS(status):
        how = f"exit status {os.WEXITSTATUS(status)}"
    return {"output": output[:output_bytes].decode("utf-8", "replace"), "how": how}


def run_child(command: list[str] | Callable[[], Any], given: int, taken: int, limits: dict[str, int]) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(given, 0)
        os.dup2(taken, 1)
        limit(limits)
        if isinstance(command, list):
            os.execvp(command[0], command)
        command()
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # As at the end of any program, waits for its threads.
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status & 255)


def module_of(code: Any) -> dict[str, Any]:
    """Returns the namespace of ``code`` run as a main program would be."""
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins, "__file__": "program.py"}
    exec(code, names)
    return names


def serve_inputs(lines: Lines, request: dict[str, Any]) -> None:
    """Runs the program once for each input."""
    limits, output_bytes = request["limits"], request["output_bytes"]
    if request["run"]:
        with open(request["file"], "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(request["program"])
        if request["compile"]:
            built = run_command(["/bin/sh", "-c", request["compile"]], "", output_bytes, limits)
            if built["how"]:
                return lines.write(broken=f"it does not compile ({built['how']})")
        command: list[str] | Callable[[], Any] = ["/bin/sh", "-c", request["run"]]
    else:
        try:
            code = compile(request["program"], "program.py", "exec")
        except BaseException as error:
            return lines.write(broken=described(error))

        def command() -> dict[str, Any]:
            return module_of(code)

    lines.write(loaded=True)
    while True:
        asked = lines.read()
        lines.write(**run_command(command, asked["input"], output_bytes, limits))


def serve_calls(lines: Lines, request: dict[str, Any]) -> None:
    """Runs the program once and calls its functions."""
    limit(request["limits"])
    try:
        names = module_of(compile(request["program"], "program.py", "exec"))
    except BaseException as error:
        return lines.write(broken=described(error))
    lines.write(loaded=True)
    while True:
        asked = lines.read()
        try:
            function = names.get(asked["call"])
            if function is None and isinstance(names.get("Solution"), type):
                function = getattr(names["Solution"](), asked["call"])
            if function is None:
                raise NameError(f"name {asked['call']!r} is not defined")
            value = function(*unpack(asked["arguments"]), **{name: unpack(each) for name, each in asked["named"].items()})
            lines.write(value=pack(value))
        except BaseException as error:
            lines.write(error=described(error), kind=type(error).__name__)


def serve_tests(lines: Lines, request: dict[str, Any]) -> None:
    """Runs each test; names that neither it nor Python defines are functions of the program, which are called where the program is."""
    import ast

    limit(request["limits"])
    lines.write(loaded=True)

    def called(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            lines.write(call=name, arguments=pack(list(arguments)), named={key: pack(value) for key, value in named.items()})
            answer = lines.read()
            if "value" in answer:
                return unpack(answer["value"])
            kind = getattr(builtins, str(answer.get("kind")), Exception)
            raise kind(answer.get("error")) if isinstance(kind, type) and issubclass(kind, Exception) else Exception(answer.get("error"))

        return call

    for test in request["tests"]:
        try:
            tree = ast.parse(test)
            names = {name: called(name) for name in free_names(tree) if not hasattr(builtins, name)}
            exec(compile(tree, "test.py", "exec"), {"__name__": "test", **names})
            lines.write(passed=True)
        except BaseException as error:
            lines.write(passed=False, error=described(error))
    lines.write(finished=True)


def free_names(tree: ast.AST) -> set[str]:
    """Returns the names that ``tree`` uses and binds nowhere."""
    import ast

    used: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def main() -> None:
    lines = Lines()
    request = lines.read()
    lines.write(ready=True)
    {"inputs": serve_inputs, "calls": serve_calls, "tests": serve_tests}[request["mode"]](lines, request)


if __name__ == "__main__":
    main()
