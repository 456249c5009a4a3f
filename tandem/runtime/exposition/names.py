"""The Prometheus names of the keys of ``metrics.jsonl``."""

import re

PREFIX = "tandem_"


def metric_name(key: str) -> str:
    """Returns the name of the metric that has the newest value of ``key``: ``actor/grad_norm`` is ``tandem_actor_grad_norm``. Every run of other characters
    than letters, digits and ``_`` becomes one ``_``."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]+", "_", key)
