"""OpenAI's responses as agents call them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.rl.agents.model_calls import ModelCall
from tandem.rl.agents.session import Asked, Session
from tandem.serving.errors import invalid
from tandem.serving.forms.responses import ResponsesBody


class AgentResponsesRequest(ResponsesBody):
    """``temperature``, ``top_p`` and ``reasoning`` are not read, as in ``AgentChatRequest``. ``previous_response_id``: of a response of this episode."""

    not_supported = (*ResponsesBody.not_supported, "include", "top_logprobs")

    def check(self) -> None:
        """Raises ``ApiError`` for a field that asks for what an episode cannot have."""
        super().check()
        if self.tool_choice not in (None, "auto", "none"):
            raise invalid("'tool_choice' must be auto or none: an episode's tokens are drawn freely", "tool_choice")
        if ((self.text or {}).get("format") or {"type": "text"}).get("type") != "text":
            raise invalid("'text.format' is not supported in an episode, whose tokens are drawn freely; leave it out", "text")

    def ask(self, session: Session) -> Asked:
        """Returns the request to the model of ``session``. Raises ``ApiError``, ``UserError``, ``TooLong`` and ``SessionEnded``."""
        earlier: Sequence[Mapping[str, Any]] = []
        if self.previous_response_id is not None:
            named = session.response(self.previous_response_id)
            if named is None:
                raise invalid("'previous_response_id' names no response of this episode", "previous_response_id")
            earlier = named
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        functions = [] if self.tool_choice == "none" else self.functions()
        return session.ask([*instructions, *earlier, *self.new_messages()], functions, self.max_output_tokens)

    def conversation(self, call: ModelCall) -> list[Mapping[str, Any]]:
        """Returns the messages that a request continues which names the answer of ``call`` to this request: all but the instructions, which OpenAI does not
        carry over either."""
        return [*call.messages, call.answer][1 if self.instructions else 0 :]
