"""Anthropic's messages as agents call them."""

from tandem.rl.agents.session import Asked, Session
from tandem.serving.errors import invalid
from tandem.serving.forms.anthropic import MessagesBody


class AgentMessagesRequest(MessagesBody):
    """``temperature``, ``top_p`` and ``top_k`` are not read, as in ``AgentChatRequest``; neither is ``thinking``, which the model's template decides."""

    def check(self) -> None:
        """Raises ``ApiError`` for a field that asks for what an episode cannot have."""
        super().check()
        if self.tool_choice is not None and self.tool_choice.get("type") not in ("auto", "none"):
            raise invalid("'tool_choice.type' must be auto or none: an episode's tokens are drawn freely", "tool_choice")

    def ask(self, session: Session) -> Asked:
        """Returns the request to the model of ``session``. Raises ``ApiError``, ``UserError``, ``TooLong`` and ``SessionEnded``."""
        return session.ask(*self.chat(), self.max_tokens, self.stop_sequences or [])
