"""The tools that a recipe names, as functions with their schemas."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.data.tools.calculator import calculator
from tandem.data.tools.schema import tool_schema
from tandem.runtime.import_path import load_function
from tandem.storage.digests import bytes_digest
from tandem.types import UserError

ERROR = "error: "
"""How a result begins that says what went wrong."""
BUILT_IN: Mapping[str, Callable[..., Any]] = {"calculator": calculator}


class Tool(NamedTuple):
    """A tool: ``schema`` in OpenAI's form, ``file``: the file that has the function, empty for a built-in one."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    file: str

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def load_tools(paths: Sequence[str]) -> dict[str, Tool]:
    """Returns the tools at ``paths`` by their names. Raises ``UserError`` for one that cannot be loaded, and for two of one name."""
    tools: dict[str, Tool] = {}
    for path in paths:
        function, file = (BUILT_IN[path], "") if path in BUILT_IN else load_function(path, "tool")
        tool = Tool(function, tool_schema(function, path), file)
        if tool.name in tools:
            raise UserError(f"two tools are named '{tool.name}', the second '{path}'; a model calls a tool by its name: rename one")
        tools[tool.name] = tool
    return tools


def tool_schemas(paths: Sequence[str]) -> list[Mapping[str, Any]]:
    """Returns the schemas of the tools at ``paths``, as prompts show them."""
    return [tool.schema for tool in load_tools(paths).values()]


def tool_files(paths: Sequence[str]) -> dict[str, str]:
    """Returns the digest of each file that defines one of the tools at ``paths``."""
    return {tool.file: bytes_digest(Path(tool.file).read_bytes()) for tool in load_tools(paths).values() if tool.file}
