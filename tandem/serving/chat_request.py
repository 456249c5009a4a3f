"""A conversation made ready for an engine: its prompt, its sampling, and how the answer is read."""

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tandem.serving.errors import invalid
from tandem.serving.forced_format import after_reasoning, arguments_schema, calls_schema
from tandem.serving.forms.answer import AnswerPlan
from tandem.serving.prompts import Conversation, response_format, sampling_params, structured_outputs
from tandem.serving.protocol import ChatCompletionRequest, FunctionTool, NamedTool
from tandem.serving.state import ServerState
from tandem.text.answer_reader import REASONING_FORMATS, arguments_of, list_of_calls
from tandem.text.tool_formats import TOOL_FORMATS, ToolFormat


@dataclass(frozen=True, slots=True)
class ReadyChat:
    """``params``: keyword arguments of ``SamplingParams``. ``top_logprobs``: how many are returned, ``None`` for none."""

    prompt: list[int]
    params: dict[str, Any]
    plan: AnswerPlan
    top_logprobs: int | None


async def ready_chat(state: ServerState, body: ChatCompletionRequest, request: Request) -> ReadyChat:
    """Returns the conversation of ``body``. Raises ``ApiError``."""
    count = (state.limits.check_logprobs(body.top_logprobs, "top_logprobs") or 0) if body.logprobs else None
    state.limits.check_logprobs(body.prompt_logprobs, "prompt_logprobs")
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or []]
    format, forced = _tool_choice(state, body, tools)
    reader = state.prompt_reader(request, body.truncate_prompt_tokens, longest)
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    shown = [] if body.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
    documents = {} if body.documents is None else {"documents": body.documents}
    variables = {**state.settings.chat_template_kwargs, **effort, **documents, **(body.chat_template_kwargs or {})}
    chat = Conversation(body.messages, body.add_generation_prompt is not False, shown, variables, bool(body.continue_final_message))
    text = await reader.chat_text(state.chat_template(bool(shown)), chat)
    reasoning = REASONING_FORMATS.get(state.settings.reasoning_parser or "")
    is_open = reasoning is not None and reasoning.begins_within(text[-64:])
    wanted = response_format(body) if forced is None else forced
    if wanted is not None and reasoning is not None and is_open:
        wanted = after_reasoning(wanted, reasoning.end)
    params = sampling_params(body, max_tokens=longest, logprobs=count, structured_outputs=wanted, defaults=state.sampling_defaults)
    # A chat continues to the end of its context, where the offline default is 16 tokens.
    params.setdefault("max_tokens", None)
    marks = [*(format.marks if format else ()), *(reasoning.marks if reasoning else ())]
    if state.are_special(marks):
        params["skip_special_tokens"] = False
    plan = AnswerPlan(
        tools=format, reasoning=reasoning, is_open=is_open, schemas={tool.name: tool.parameters or {} for tool in tools},
        shows_reasoning=body.include_reasoning is not False, has_one_call=body.parallel_tool_calls is False, is_named=isinstance(body.tool_choice, NamedTool),
    )  # fmt: skip
    return ReadyChat(await reader.chat_tokens(text), params, plan, count)


def _tool_choice(state: ServerState, body: ChatCompletionRequest, tools: list[FunctionTool]) -> tuple[ToolFormat | None, dict[str, Any] | None]:
    """Returns how the calls of the answer are read, and the structured output that forces them. Raises ``ApiError`` for a choice that cannot be met."""
    choice = body.tool_choice
    if choice == "none" or (choice is None and not tools):
        return None, None
    if not tools:
        raise invalid("'tool_choice' is given without 'tools'; give the tools that the model may call", "tool_choice")
    if choice in (None, "auto"):
        if not state.settings.enable_auto_tool_choice:
            raise invalid("the model cannot choose tools here: start the server with --enable-auto-tool-choice and --tool-call-parser", "tool_choice")
        return TOOL_FORMATS[state.settings.tool_call_parser or ""], None
    if structured_outputs(body) is not None or (body.response_format is not None and body.response_format.type != "text"):
        raise invalid("'tool_choice' asks for a call and another field for an answer of a given format; give one", "tool_choice")
    if isinstance(choice, NamedTool):
        named = next((tool for tool in tools if tool.name == choice.function.name), None)
        if named is None:
            raise invalid(f"'tool_choice' names {choice.function.name[:100]!r}, which is none of the tools", "tool_choice")
        return arguments_of(named.name), {"json": arguments_schema(named)}
    return ToolFormat(list_of_calls), {"json": calls_schema(tools, body.parallel_tool_calls is False)}
