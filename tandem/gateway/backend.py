"""One server behind the gateway: what it is doing for us, and whether it can do more."""

import asyncio
import enum
import itertools
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.config.gateway import BackendConfig, BreakerConfig
from tandem.gateway.breaker import Breaker, Outcome, Pass
from tandem.gateway.speed import Speed

_order = itertools.count(1)
_LEAST_SHARE = 0.1
"""Of its weight, with which a backend comes back."""


class Health(enum.Enum):
    """What the probes say."""

    UNKNOWN = "unknown"
    """It was not probed yet."""
    READY = "ready"
    NOT_READY = "not_ready"
    """It answers that it takes no requests: it loads, drains or sleeps."""
    DOWN = "down"
    """It does not answer."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What a Tandem server said of its engines, in tokens. ``free_tokens``: room of the KV cache that no request holds. ``waiting``: requests that have no
    place in a step. ``waiting_tokens``: of the prompts without a token of their answer; ``oldest_s``: how long the oldest of them waits, if any does."""

    cache_tokens: int
    free_tokens: int
    waiting: int
    waiting_tokens: int
    oldest_s: float = 0.0
    role: str = "both"
    """``prefill``: it computes prompts for others, and answers itself only if no other server can; as it says itself."""
    sends: bool = False
    """Whether other servers can fetch the KV blocks of its prompts; ``receives``: whether it fetches those of others."""
    receives: bool = False
    prefill_tokens_per_s: float = 0.0
    """As it has measured, 0 if it has not yet; ``transfer_tokens_per_s``: of prompts whose blocks it has fetched."""
    transfer_tokens_per_s: float = 0.0


@dataclass(eq=False)
class Backend:
    """A backend and its load. ``models``: those that it serves. ``weights``: the version of its weights (``INCARNATION.STEP``) if it is Tandem's server, whose
    random numbers depend on the request alone, else ``None``. ``restarts``: how often it was away and came back.
    ``last_taken``: grows with every attempt, so that equal loads alternate. ``slow_start_s``: time over which it is given its full share after it was away.
    ``tls``: as in ``backend_tls``. ``clock``: monotonic seconds."""

    config: BackendConfig
    breaker: Breaker
    api_key: str | None = None
    health: Health = Health.UNKNOWN
    models: tuple[str, ...] = ()
    contexts: dict[str, int] = field(default_factory=dict)
    """The tokens of the context of each model that says it."""
    weights: str | None = None
    restarts: int = 0
    outstanding_tokens: int = 0
    engine: EngineState | None = None
    """What it said last, if it is a Tandem server that answers."""
    looks: int = 0
    """How often it has said so."""
    unseen_tokens: int = 0
    """Tokens of the attempts that were begun since, and still run."""
    last_taken: int = 0
    attempts: "set[Attempt]" = field(default_factory=set)
    is_drained: bool = False
    """An administrator has taken it out: it finishes what it has and is given nothing new."""
    is_leaving: bool = False
    """The gateway itself has taken it out, as it ends or changes: it finishes what it has and is given nothing new."""
    slow_start_s: float = 0.0
    tls: ssl.SSLContext | bool = True
    clock: Callable[[], float] = time.monotonic
    speed: Speed = field(default_factory=Speed)
    _came_back_s: float | None = None

    @classmethod
    def make(
        cls, config: BackendConfig, breaker: BreakerConfig, api_key: str | None = None, slow_start_s: float = 0.0, tls: ssl.SSLContext | bool = True
    ) -> "Backend":
        return cls(config, Breaker(breaker), api_key, models=config.models, slow_start_s=slow_start_s, tls=tls)

    @property
    def name(self) -> str:
        return self.config.label

    @property
    def is_ready(self) -> bool:
        """Whether it is given requests, as far as its probes and administrators say."""
        return self.health is Health.READY and not self.is_drained and not self.is_leaving

    @property
    def is_tandem(self) -> bool:
        return self.weights is not None

    @property
    def role(self) -> str:
        """What it does among servers that exchange KV blocks: as the settings say, or as it says itself."""
        return self.config.role or (self.engine.role if self.engine is not None else "both")

    @property
    def capacity(self) -> float:
        """Its weight; a part of it, which grows from a tenth, for ``slow_start_s`` after it has come back."""
        weight = self.config.weight
        if self._came_back_s is None:
            return weight
        share = (self.clock() - self._came_back_s) / self.slow_start_s
        if share >= 1:
            self._came_back_s = None
        return weight * min(1.0, max(_LEAST_SHARE, share))

    def came_back(self) -> None:
        """Begins its slow start: it takes requests again after it took none."""
        self._came_back_s = self.clock() if self.slow_start_s else None

    @property
    def load(self) -> float:
        """Outstanding tokens for each unit of its capacity."""
        return self.outstanding_tokens / self.capacity

    @property
    def room(self) -> int:
        """How many more requests it can have at once; below 0 where retries have found no other place."""
        return self.config.max_requests - len(self.attempts)

    def said(self, state: EngineState) -> None:
        """Notes what it says of its engines."""
        self.engine, self.unseen_tokens = state, 0
        self.looks += 1

    def has_cache_for(self, tokens: int) -> bool:
        """Returns whether its KV cache has room for ``tokens`` more tokens, beside all that waits for room there. A request for which it never has room
        is for its engine to refuse, so one goes there while nothing else does."""
        state = self.engine
        if state is None or not self.attempts:
            return True
        return state.free_tokens - (state.waiting_tokens if state.waiting else 0) - self.unseen_tokens >= tokens

    def first_byte_s(self, tokens: int) -> float:
        """Returns about how long a request of ``tokens`` tokens would wait for the first byte of its answer; 0 while nothing is known."""
        return self.speed.seconds(self.outstanding_tokens + tokens)

    def take(self, tokens: int, task: "asyncio.Task[Any] | None" = None) -> "Attempt":
        """Begins an attempt that costs about ``tokens`` tokens. Its breaker must allow one. ``task``: that which makes it; ``None``: the current one."""
        return Attempt(self, self.breaker.take(), tokens, task)


class Attempt:
    """One request at one backend. It counts in the backend's load from its beginning until ``release``, whatever happens to it.

    ``waiting_since``: monotonic time since when the backend owes us something, ``None`` while it does not. ``has_begun``: the answer has begun.
    """

    def __init__(self, backend: Backend, given: Pass, tokens: int, task: "asyncio.Task[Any] | None" = None) -> None:
        self.backend, self.tokens = backend, tokens
        self.waiting_since: float | None = None
        self.has_begun = False
        self.deadline: float | None = None
        """Monotonic time until which the answer must have begun."""
        self.given_up: str | None = None
        """Why the gateway no longer waits for the backend."""
        self.is_late = False
        """The deadline has passed."""
        self._pass = given
        self._task = asyncio.current_task() if task is None else task
        backend.outstanding_tokens += tokens
        self._size, self._look = tokens, backend.looks
        self._ahead, self._began_s = backend.outstanding_tokens, backend.clock()
        backend.unseen_tokens += tokens
        backend.last_taken = next(_order)
        backend.attempts.add(self)

    def answered(self, *, is_success: bool = True) -> None:
        """Notes that the answer has begun."""
        if not self.has_begun and is_success:
            self.backend.speed.note(self._ahead, self.backend.clock() - self._began_s)
        self.has_begun = True

    def done(self, tokens: int) -> None:
        """Takes ``tokens`` of the work that is done off the load."""
        tokens = min(tokens, self.tokens)
        self.tokens -= tokens
        self.backend.outstanding_tokens -= tokens

    def give_up(self, why: str, *, is_late: bool = False) -> None:
        """Ends the wait for the backend: the task that made the attempt is cancelled, and finds the reason in ``given_up``. ``is_late``: it is the client's
        deadline, and not the backend's fault."""
        if self.given_up is None and self._task is not None:
            self.given_up, self.is_late = why, is_late
            self._task.cancel()

    def release(self) -> None:
        """Takes the attempt out of the load; calling it again changes nothing."""
        if self in self.backend.attempts:
            self.backend.attempts.remove(self)
            self.done(self.tokens)
            if self._look == self.backend.looks:
                self.backend.unseen_tokens -= self._size

    def report(self, outcome: Outcome) -> None:
        """Tells the breaker, once, what the attempt says about the backend. A failure of one of several servers says nothing about the others."""
        if outcome is Outcome.FAILURE and self.backend.config.replicated:
            outcome = Outcome.UNKNOWN
        breaker = self.backend.breaker
        was_closed = breaker.is_closed
        breaker.report(self._pass, outcome)
        if breaker.is_closed and not was_closed:
            self.backend.came_back()
