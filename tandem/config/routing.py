"""The settings by which ``tandem gateway`` chooses a backend."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What is weighed against a backend's outstanding tokens. Weights are tokens of load that a token is worth: with 1 a token that need not be computed is
    as good as one less to wait for, or two at a backend that has other requests; no preference leads into an overloaded backend. 0 turns a part off."""

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

    prefill_apart: Literal["auto", "always", "never"] = "auto"
    """Whether long prompts are computed at a backend with `tandem serve --role prefill`: where it pays, by the speeds that the servers have measured and
    the streams that would wait; always; or never."""
    prefill_apart_tokens: int = 256
    """Tokens of a prompt, without those that the backend has cached, from which on it may be computed apart."""

    def check(self) -> None:
        if not 1 <= self.prefill_apart_tokens <= 10**9:
            raise UserError(f"'router.prefill_apart_tokens' is {self.prefill_apart_tokens}; it must be from 1 to 1000000000")
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


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """A model that takes a share of the requests for another name."""

    model: str
    """Its name at the backends; with `registry` also `NAME@production` or `models/NAME@staging`, which is the version NAME/NUMBER in that stage."""
    share: float = 1.0
    """Its share of the requests, beside the shares of the other targets; of a shadow, the part of all requests that it is sent too."""


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """Where the requests for a name go: a canary is a target with a small share."""

    targets: tuple[RouteTarget, ...]
    """The models that answer. A session stays at its target; the share of one without a ready backend is divided among the others."""
    shadows: tuple[RouteTarget, ...] = ()
    """Models that are sent a copy; their answers are read and discarded, count in no limit and delay nobody."""

    def check(self) -> None:
        if not self.targets:
            raise UserError("a route has no 'targets'; give at least one model")
        for kind, targets, most in (("targets", self.targets, 10**6), ("shadows", self.shadows, 1)):
            for target in targets:
                if not target.model:
                    raise UserError(f"'{kind}' of a route has an entry without a model; name one")
                if not 0 < target.share <= most:
                    raise UserError(f"'share' of {target.model} is {target.share:g}; it must be above 0 and at most {most}")
            names = [target.model for target in targets]
            if len(set(names)) < len(names):
                raise UserError(f"'{kind}' of a route has a model twice; add up their shares")


def check_routes(routes: Mapping[str, RouteConfig]) -> None:
    """Raises ``UserError`` for a route that leads to another one."""
    for name, route in routes.items():
        for target in (*route.targets, *route.shadows):
            if target.model != name and target.model in routes:
                raise UserError(f"the route '{name}' leads to '{target.model}', which is a route itself; name the models of that one")
