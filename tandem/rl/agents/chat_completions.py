"""OpenAI's chat completions as agents call them: the body of a request, and the answer, whole or as a stream."""

from collections.abc import Iterator
from typing import Any

from tandem.rl.agents.model_calls import ModelCall
from tandem.rl.agents.session import Asked, Session
from tandem.rl.agents.whole_answers import answer_of
from tandem.serving.errors import invalid
from tandem.serving.forms.chat import chat_message
from tandem.serving.protocol import ChatCompletionRequest, OpenAIFields

FORMATS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""The fields that ask for an answer of a given format."""


class AgentChatRequest(ChatCompletionRequest):
    """The fields that say how tokens are drawn (``temperature``, ``top_p``, ``seed`` and others) are accepted and not read: the run's are used, because it
    learns from the distribution that it drew from."""

    not_supported = ("functions", "function_call", "audio", "prediction", "web_search_options")

    def check(self) -> None:
        """Raises ``ApiError`` for a field that asks for what an episode cannot have."""
        super().check()
        refuse_unknown(self, "logprobs", "logit_bias", *FORMATS, "prompt_logprobs")
        if self.response_format is not None and self.response_format.type != "text":
            raise invalid("'response_format' is not supported in an episode, whose tokens are drawn freely; leave it out", "response_format")
        if self.tool_choice not in (None, "auto", "none"):
            raise invalid("'tool_choice' must be auto or none: an episode's tokens are drawn freely", "tool_choice")

    def ask(self, session: Session) -> Asked:
        """Returns the request to the model of ``session``. Raises ``UserError``, ``TooLong`` and ``SessionEnded``."""
        longest = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        tools = [] if self.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools or []]
        return session.ask([message.model_dump(exclude_unset=True) for message in self.messages], tools, longest, stop)


def refuse_unknown(body: OpenAIFields, *names: str) -> None:
    """Raises ``ApiError`` for fields ``names`` that are given, and for several answers to one request."""
    for name in names:
        if getattr(body, name):
            raise invalid(f"'{name}' is not supported in an episode; leave it out", name)
    if max(body.n or 1, body.best_of or 1) > 1:
        raise invalid("'n' is more than 1; an agent gets one answer to each request of an episode", "n")


def chat_completion(call: ModelCall, id: str, model: str, created: int) -> dict[str, Any]:
    """Returns the object ``chat.completion`` with the answer of ``call``."""
    message = {**chat_message(answer_of(call)), "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(call)}
    return {"id": id, "object": "chat.completion", "created": created, "model": model, "choices": [choice], "usage": usage(call)}


def chat_chunks(call: ModelCall, id: str, model: str, created: int, include_usage: bool) -> Iterator[dict[str, Any]]:
    """Yields the objects ``chat.completion.chunk`` of the answer of ``call``, which is complete when they are sent."""
    head = {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}
    message = chat_completion(call, id, model, created)["choices"][0]["message"]
    delta = {name: value for name, value in message.items() if name != "refusal"}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **each} for number, each in enumerate(delta["tool_calls"])]
    yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason(call)}]}
    if include_usage:
        yield {**head, "choices": [], "usage": usage(call)}


def usage(call: ModelCall) -> dict[str, int]:
    """Returns the numbers of tokens that were read and sampled."""
    return {"prompt_tokens": len(call.prompt), "completion_tokens": len(call.token_ids), "total_tokens": len(call.prompt) + len(call.token_ids)}


def finish_reason(call: ModelCall) -> str:
    """Returns why the answer ended, as OpenAI names it."""
    if call.tool_calls:
        return "tool_calls"
    return "length" if call.finish_reason == "length" else "stop"
