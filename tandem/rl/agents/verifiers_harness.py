"""The chat loop of a seat of a ``verifiers`` environment, in the process of its episode: the package's own loops are programs that it installs with ``uv``.

It sends the conversation, runs the tools that the model calls on the environment's tool servers, and ends with a turn that calls none, as the package's
``null`` harness does. Loaded by the package as a plugin, under the name ``tandem_chat``.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import openai
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]
TOO_LONG = "context_length_exceeded"


class ChatConfig(HarnessConfig):  # type: ignore[misc]  # The package's types are not read.
    """The keys of ``harness`` in the settings of a seat: those of every harness."""


class ChatHarness(Harness[ChatConfig]):  # type: ignore[misc]
    """The loop; it keeps nothing between episodes."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: ModelContext, trace: Trace, runtime: Runtime, endpoint: str, secret: str, mcp_urls: dict[str, str], data: TaskData
    ) -> ProgramResult:
        """Plays one segment: from the task's prompt, or the conversation so far, to a turn of the model without a call."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0))
            servers = {"mcpServers": {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}}
            tools, dispatch, connections = await connect_mcp(servers, stack)
            offered: Any = {"tools": tools} if tools else {}
            while True:
                try:
                    completion = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                except openai.BadRequestError as error:
                    if TOO_LONG not in str(error):
                        raise
                    break  # No room for a further turn: what was said is scored.
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = await self._result(call, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ProgramResult(exit_code=0, stdout="", stderr="")

    @staticmethod
    async def _result(call: Any, dispatch: dict[str, tuple[str, str]], connections: dict[str, Any]) -> Any:
        """Returns what the tool answers to ``call``, or what is wrong with it."""
        name = call.function.name
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are not JSON ({error})"
        if name not in dispatch or not isinstance(arguments, dict):
            return f"error: there is no tool '{name}'" if name not in dispatch else "error: the arguments are not a JSON object"
        return await call_mcp(connections, dispatch, name, arguments)
