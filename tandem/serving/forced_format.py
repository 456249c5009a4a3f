"""The format that an answer is forced to have: calls of tools, where a request asks for them, and any format behind the reasoning."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.serving.errors import invalid
from tandem.serving.protocol import FunctionTool

_REASONING = "start: reasoning space answer\nreasoning[suffix=%s]: /(?s:.*)/\nspace: /[ \\t\\r\\n]*/\nanswer: %s\n"
"""A grammar of llguidance: any text up to the mark, then the answer."""


def arguments_schema(tool: FunctionTool) -> dict[str, Any]:
    """Returns the JSON schema of the arguments of ``tool``."""
    return {"type": "object", **(tool.parameters or {})}


def calls_schema(tools: Sequence[FunctionTool], has_one_call: bool) -> dict[str, Any]:
    """Returns the schema of a list of calls of ``tools``, at least one, as vLLM forces it for ``required``. Raises ``ApiError`` for definitions of several
    tools that have one name."""
    definitions: dict[str, Any] = {}
    kinds = []
    for tool in tools:
        schema = arguments_schema(tool)
        for name in ("$defs", "definitions"):
            # References name them from the root of the whole schema.
            for key, value in (schema.pop(name, None) or {}).items() if isinstance(schema.get(name), Mapping) else ():
                if definitions.setdefault(name, {}).setdefault(key, value) != value:
                    raise invalid(f"two tools define '{name}/{key}' differently; give the definitions different names", "tools")
        properties = {"name": {"type": "string", "enum": [tool.name]}, "parameters": schema}
        kinds.append({"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False})
    most = {"maxItems": 1} if has_one_call else {}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": kinds}, **definitions}


def after_reasoning(wanted: Mapping[str, Any], end: str) -> dict[str, Any]:
    """Returns the structured output that is ``wanted``, behind reasoning that ``end`` ends. Raises ``ApiError`` for a grammar of the client's own."""
    given = {name: value for name, value in wanted.items() if value not in (None, False)}
    match given:
        case {"json": schema}:
            answer = f"%json {schema if isinstance(schema, str) else json.dumps(schema)}"
        case {"json_object": _}:
            answer = '%json {"type": "object"}'
        case {"choice": [*choices]}:
            answer = " | ".join(json.dumps(str(each), ensure_ascii=False) for each in choices)
        case {"regex": str(pattern)}:
            answer = "/" + re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", pattern, flags=re.DOTALL) + "/"
        case _:
            raise invalid("a grammar cannot follow reasoning; turn reasoning off, or give a JSON schema, a choice or a regex", "structured_outputs")
    return {"grammar": _REASONING % (json.dumps(end), answer)}
