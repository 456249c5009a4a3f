"""Backends and requests without a network, and a clock that is set."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tandem.config.gateway import BackendConfig, BreakerConfig
from tandem.gateway.backend import Backend, Health
from tandem.gateway.inference_request import InferenceRequest, read_request


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def backends(*weights: float, breaker: BreakerConfig | None = None, slow_start_s: float = 0.0, **fields: Any) -> list[Backend]:
    """Returns backends ``b0``, ``b1``, ... that are ready and serve ``m``."""
    configs = [BackendConfig(**{"url": f"http://b{i}:1", "weight": weight, "models": ("m",), **fields}) for i, weight in enumerate(weights)]
    made = [Backend.make(config, breaker or BreakerConfig(), slow_start_s=slow_start_s) for config in configs]
    for backend in made:
        backend.health = Health.READY
    return made


def request(
    prompt: Any = "x", max_tokens: int = 0, headers: Sequence[tuple[bytes, bytes]] = (), client: str = "", tenant: str = "", **fields: Any
) -> InferenceRequest:
    content = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, **fields}
    return read_request("id", "/v1/completions", b"", list(headers), b"{}", content, client, tenant=tenant, by_prefix=True)


def in_task(function: Callable[[], None]) -> None:
    """Runs ``function`` where attempts can be made: in a task."""

    async def run() -> None:
        function()

    asyncio.run(run())
