"""The inference topology on Ray: engines in placement groups, gateways and Envoy on the head node."""

from pathlib import Path

import yaml

from tandem.cluster.emit.machines import envoy_lines, gateway_files
from tandem.cluster.emit.scripts import BEFORE, FOLDER, KEEP, ending, engine_command, script
from tandem.cluster.emit.topology import InferenceTopology
from tandem.cluster.emit.training import HEAD, ray_cluster


def ray_inference(topology: InferenceTopology, jaeger: str, folder: Path) -> dict[str, str]:
    """Returns the files: ``engines.yaml`` is what ``tandem.cluster.launch.ray.engines`` places, ``start.sh`` starts it with the gateways. ``folder``: in
    which they will be."""
    bundle = {**({"GPU": topology.tensor_parallel} if topology.node.gpus else {}), "CPU": topology.cpus}
    engines = [
        {
            "name": f"engine-{number}", "port": topology.engine_port(number),
            "command": engine_command(topology, str(topology.engine_port(number)), host="0.0.0.0", jaeger=jaeger),
        }
        for number in range(topology.instances)
    ]  # fmt: skip
    urls = [f"http://engine-{number}.invalid:{topology.engine_port(number)}" for number in range(topology.instances)]
    gateways = [
        f"./keep.sh tandem gateway placed/gateway-{number}.yaml > logs/gateway-{number}.out 2>&1 &" for number in range(topology.gateways)
    ]
    start = script(
        f"# Starts {topology.instances} engines on the Ray cluster at RAY_ADDRESS, and {topology.gateways} gateways and, where it is installed, Envoy at port",
        f"# {topology.port} of this machine; Ctrl-C ends them. All nodes have this folder, under the same path.",
        "set -u", FOLDER, BEFORE, "rm -rf placed", ending("TERM INT"),
        "python -m tandem.cluster.launch.ray.engines engines.yaml placed gateway-*.yaml &", "engines=$!",
        "until [ -e placed/gateway-0.yaml ]; do", '    kill -0 "$engines" 2>/dev/null || { wait "$engines"; exit $?; }', "    sleep 0.2", "done",
        gateways, *envoy_lines("envoy.yaml"), 'wait "$engines"', "end",
    )  # fmt: skip
    nodes = tuple(f"gpu{number + 1}" for number in range(topology.nodes))
    return {
        "cluster.yaml": ray_cluster("tandem-inference", "head", nodes),
        "engines.yaml": HEAD + yaml.safe_dump({"bundle": bundle, "engines": engines}, sort_keys=False),
        "start.sh": start, "keep.sh": KEEP, **gateway_files(topology, urls, ["127.0.0.1"] * topology.gateways, jaeger, folder),
    }  # fmt: skip
