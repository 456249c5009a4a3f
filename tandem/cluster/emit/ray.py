"""The inference topology on Ray: engines as replicas of Ray Serve, gateways and Envoy on the head node."""

from pathlib import Path

import yaml

from tandem.cluster.emit.machines import envoy_lines, gateway_files
from tandem.cluster.emit.scripts import BEFORE, FOLDER, KEEP, LOGS, TARGETS, engine_flags, script
from tandem.cluster.emit.topology import InferenceTopology
from tandem.cluster.emit.training import HEAD, ray_cluster


def ray_inference(topology: InferenceTopology, jaeger: str, folder: Path) -> dict[str, str]:
    """Returns the files: ``serve.yaml`` is Ray Serve's, ``start.sh`` starts it with the gateways. ``folder``: in which they will be."""
    gateways = [
        f'./keep.sh tandem gateway gateway-{number}.yaml > logs/gateway-{number}.out 2>&1 & fronts+=("$!")' for number in range(topology.gateways)
    ]
    start = script(
        f"# Starts {topology.instances} engines on the Ray cluster at RAY_ADDRESS, and {topology.gateways} gateways and, where it is installed, Envoy at port",
        f"# {topology.port} of this machine, the cluster's head; Ctrl-C ends them. All nodes have this folder, under the same path.",
        "set -u", FOLDER, BEFORE,
        "# Gateways have finished what they have before the engines end.",
        "fronts=()", "end() {", "    trap '' TERM INT", '    kill -TERM "${fronts[@]}" 2>/dev/null', '    wait "${fronts[@]}"',
        '    kill -TERM "$serve" 2>/dev/null', '    wait "$serve"', '    exit "$1"', "}",
        "python -m tandem.cluster.ray_serve.run serve.yaml &", "serve=$!", 'trap "end 0" TERM INT',
        gateways, *envoy_lines("envoy.yaml", after=' fronts+=("$!")'), 'wait "$serve"', 'end "$?"',
    )  # fmt: skip
    nodes = tuple(f"gpu{number + 1}" for number in range(topology.nodes))
    # Serve's proxy asks for no key, so it listens for this node alone.
    proxy = f"http://127.0.0.1:{topology.engine_port(0)}"
    return {
        "cluster.yaml": ray_cluster("tandem-inference", "head", nodes), "serve.yaml": _serve_file(topology, jaeger, folder), "start.sh": start,
        "keep.sh": KEEP,
        **gateway_files(topology, [proxy], ["127.0.0.1"] * topology.gateways, jaeger, folder, engine_key="", replicas=topology.instances),
    }  # fmt: skip


def _serve_file(topology: InferenceTopology, jaeger: str, folder: Path) -> str:
    model = topology.model
    flags = {**engine_flags(topology, jaeger), "targets-folder": str(folder / TARGETS), "log-folder": str(folder / LOGS)}
    application = {
        "name": "tandem", "route_prefix": "/", "import_path": "tandem.cluster.ray_serve.application:application",
        "args": {"model": model.source, "served_model_name": model.name, "count": topology.instances, "flags": flags},
        "deployments": [
            {"name": "Servers", "ray_actor_options": {"num_cpus": topology.cpus, "num_gpus": topology.tensor_parallel if topology.node.gpus else 0}}
        ],
    }  # fmt: skip
    content = {
        "proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": topology.engine_port(0)}, "applications": [application],
    }  # fmt: skip
    return HEAD + yaml.safe_dump(content, sort_keys=False)
