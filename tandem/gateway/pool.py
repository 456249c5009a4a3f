"""All backends: which of them can serve a request, and which gets it."""

import math
from collections.abc import Sequence
from typing import Protocol

from tandem.config.gateway import GatewayConfig
from tandem.gateway.backend import Backend
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.routing.filters import answering
from tandem.gateway.routing.prefix_index import PrefixIndex
from tandem.gateway.routing.router import Router
from tandem.serving.errors import ApiError, invalid, unavailable


class OwnServers(Protocol):
    """Servers of one model that the gateway starts itself."""

    @property
    def model(self) -> str: ...
    @property
    def are_resting(self) -> bool:
        """Whether none runs because nothing is asked for; the next request has one started."""
        ...

    def coming_s(self) -> float | None:
        """Returns in about how many seconds one is ready, 0 if that is not known; ``None`` if none comes. The caller has a request for it."""
        ...


class Pool:
    """The backends of a gateway, in the order of its file."""

    def __init__(self, config: GatewayConfig, backends: list[Backend]) -> None:
        self.backends = backends
        self._config, self._router = config, Router(config)
        self.own: Sequence[OwnServers] = ()
        """The servers that the gateway starts."""
        self._follows_cache = config.queue.follow_cache

    def follow(self, config: GatewayConfig) -> None:
        """Takes other settings; ``backends`` has changed where it is. What is known of prefixes stays."""
        if (config.balance, config.zone, config.router) != (self._config.balance, self._config.zone, self._config.router):
            self._router = Router(config, self._router.index)
        self._config, self._follows_cache = config, config.queue.follow_cache

    @property
    def models(self) -> tuple[str, ...]:
        """The models of all backends that are not down, each once."""
        return tuple(dict.fromkeys([*(servers.model for servers in self.own), *(model for backend in self.backends for model in backend.models)]))

    @property
    def is_ready(self) -> bool:
        return any(backend.is_ready for backend in self.backends) or any(servers.are_resting for servers in self.own)

    def weight_versions(self, model: str) -> list[str]:
        """Returns the versions of the weights that backends of ``model`` have, each once; none of those that do not say it."""
        return list(dict.fromkeys(backend.weights for backend in self._serving(model) if backend.weights is not None))

    def has_ready(self, model: str) -> bool:
        """Returns whether a backend that takes requests serves ``model``."""
        return bool(self._able(model))

    def check_model(self, model: str | None, routes: Sequence[str] = ()) -> None:
        """Raises ``ApiError`` for a model that no backend serves and that is none of ``routes``."""
        known = tuple(dict.fromkeys([*routes, *self.models]))
        if model is None:
            if len(known) > 1:
                raise invalid(f"'model' is missing; there is {', '.join(known)}", "model")
            return
        if model not in known:
            if not known:
                raise unavailable("no backend has said which models it serves yet", retry_after_s=2)
            names = ", ".join(known)
            raise ApiError(404, f"the model '{model[:100]}' is not served here; there is {names}", param="model", code="model_not_found")

    def check_context(self, request: InferenceRequest) -> None:
        """Raises ``ApiError`` for a prompt of token ids that is longer than the context of each backend that serves its model: waiting would not help. Other
        prompts are counted by the backend alone, and a backend that has not said how long its context is may have room."""
        if not request.longest_prompt:
            return
        serving = self._serving(request.model)
        model = request.model
        contexts = [max(each.contexts.values(), default=0) if model is None else each.contexts.get(model, 0) for each in serving]
        if contexts and all(0 < context < request.longest_prompt for context in contexts):
            raise invalid(f"the prompt has {request.longest_prompt} tokens; the longest context of the backends of this model has {max(contexts)}", "prompt")

    def choose(self, request: InferenceRequest, tried: Sequence[Backend] = (), weights: str | None = None) -> Backend | None:
        """Returns the backend for the next attempt of ``request``, ``None`` if none can take it. ``tried``: those that have failed it. ``weights``: the version
        that it must have, with which the answer has begun."""
        able = [backend for backend in self._able_for(request) if backend not in tried]
        return self._router.choose(request, able if weights is None else [backend for backend in able if backend.weights == weights])

    def has_other(self, request: InferenceRequest, tried: Sequence[Backend]) -> bool:
        """Returns whether a server that is not one of ``tried`` can take ``request``."""
        return any(backend not in tried or backend.config.replicated for backend in self._able_for(request))

    @property
    def index(self) -> PrefixIndex | None:
        """What backends have in their prefix caches, if it is asked for."""
        return self._router.index

    def sent(self, request: InferenceRequest, backend: Backend) -> int:
        """Notes that ``request`` goes to ``backend``; returns how many tokens of its prompt are probably computed there already."""
        return self._router.sent(request, backend)

    def room(self, request: InferenceRequest, tokens_before: int = 0) -> int | None:
        """Returns how many more requests those backends of the model of ``request`` can have at once whose KV cache has room for its prompt, after
        ``tokens_before``; ``None`` if no backend takes any."""
        able = self._able_for(request)
        new = self._router.new_tokens
        fitting = [each for each in able if not self._follows_cache or each.has_cache_for(tokens_before + new(request, each))]
        return sum(max(0, each.room) for each in fitting) if able else None

    def coming_s(self, request: InferenceRequest) -> float | None:
        """Returns in about how many seconds a backend that is being started takes ``request``, 0 if one takes it now or that is not known; ``None`` if there
        is none and none comes."""
        if self._able_for(request):
            return 0.0
        if request.home:
            return None  # What it continues is not with another server.
        times = [seconds for servers in self.own if request.model in (servers.model, None) and (seconds := servers.coming_s()) is not None]
        return min(times, default=None)

    def first_byte_s(self, request: InferenceRequest) -> float:
        """Returns about how long a request that is sent now waits for the first byte of its answer; 0 while nothing is known."""
        return min((backend.first_byte_s(request.tokens) for backend in self._able_for(request)), default=0.0)

    def refusal(self, model: str | None) -> ApiError:
        """Returns the error of a request for ``model`` that no backend can take, with the time until one may."""
        serving = [backend for backend in self._serving(model) if backend.is_ready]
        if not serving:
            return unavailable("no backend of this model is ready", retry_after_s=2)
        seconds = min(backend.breaker.opens_in_s for backend in serving)
        return unavailable("the backends of this model fail; they are tried again shortly", retry_after_s=max(1, math.ceil(seconds)))

    def _able_for(self, request: InferenceRequest) -> list[Backend]:
        able, home, weights = list(answering(self._able(request.model))), request.home, request.weights
        if not home and not weights:
            return able
        return [backend for backend in able if (not home or backend.name == home) and (not weights or backend.weights == weights)]

    def _able(self, model: str | None) -> list[Backend]:
        return [backend for backend in self._serving(model) if backend.is_ready and backend.breaker.allows()]

    def _serving(self, model: str | None) -> list[Backend]:
        return [backend for backend in self.backends if model is None or model in backend.models]
