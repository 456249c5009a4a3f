"""``/v1/responses``: OpenAI's responses."""

import time
import uuid
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, ValidationError
from starlette.responses import Response

from tandem.serving.errors import ApiError, invalid
from tandem.serving.forms.answer import Answer
from tandem.serving.forms.responses import ResponsesBody, ResponseWriter
from tandem.serving.protocol import Body, ChatCompletionRequest, SamplingFields, ShortText
from tandem.serving.response_store import StoredResponse
from tandem.serving.routes.written_answer import write_answer
from tandem.serving.state import ServerState


class Effort(Body):
    effort: Annotated[str, Field(max_length=64)] | None = None


class ResponsesRequest(ResponsesBody, SamplingFields):
    """``store``: whether a later request may continue the answer. With vLLM's sampling parameters."""

    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    reasoning: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: ShortText | None = None

    def chat(self, earlier: list[dict[str, Any]]) -> ChatCompletionRequest:
        """Returns the request as one for a chat completion that continues the messages ``earlier``. Raises ``ApiError``."""
        self.check()
        if (self.n or 1) > 1:
            raise invalid("'n' is more than 1; a response has one answer", "n")
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        given |= {
            "model": self.model, "messages": [*instructions, *earlier, *self.new_messages()], "tools": self.functions() or None,
            "tool_choice": _tool_choice(self.tool_choice), "max_completion_tokens": self.max_output_tokens, "response_format": _format(self.text),
            "parallel_tool_calls": self.parallel_tool_calls, "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs, "priority": self.priority, "cache_salt": self.cache_salt,
        }  # fmt: skip
        return chat_request({name: value for name, value in given.items() if value is not None})


def chat_request(fields: dict[str, Any]) -> ChatCompletionRequest:
    """Returns the request with ``fields``, which a client gave in another form. Raises ``ApiError``."""
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"]]
        raise invalid(f"'{'.'.join(where)}': {first['msg']}", where[0] if where else None) from None


async def create(state: ServerState, body: ResponsesRequest, request: Request) -> Response:
    """``POST /v1/responses``."""
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        earlier = list(_stored(state, body.previous_response_id).conversation)
    chat = body.chat(earlier)
    id = f"resp_{uuid.uuid4().hex}"
    shown = {
        "instructions": body.instructions, "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "temperature": body.temperature, "top_p": body.top_p,
        "max_output_tokens": body.max_output_tokens, "previous_response_id": body.previous_response_id, "store": body.store is not False,
        "text": body.text or {"format": {"type": "text"}},
    }  # fmt: skip
    writer = ResponseWriter(id, body.model or state.model_name, int(time.time()), shown)

    def done(answer: Answer) -> None:
        if body.store is not False:
            # The instructions hold for one request, as with OpenAI.
            state.responses.put(id, [*earlier, *body.new_messages(), answer.message()], writer.whole)

    return await write_answer(state, chat, request, id, writer, stream=bool(body.stream), done=done)


def retrieve(state: ServerState, id: str) -> dict[str, Any]:
    """``GET /v1/responses/ID``."""
    return _stored(state, id).whole


def delete(state: ServerState, id: str) -> dict[str, Any]:
    """``DELETE /v1/responses/ID``."""
    _stored(state, id)
    state.responses.remove(id)
    return {"id": id, "object": "response", "deleted": True}


def _stored(state: ServerState, id: str) -> StoredResponse:
    found = state.responses.get(id)
    if found is None:
        message = f"the response {id[:100]!r} is not held here: it was not stored, or is among the oldest, or another server answered"
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    return found


def _tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns ``text.format`` as the ``response_format`` of a chat completion."""
    given = (text or {}).get("format")
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given  # type: ignore[no-any-return]
    return {"type": "json_schema", "json_schema": {name: given[name] for name in ("name", "schema") if name in given}}
