"""How many replicas there should be: the gateway's rule, asked by Ray Serve."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tandem.config.load import build
from tandem.config.servers import ScaleConfig
from tandem.gateway.servers.autoscale import Load, Since, decide


class QueuePolicy:
    """A policy of Serve (``AutoscalingPolicy.policy_function``). ``scale``: as ``ScaleConfig``; ``max_requests``: that each replica has at once."""

    def __init__(self, scale: Mapping[str, Any], max_requests: int) -> None:
        self._scale, self._max_requests = build(ScaleConfig, scale, "servers.scale"), max_requests

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas and the state with which it is asked the next time."""
        now = float(context.current_time or time.time())
        state = dict(context.policy_state or {})
        since = Since(**{name: state[name] for name in ("late_s", "oldest_s", "low_s") if name in state})
        queued_s = state.get("queued_s")
        # Requests that wait for a replica wait outside of every engine, and Serve does not say for how long.
        queued = int(context.total_queued_requests or 0)
        queued_s = (now if queued_s is None else queued_s) if queued else None
        load = Load(
            now, waiting=queued + int(_newest(context, "waiting", sum)), oldest_s=max(_newest(context, "oldest_waiting_s", max), now - (queued_s or now)),
            in_flight=int(context.total_num_requests or 0), count=context.target_num_replicas,
            loading=max(0, context.target_num_replicas - len(context.running_replicas)),
        )  # fmt: skip
        since, decision = decide(self._scale, self._max_requests, since, load)
        return context.target_num_replicas if decision is None else decision.count, {**asdict(since), "queued_s": queued_s}


def _newest(context: Any, name: str, over: Any) -> float:
    """Returns the newest value of a metric of the replicas, over all of them."""
    series = (context.raw_metrics or {}).get(name, {})
    values = [float(points[-1].value) for replica, points in series.items() if points and replica in context.running_replicas]
    return float(over(values)) if values else 0.0
