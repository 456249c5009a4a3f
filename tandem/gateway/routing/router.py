"""Which backend gets a request: filter, score, pick."""

import random
from collections.abc import Sequence

from tandem.config.gateway import GatewayConfig
from tandem.gateway.backend import Backend
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.routing import pickers, scores
from tandem.gateway.routing.filters import Filter, in_time, with_room
from tandem.gateway.routing.prefix_index import PrefixIndex


class Router:
    """The pipeline of a gateway's settings. ``index``: what backends have cached, if it is asked for; given, it is that of a router before."""

    def __init__(self, config: GatewayConfig, index: PrefixIndex | None = None) -> None:
        settings = config.router
        self.index = (PrefixIndex() if index is None else index) if settings.prefix else None
        self._filters: tuple[Filter, ...] = (with_room, in_time)
        costs = [scores.load, *([scores.away_from(config.zone, settings.zone_tokens)] if settings.zone_tokens else [])]
        costs += [scores.displaced_prefix(self.index, settings.prefix)] if self.index is not None else []
        savings = [(settings.prefix, scores.cached_prefix(self.index))] if self.index is not None else []
        savings += [(settings.session, scores.session)] if settings.session else []
        self._score = scores.work_before(costs, savings)
        self._pick = _picker(config)

    def choose(self, request: InferenceRequest, backends: Sequence[Backend]) -> Backend | None:
        """Returns the one of ``backends``, which can all serve ``request``, that gets it; ``None`` if there is none."""
        if not backends:
            return None
        for narrow in self._filters:
            backends = narrow(request, backends)
        return self._pick(request, backends, self._score(request, backends))

    def new_tokens(self, request: InferenceRequest, backend: Backend) -> int:
        """Returns how many tokens of the prompt ``backend`` probably does not have in its KV cache yet."""
        cached = self.index.cached_tokens(request.prefix, backend) if self.index is not None and request.prefix else 0
        return max(0, request.prompt_tokens - cached)

    def sent(self, request: InferenceRequest, backend: Backend) -> int:
        """Notes that ``backend`` computes the prompt of ``request``, so that the next one that begins alike finds it there; returns how many of its tokens
        are probably there already, and are no work."""
        if self.index is None or not request.prefix:
            return 0
        cached = self.index.cached_tokens(request.prefix, backend)
        self.index.add(request.prefix, backend, request.id, request.block_share)
        return cached


def reads_prefix(config: GatewayConfig) -> bool:
    """Returns whether the blocks of prompts are looked at."""
    return config.router.prefix > 0 or config.balance == "consistent_hash"


def _picker(config: GatewayConfig) -> pickers.Picker:
    made = {
        "least_tokens": lambda: pickers.least,
        "power_of_two": lambda: pickers.power_of_two(random.Random()),
        "round_robin": pickers.round_robin,
        "consistent_hash": lambda: pickers.consistent_hash(config.router.hash_bound),
    }
    return made[config.balance]()
