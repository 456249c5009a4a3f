"""A tool worker: ``python -m tandem.rl.rollout.tool_worker --tools JSON --channel FD`` loads the tools once and serves calls one by one.
Imports no torch. The tools' output goes to the worker's log; their standard input is empty.
"""

import asyncio
import inspect
import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.data.tools.load import ERROR, Tool, load_tools
from tandem.rl.function_process import Loaded, function_options
from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, message_from, message_meta
from tandem.storage.digests import bytes_digest
from tandem.types import UserError
from tandem.types.one_line import describe

MOST_CHARACTERS = 2**16
"""Of a result that is sent to the rollout; its middle is left out."""
CALLERS_FAULT = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
"""Errors of the operating system that a call's arguments cause."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The call ``run``: of the tool ``name``."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool returned, as text for the model. ``fault``: why the tool is broken, empty if it is not."""

    text: str
    fault: str = ""


class ToolWorker:
    """Loads the tools in the constructor; ``load`` reports the result, so that the workers of a pool load in parallel."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.tools: Mapping[str, Tool] = {}
        self.files: dict[str, str] = {}
        self.failure: UserError | None = None
        # One loop for all calls: a client that a tool keeps belongs to the loop in which it was made.
        self.runner = asyncio.Runner()
        try:
            self.tools = load_tools(paths)
            self.files = {tool.file: bytes_digest(Path(tool.file).read_bytes()) for tool in self.tools.values() if tool.file}
        except UserError as error:
            traceback.print_exc()
            self.failure = error

    def load(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Returns ``Loaded``. Raises ``UserError`` if a tool could not be loaded."""
        if self.failure is not None:
            raise self.failure
        return message_meta(Loaded(self.files)), {}

    def run(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Returns ``ToolAnswer``."""
        request = message_from(ToolRequest, meta)
        return message_meta(run_tool(self.tools[request.name], request.arguments, self.runner)), {}


def run_tool(tool: Tool, arguments: Mapping[str, Any], runner: asyncio.Runner) -> ToolAnswer:
    """Calls ``tool``. What it raises is for the model to read, except where the machine is at fault: no memory, a missing package, an exit, and errors of
    the system and the network that the arguments do not cause."""
    try:
        result = tool.function(**arguments)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        if len(text) > MOST_CHARACTERS:
            text = f"{text[: MOST_CHARACTERS // 2]}...{text[-MOST_CHARACTERS // 2 :]}"
        return ToolAnswer(text)
    except CALLERS_FAULT as error:
        return ToolAnswer(error_text(describe(error)))
    except (OSError, MemoryError, ImportError) as error:
        traceback.print_exc()
        return ToolAnswer("", describe(error))
    except Exception as error:
        return ToolAnswer(error_text(describe(error)))
    except BaseException as error:  # The tool exits, not the worker.
        traceback.print_exc()
        return ToolAnswer("", describe(error))


def error_text(problem: str) -> str:
    """Returns ``problem`` as the model reads it."""
    return ERROR + problem


async def _awaited(result: Any) -> Any:
    return await result


def main() -> None:
    value, channel = function_options(__doc__, "--tools", "tool_worker")
    worker = ToolWorker(json.loads(value))
    serve({"load": worker.load, "run": worker.run}, channel)


if __name__ == "__main__":
    main()
