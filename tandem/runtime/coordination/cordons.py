"""Cordoned nodes, as ``kubectl cordon``: a key for each under ``cordons/`` of a run, or of all runs of a cluster. A run takes in no pod on such a node."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tandem.config.coordination import CoordinationConfig
from tandem.runtime.coordination.store import Store

CORDONS = "cordons/"
_CLUSTER = "@cluster"
"""In place of a run's name, which cannot begin so: the keys that all runs of a prefix share."""


@dataclass(frozen=True, slots=True)
class Cordon:
    """``node`` takes no pod, for ``reason``, one line. ``by``: the run or the person that cordoned it. ``at``: Unix time in seconds."""

    node: str
    reason: str
    by: str = ""
    at: float = 0.0


def cluster_prefix(config: CoordinationConfig) -> str:
    """Returns the beginning of the keys that all runs with this ``coordination.prefix`` share."""
    return f"{config.prefix.rstrip('/')}/{_CLUSTER}/"


def cordon(store: Store, node: str, reason: str, by: str = "") -> Cordon:
    """Cordons ``node``: for a run with that run's ``store``, for all runs with that of the cluster. The first reason is kept. Returns the cordon that holds."""
    held = cordons(store).get(node)
    if held is not None:
        return held
    made = Cordon(node, " ".join(reason.split()), by, time.time())
    store.put(CORDONS + node, json.dumps(asdict(made)).encode())
    return made


def uncordon(store: Store, node: str) -> bool:
    """Lets ``node`` take pods again. Returns whether it was cordoned."""
    return store.delete(CORDONS + node)


def cordons(store: Store) -> Mapping[str, Cordon]:
    """Returns the cordons in ``store``, by node. An entry that is damaged still holds."""
    found = {}
    for entry in store.list(CORDONS):
        node = entry.key.removeprefix(CORDONS)
        try:
            told = json.loads(entry.value)
            found[node] = Cordon(node, str(told["reason"]), str(told["by"]), float(told["at"]))
        except (ValueError, TypeError, KeyError):
            found[node] = Cordon(node, "its entry in the store is damaged")
    return found
