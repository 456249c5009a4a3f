"""All backends: which of them can serve a request, and which gets it."""

import math
from collections.abc import Sequence

from tandem.config.gateway import GatewayConfig
from tandem.gateway.backend import Backend
from tandem.gateway.balancer import balancer
from tandem.gateway.prefix_index import Prefix, PrefixIndex, least_work
from tandem.serving.errors import ApiError, invalid, unavailable


class Pool:
    """The backends of a gateway, in the order of its file."""

    def __init__(self, config: GatewayConfig, backends: Sequence[Backend]) -> None:
        self.backends = list(backends)
        self._pick = balancer(config.balance)
        self._index = PrefixIndex() if config.balance == "prefix" else None

    @property
    def models(self) -> tuple[str, ...]:
        """The models of all backends that are not down, each once."""
        return tuple(dict.fromkeys(model for backend in self.backends for model in backend.models))

    @property
    def is_ready(self) -> bool:
        return any(backend.is_ready for backend in self.backends)

    def check_model(self, model: str | None) -> None:
        """Raises ``ApiError`` for a model that no backend serves."""
        known = self.models
        if model is None:
            if len(known) > 1:
                raise invalid(f"'model' is missing; there is {', '.join(known)}", "model")
            return
        if model not in known:
            if not known:
                raise unavailable("no backend has said which models it serves yet", retry_after_s=2)
            names = ", ".join(known)
            raise ApiError(404, f"the model '{model[:100]}' is not served here; there is {names}", param="model", code="model_not_found")

    def choose(self, model: str | None, tried: Sequence[Backend] = (), prefix: Prefix = ()) -> Backend | None:
        """Returns the backend for the next attempt of a request for ``model``, ``None`` if none can take it. ``tried``: those that have failed it.
        ``prefix``: the blocks of its prompt."""
        able = [backend for backend in self._able(model) if backend not in tried]
        # A retry finds a place beside those that have theirs; there are few.
        free = [backend for backend in able if backend.room > 0]
        if able and prefix and self._index is not None:
            return least_work(self._index, prefix, free or able)
        return self._pick(free or able) if able else None

    def send(self, prefix: Prefix, backend: Backend) -> int:
        """Notes that ``backend`` computes a prompt with ``prefix``, so that the next one that begins alike finds it there; returns how many of its tokens
        are probably there already, and are no work."""
        if not prefix or self._index is None:
            return 0
        cached = self._index.cached_tokens(prefix, backend)
        self._index.add(prefix, backend)
        return cached

    def choose_same(self, weights: str | None, model: str | None, tried: Sequence[Backend]) -> Backend | None:
        """Returns the backend at which a stream that began under the version ``weights`` can go on, ``None`` if there is none."""
        able = [backend for backend in self._able(model) if backend not in tried and backend.weights == weights]
        return self._pick(able) if weights is not None and able else None

    def room(self, model: str | None) -> int | None:
        """Returns how many more requests for ``model`` its backends can have at once, ``None`` if no backend takes any."""
        able = self._able(model)
        return sum(max(0, backend.room) for backend in able) if able else None

    def refusal(self, model: str | None) -> ApiError:
        """Returns the error of a request for ``model`` that no backend can take, with the time until one may."""
        serving = [backend for backend in self._serving(model) if backend.is_ready]
        if not serving:
            return unavailable("no backend of this model is ready", retry_after_s=2)
        seconds = min(backend.breaker.opens_in_s for backend in serving)
        return unavailable("the backends of this model fail; they are tried again shortly", retry_after_s=max(1, math.ceil(seconds)))

    def _able(self, model: str | None) -> list[Backend]:
        return [backend for backend in self._serving(model) if backend.is_ready and backend.breaker.allows()]

    def _serving(self, model: str | None) -> list[Backend]:
        return [backend for backend in self.backends if model is None or model in backend.models]
