"""``/v1/messages``: Anthropic's messages."""

import uuid
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from tandem.serving.chat_request import ready_chat
from tandem.serving.errors import invalid
from tandem.serving.forms.anthropic import MessagesBody, MessageWriter
from tandem.serving.protocol import ChatCompletionRequest, SamplingFields, ShortText
from tandem.serving.routes.responses import chat_request
from tandem.serving.routes.written_answer import write_answer
from tandem.serving.state import ServerState


class MessagesRequest(MessagesBody, SamplingFields):
    """``thinking``: whether the model thinks, for templates that read ``enable_thinking``. With vLLM's sampling parameters."""

    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: ShortText | None = None

    def completion(self) -> ChatCompletionRequest:
        """Returns the request as one for a chat completion. Raises ``ApiError``."""
        self.check()
        if (self.n or 1) > 1:
            raise invalid("'n' is more than 1; a message has one answer", "n")
        messages, tools = self.chat()
        choice = self.tool_choice or {}
        thinks = {} if self.thinking is None else {"enable_thinking": self.thinking.get("type") != "disabled"}
        variables = {**thinks, **(self.chat_template_kwargs or {})}
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        given |= {
            "model": self.model, "messages": messages, "tools": tools or None, "tool_choice": _tool_choice(choice), "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or given["stop"], "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
            "chat_template_kwargs": variables or None, "priority": self.priority, "cache_salt": self.cache_salt,
        }  # fmt: skip
        return chat_request({name: value for name, value in given.items() if value is not None})


async def create(state: ServerState, body: MessagesRequest, request: Request) -> Response:
    """``POST /v1/messages``."""
    if body.max_tokens is None:
        raise invalid("'max_tokens' is missing", "max_tokens")
    id = f"msg_{uuid.uuid4().hex}"
    writer = MessageWriter(id, body.model or state.model_name)
    return await write_answer(state, body.completion(), request, id, writer, stream=bool(body.stream), done=lambda answer: None)


async def count_tokens(state: ServerState, body: MessagesRequest, request: Request) -> dict[str, Any]:
    """``POST /v1/messages/count_tokens``."""
    state.check_model(body.model)
    return {"input_tokens": len((await ready_chat(state, body.completion(), request)).prompt)}


def _tool_choice(given: dict[str, Any]) -> Any:
    match given.get("type"):
        case None | "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": given.get("name")}}
        case kind:
            raise invalid(f"'tool_choice.type' is {str(kind)[:40]!r}; it must be auto, any, tool or none", "tool_choice")
