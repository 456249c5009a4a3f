"""An agent worker: ``python -m tandem.rl.agents.agent_worker --agent PATH --channel FD`` loads the agent once and runs its episodes one by one, each in a
process that is forked for it. So an episode begins with the state that the agent's module had when it was loaded, whatever ran before, and leaves
nothing behind. Imports no torch. The agent's output goes to the worker's log; its standard input is empty.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.rl.function_process import Loaded, function_options
from tandem.rl.rewards.judgement import checked_number
from tandem.runtime.import_path import load_function
from tandem.runtime.parameters import accepted, needed, parameters_of, takes_any
from tandem.runtime.process.child import die_with_parent
from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, message_from, message_meta
from tandem.storage.digests import bytes_digest
from tandem.types import UserError
from tandem.types.one_line import describe, shortened
from tandem.types.sample import REWARD

GIVEN = ("ground_truth", "messages")
"""What an agent may take of every prompt, besides the columns of its row."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """The call ``run``: an episode on ``question``. ``seed``: of Python's random numbers. ``columns``: what else the prompt has, of which the agent is given
    what it has parameters for."""

    question: str
    seed: int
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """What an episode returned. ``has_text``: the agent returned the ``text``. ``outcome``: the numbers that it returned, as in ``Sample``. ``error``: what it
    raised, or why it ended otherwise; empty if it returned."""

    text: str = ""
    has_text: bool = False
    error: str = ""
    outcome: dict[str, float] = field(default_factory=dict)


class AgentWorker:
    """Loads the agent in the constructor; ``load`` reports the result, so that the workers of a pool load in parallel."""

    def __init__(self, path: str) -> None:
        self.function: Callable[[str], Any] | None = None
        self.files: dict[str, str] = {}
        self.failure: UserError | None = None
        try:
            self.function, file = load_agent(path)
            self.files = {file: bytes_digest(Path(file).read_bytes())} if file else {}
        except UserError as error:
            traceback.print_exc()
            self.failure = error

    def load(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Returns ``Loaded``. Raises ``UserError`` if the agent could not be loaded."""
        if self.failure is not None:
            raise self.failure
        assert self.function is not None
        return message_meta(Loaded(self.files, list(needed(self.function, given=[question_of(self.function), *GIVEN])))), {}

    def run(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Returns ``AgentAnswer``."""
        assert self.function is not None
        return message_meta(run_forked(self.function, message_from(AgentRequest, meta))), {}


def load_agent(path: str) -> tuple[Callable[[str], Any], str]:
    """Returns the agent at ``path`` and its file. Raises ``UserError`` if it cannot be loaded, or has no parameter for the question."""
    function, file = load_function(path, "agent")
    if not takes_any(function) and not question_of(function):
        raise UserError(f"agent '{path}' has no parameter for the question; its first parameter is given it")
    return function, file


def question_of(function: Callable[..., Any]) -> str:
    """Returns the name of the parameter that is given the question: the first one. Empty where there is none, or its name is not known."""
    first = next(iter(parameters_of(function).values()), None)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first.name if first is not None and first.kind in positional else ""


def agent_files(path: str) -> dict[str, str]:
    """Returns the digest of the file that has the agent at ``path``, which is not imported: a client that it makes needs the environment of an agent
    worker. Empty where the file is not known."""
    where = path.rpartition(":")[0]
    if where.endswith(".py") or "/" in where:
        file = where
    else:
        try:
            spec = importlib.util.find_spec(where)
        except (ImportError, ValueError):
            return {}
        file = (spec.origin or "") if spec is not None else ""
    return {file: bytes_digest(Path(file).read_bytes())} if file and Path(file).is_file() else {}


def run_forked(function: Callable[[str], Any], request: AgentRequest) -> AgentAnswer:
    """Runs an episode in a forked process and ends that process with what it has started."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            die_with_parent(parent)
            os.close(reading)
            content = json.dumps(asdict(run_agent(function, request))).encode()
            sys.stdout.flush()
            sys.stderr.flush()
            with open(writing, "wb") as stream:
                stream.write(content)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with contextlib.suppress(OSError):  # The process has done it already, or has ended.
        os.setpgid(pid, pid)
    with open(reading, "rb") as stream:
        try:
            received = json.loads(stream.read())
        except ValueError:
            received = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if received is None:
        ended = f"signal {-code}" if (code := os.waitstatus_to_exitcode(status)) < 0 else f"exit status {code}"
        return AgentAnswer(error=f"it ended its process ({ended})")
    return AgentAnswer(**received)


def run_agent(function: Callable[[str], Any], request: AgentRequest) -> AgentAnswer:
    """Calls ``function``, whatever it raises."""
    random.seed(request.seed)
    columns = {name: value for name, value in request.columns.items() if name != question_of(function)}
    try:
        result = function(request.question, **accepted(function, columns))
        if inspect.iscoroutine(result):
            result = asyncio.run(_awaited(result))
        return answer_of(result)
    except BaseException as error:
        traceback.print_exc()
        return AgentAnswer(error=describe(error))


def answer_of(result: Any) -> AgentAnswer:
    """Returns what an agent's ``result`` says: a text, a number (the reward), None, or a mapping with the ``reward``, a ``text`` and further numbers."""
    if result is None or isinstance(result, str):
        return AgentAnswer(result or "", result is not None)
    if not isinstance(result, Mapping):
        result = {REWARD: result}
    if REWARD not in result:
        return AgentAnswer(error=f"it returned a mapping with the keys {', '.join(map(repr, result))} and without '{REWARD}'")
    text = result.get("text")
    if text is not None and not isinstance(text, str):
        return AgentAnswer(error=f"it returned the text {shortened(text)}, which is no text")
    try:
        outcome = {str(name): checked_number(value) for name, value in result.items() if name != "text"}
    except ValueError as error:
        return AgentAnswer(error=str(error))
    return AgentAnswer(text or "", text is not None, outcome=outcome)


async def _awaited(result: Coroutine[Any, Any, Any]) -> Any:
    return await result


def main() -> None:
    value, channel = function_options(__doc__, "--agent", "agent_worker")
    worker = AgentWorker(value)
    serve({"load": worker.load, "run": worker.run}, channel)


if __name__ == "__main__":
    main()
