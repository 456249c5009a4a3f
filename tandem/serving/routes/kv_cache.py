"""``GET /kv_cache``: what a router wants to know of a server's engines, at the cost of a probe."""

import time
from typing import Any

from fastapi import APIRouter

from tandem.serving.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["probes"])

    @routes.get("/load")
    async def load() -> dict[str, int]:
        """The requests that are in flight besides this one, as vLLM's servers say."""
        return {"server_load": state.open_requests - 1}

    @routes.get("/kv_cache")
    async def kv_cache(stream: str = "", after: int = 0) -> dict[str, Any]:
        """The KV cache and the queue of all engines together: ``blocks`` of ``block_size`` tokens, of which ``free_blocks`` are held by no request;
        ``running`` and ``waiting`` sequences; ``waiting_tokens``: of the prompts that have no token of their answer yet; ``oldest_waiting_s``: how long the
        oldest of them has waited, 0 while none waits; ``role``, and whether KV blocks are sent and received; ``prefill_tokens_per_s`` and
        ``transfer_tokens_per_s`` as measured (0: not yet). With ``--kv-events`` also
        ``events``: what entered and left the prefix cache after number ``after`` of ``stream``."""
        pool, transfers = state.pool, state.kv_transfers
        blocks = (0 if pool.info is None else pool.info.num_blocks) * len(pool.slots)
        stats = [slot.stats for slot in pool.slots if slot.stats is not None and slot.is_ready]
        used = sum(each.kv_cache_usage for each in stats) / len(pool.slots)
        unanswered = [one for one in pool.streams if not one.last_output_s]
        waiting = sum(each.num_requests_waiting for each in stats)
        load = {
            "block_size": 0 if pool.info is None else pool.info.block_size, "blocks": blocks, "free_blocks": round(blocks * (1 - used)),
            "running": sum(each.num_requests_running for each in stats), "waiting": waiting,
            "waiting_tokens": sum(len(one.request.prompt_token_ids) for one in unanswered),
            "oldest_waiting_s": max((time.monotonic() - one.started_s for one in unanswered), default=0.0) if waiting else 0.0,
            "role": transfers.settings.role, "sends": transfers.exports is not None, "receives": transfers.imports is not None,
            "prefill_tokens_per_s": round(pool.prefill_rate.per_s, 1),
            "transfer_tokens_per_s": 0.0 if transfers.imports is None else round(transfers.imports.rate.per_s, 1),
        }  # fmt: skip
        return load if pool.block_events is None else load | pool.block_events.since(stream, after)

    return routes
