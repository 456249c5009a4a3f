"""The section ``hedge`` of a gateway's file."""

from dataclasses import dataclass

from tandem.config.limits import MOST_SECONDS
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class HedgeConfig:
    """A second attempt at another backend for a short request that takes unusually long; the first answer is the client's, and the other attempt is cancelled.
    Only requests that are not streamed and whose answer is the same wherever it is computed: with `temperature` 0 or a `seed`, or with an `Idempotency-Key` at
    Tandem's servers."""

    share: float = 0.0
    """Second attempts for each such request on average, at most. 0: none is made."""
    after_s: float = 0.0
    """Time after which the second attempt is made. 0: the time in which 95 % of the newest such requests for the model were answered."""
    max_tokens: int = 64
    """Tokens that the answer may have at most; a request with a higher limit, or a chat with none, is not asked for twice."""

    def check(self) -> None:
        if not 0 <= self.share <= 0.5:
            raise UserError(f"'hedge.share' is {self.share:g}; it must be from 0 to 0.5, half as many attempts as requests")
        if not 0 <= self.after_s <= MOST_SECONDS:
            raise UserError(f"'hedge.after_s' is {self.after_s:g}; it must be from 0 to {MOST_SECONDS} seconds")
        if self.max_tokens < 1:
            raise UserError(f"'hedge.max_tokens' is {self.max_tokens}; it must be at least 1")
        if not self.share:
            refuse_unread("hedge", self, "hedge.share is 0", "after_s", "max_tokens", fix="set hedge.share, for example to 0.05")
