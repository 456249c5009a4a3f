"""The process that talks to Ray for the launcher: ``python -m tandem.cluster.launch.ray.driver ADDRESS``. It connects, reads a request from standard input, as
JSON, and prints the answer, or ``{"refused": LINE}``. The command itself does not connect to Ray, which takes over signals and logging of a process."""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray

from tandem.cluster.launch.ray.actors import RunActor
from tandem.cluster.launch.ray.node_checks import Asked, check_nodes
from tandem.cluster.launch.ray.placement import CONTROLLER, NAMESPACE, group_name, groups_of, in_group, make_group, remove_groups
from tandem.config.load import build
from tandem.config.ray import RayConfig
from tandem.types import UserError

_ANSWER_S, _START_S = 60.0, 120.0
_GIB = 2**30


def plan(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what each placement group of a run asks for, and the nodes with room for one. Raises ``UserError`` if they are too few, or do not have what the
    run needs."""
    config, most = build(RayConfig, request["ray"], "ray"), int(request["nodes"])
    ends = time.monotonic() + (_START_S if request["is_own"] else 0)
    # Those of a cluster that was started for the run come one after the other. Its head has no cores.
    alive = _alive()
    while sum("CPU" in node["Resources"] for node in alive) < most and time.monotonic() < ends:
        time.sleep(0.1)
        alive = _alive()
    asked = {"GPU": float(config.num_gpus), "memory": int(config.memory_gib * _GIB), **config.resources}
    asked = {name: amount for name, amount in asked.items() if amount}
    fitting = [node for node in alive if _fits(node, {**asked, "CPU": config.num_cpus or 1})]
    if not fitting:
        wanted = ", ".join(_described({**asked, "CPU": config.num_cpus or 1}))
        raise UserError(f"no node of the Ray cluster has {wanted}; lower what section 'ray' asks for, or add nodes ('ray status' shows what there is)")
    cpus = config.num_cpus or min(node["Resources"]["CPU"] for node in fitting)
    bundle = {"CPU": cpus, **asked}
    room = sum(_times(node, bundle) for node in fitting)
    if room < most:
        wanted = ", ".join(_described(bundle))
        raise UserError(f"'ray.nodes' is {most}, and the Ray cluster has room for {room} with {wanted} each; lower it, or add nodes ('ray status')")
    if not request["is_own"]:
        limit_s = float(request["max_clock_offset_s"]) if config.most_nodes > 1 else 0.0
        check_nodes(fitting, Asked(tuple(request["folders"]), tuple((str(host), int(port)) for host, port in request["ports"]), limit_s))
    return {"bundle": bundle, "nodes": [node["NodeName"] for node in fitting], "room": room}


def place(request: Mapping[str, Any]) -> dict[str, Any]:
    """Places the controller of a run, after the checks of ``plan``."""
    job = str(request["job"])
    try:
        ray.get_actor(group_name(job, CONTROLLER), namespace=NAMESPACE)
    except ValueError:
        pass
    else:
        raise UserError(f"job '{job}' is on this Ray cluster already; end it first, or choose another run.name")
    planned = plan(request)
    bundle = planned["bundle"]
    options = in_group(make_group(job, CONTROLLER, bundle, detached=True), bundle)
    actor = ray.remote(RunActor).options(name=group_name(job, CONTROLLER), lifetime="detached", **options)
    actor.remote(job, request["directory"], request["folder"], bundle, int(request["nodes"]))
    return planned


def status(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns of each role of a job the state of its placement group and its node."""
    return {"roles": groups_of(str(request["job"]))}


def stop(request: Mapping[str, Any]) -> dict[str, Any]:
    """Asks a job to stop, or ``now`` ends it."""
    job = str(request["job"])
    state, _ = groups_of(job).get(CONTROLLER, ("", ""))
    is_asked = False
    if state == "CREATED" and not request["now"]:
        _call(job, "stop")
        is_asked = True
    else:
        remove_groups(job)
    return {"is_asked": is_asked}


def scale(request: Mapping[str, Any]) -> dict[str, Any]:
    """Sets the number of placement groups of a job."""
    _call(str(request["job"]), "scale", int(request["nodes"]))
    return {}


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _call(job: str, method: str, *arguments: Any) -> None:
    try:
        actor = ray.get_actor(group_name(job, CONTROLLER), namespace=NAMESPACE)
        ray.get(getattr(actor, method).remote(*arguments), timeout=_ANSWER_S)
    except (ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"job '{job}' does not answer on Ray ({str(error).splitlines()[0]}); see 'tandem status', and try again") from None


def _fits(node: Mapping[str, Any], bundle: Mapping[str, float]) -> bool:
    return all(node["Resources"].get(name, 0) >= amount for name, amount in bundle.items())


def _times(node: Mapping[str, Any], bundle: Mapping[str, float]) -> int:
    """Returns how often ``bundle`` fits on a node."""
    return int(min(node["Resources"].get(name, 0) // amount for name, amount in bundle.items()))


def _described(bundle: Mapping[str, float]) -> list[str]:
    units = {"CPU": "cores", "GPU": "GPUs"}
    return [
        f"{amount / _GIB:g} GiB of memory" if name == "memory" else f"{amount:g} {units.get(name, f'of resource {name!r}')}"
        for name, amount in sorted(bundle.items(), key=lambda item: item[0] != "CPU")
    ]


def _connect(address: str) -> None:
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"Ray at '{address}' does not let this machine in: {why[:300]}") from None


def main() -> int:
    # What Ray prints goes where its warnings go.
    answers = os.dup(1)
    os.dup2(2, 1)
    tasks = {"plan": plan, "place": place, "status": status, "stop": stop, "scale": scale}
    try:
        _connect(sys.argv[1])
        # Read after it has connected: the command makes it meanwhile.
        request = json.load(sys.stdin)
        answer = tasks[request["task"]](request)
    except UserError as error:
        answer = {"refused": str(error)}
    with os.fdopen(answers, "w") as file:
        json.dump(answer, file)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
