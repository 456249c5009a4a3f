"""OpenAI's completions as agents call them."""

from collections.abc import Iterator
from typing import Any

from tandem.rl.agents.chat_completions import FORMATS, finish_reason, refuse_unknown, usage
from tandem.rl.agents.model_calls import ModelCall
from tandem.rl.agents.session import Asked, Session
from tandem.serving.errors import invalid
from tandem.serving.protocol import CompletionRequest


class AgentCompletionRequest(CompletionRequest):
    """``temperature`` and the other fields that say how tokens are drawn are not read, as in ``AgentChatRequest``."""

    def check(self) -> None:
        """Raises ``ApiError`` for a field that asks for what an episode cannot have."""
        super().check()
        refuse_unknown(self, "logprobs", "logit_bias", *FORMATS, "echo", "prompt_logprobs")
        if not isinstance(self.prompt, str) and (not self.prompt or not isinstance(self.prompt[0], int)):
            raise invalid("'prompt' must be one text or one list of token ids; an agent gets one answer to each request of an episode", "prompt")
        if not self.max_tokens:
            raise invalid("'max_tokens' must be at least 1", "max_tokens")

    def ask(self, session: Session) -> Asked:
        """Returns the request to the model of ``session``. Raises ``UserError``, ``TooLong`` and ``SessionEnded``."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        prompt: Any = self.prompt
        return session.ask_text(prompt, self.max_tokens, stop)


def completion(call: ModelCall, id: str, model: str, created: int) -> dict[str, Any]:
    """Returns the object ``text_completion`` with the answer of ``call``."""
    choice = {"index": 0, "text": call.text, "logprobs": None, "finish_reason": finish_reason(call)}
    return {"id": id, "object": "text_completion", "created": created, "model": model, "choices": [choice], "usage": usage(call)}


def completion_chunks(call: ModelCall, id: str, model: str, created: int, include_usage: bool) -> Iterator[dict[str, Any]]:
    """Yields the parts of a stream with the answer of ``call``, which is complete when they are sent."""
    whole = completion(call, id, model, created)
    yield {**whole, "usage": None}
    if include_usage:
        yield {**whole, "choices": []}
