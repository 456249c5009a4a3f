"""Placement groups: one a pod, on one node. Runs in processes that are connected to Ray."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NAMESPACE = "tandem"
CONTROLLER = "controller"
_REMOVED_S = 10.0


def group_name(job: str, role: str) -> str:
    """Returns the name of the placement group and of the actor of a job's ``role``: ``CONTROLLER`` or the name of a pod."""
    return f"{job}/{role}"


def make_group(job: str, role: str, bundle: Mapping[str, float], *, detached: bool) -> Any:
    """Returns a placement group with ``bundle`` on one node, as soon as there is room; that of an earlier life of the job where it has one. ``detached``: it
    stays when its maker ends."""
    name = group_name(job, role)
    with contextlib.suppress(ValueError):
        return get_placement_group(name)
    return placement_group([dict(bundle)], strategy="STRICT_PACK", name=name, lifetime="detached" if detached else None)


def in_group(group: Any, bundle: Mapping[str, float]) -> dict[str, Any]:
    """Returns the options of an actor that has all of ``group``, and is started again, on another node if need be, whenever it dies."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "memory": bundle.get("memory"), "resources": others, "max_restarts": -1,
        "namespace": NAMESPACE, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }  # fmt: skip


def groups_of(job: str) -> dict[str, tuple[str, str]]:
    """Returns of each role of ``job`` that has a placement group Ray's word for its state, and the name of its node, empty without one."""
    nodes = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    found = {}
    for facts in ray.util.placement_group_table().values():
        owner, _, role = facts["name"].rpartition("/")
        if owner == job and facts["state"] != "REMOVED":
            node = next(iter(facts["bundles_to_node_id"].values()), "")
            found[role] = (facts["state"], nodes.get(node, "") if facts["state"] == "CREATED" else "")
    return found


def remove_groups(job: str, *, but: str = "") -> None:
    """Ends everything of ``job``, except the role ``but``: a placement group takes its actors with it."""
    ends = time.monotonic() + _REMOVED_S
    while (roles := [role for role in groups_of(job) if role != but]) and time.monotonic() < ends:
        for role in roles:
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(group_name(job, role)))
        time.sleep(0.05)
