"""The settings by which ``tandem gateway`` chooses a backend."""

from dataclasses import dataclass

from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What is weighed against a backend's outstanding tokens. Weights are tokens of load that a token is worth: with 1 a token that need not be computed is
    as good as one that nobody waits for, and no preference leads into an overloaded backend. 0 turns a part off."""

    prefix: float = 0.0
    """Worth of a token of the prompt that the backend has probably in its prefix cache."""
    session: float = 0.0
    """Worth of a token of the prompt at the backend of the request's session: header `X-Session-Id`, or `session_id`, `prompt_cache_key` or `user` of the
    body."""
    zone_tokens: int = 0
    """Tokens by which a backend in the gateway's `zone` may have more to do than one elsewhere before that one is taken."""
    hash_bound: float = 0.25
    """With `balance: consistent_hash`: how far above its share of the load a backend is used before its requests go to the next one; 0.25 is 25 %."""
    slow_start_s: float = 0.0
    """Time over which a backend that comes back is given its full share, from a tenth of it: its caches are cold. 0: at once."""

    def check(self) -> None:
        for name in ("prefix", "session"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"'router.{name}' is {getattr(self, name):g}; it must be from 0 to 1, as no more than the prompt can be saved")
        if not 0 <= self.zone_tokens <= 10**9:
            raise UserError(f"'router.zone_tokens' is {self.zone_tokens}; it must be from 0 to 1000000000")
        if not 0 < self.hash_bound <= 100:
            raise UserError(f"'router.hash_bound' is {self.hash_bound:g}; it must be above 0 and at most 100")
        if not 0 <= self.slow_start_s <= 86_400:
            raise UserError(f"'router.slow_start_s' is {self.slow_start_s:g}; it must be from 0 to 86400")

    def check_read(self, balance: str, zone: str) -> None:
        """Raises ``UserError`` for a key that has no effect with ``balance`` and the gateway's ``zone``."""
        if balance in ("round_robin", "consistent_hash"):
            reason = f"balance: {balance} weighs nothing"
            refuse_unread("router", self, reason, "prefix", "session", "zone_tokens", fix="take balance: least_tokens or power_of_two")
        if balance != "consistent_hash":
            refuse_unread("router", self, f"balance is {balance}", "hash_bound", fix="set balance: consistent_hash")
        if not zone:
            refuse_unread("router", self, "the gateway's own zone is not known", "zone_tokens", fix="set zone")
