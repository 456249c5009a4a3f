"""Shell scripts that the emitted topologies share on machines without Kubernetes."""

import shlex
from collections.abc import Sequence

from tandem.cluster.emit.topology import InferenceTopology

KEEP = """\
#!/bin/bash
# Runs a command, and again five seconds after it dies: keep.sh COMMAND...
# SIGTERM is passed on, and ends this script when the command has ended. A command that is refused (exit status 2) would be so again.
child="" stopping=""
stop() { stopping=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null; }
trap stop TERM INT
while [ -z "$stopping" ]; do
    "$@" &
    child=$!
    wait "$child"
    status=$?
    # A signal interrupts 'wait', not the command.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        status=$?
    done
    child=""
    [ -z "$stopping" ] || exit 0
    [ "$status" -ne 2 ] || exit 2
    echo "$1 ended with $status; it starts again in 5 s" >&2
    sleep 5 &
    wait $!
done
"""


ENGINE_KEY, TARGETS, LOGS = "engine.key", "targets", "logs"
"""In the folder of the files: the key that engines ask gateways for, the folder in which processes name themselves to Prometheus, and that of logs."""
FOLDER = 'cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"'
BEFORE = (
    f"mkdir -p {LOGS} {TARGETS}",
    f"[ -s {ENGINE_KEY} ] || (umask 077; head -c 32 /dev/urandom | base64 | tr -d '+/=\\n' > {ENGINE_KEY}.new && mv {ENGINE_KEY}.new {ENGINE_KEY})",
)
"""Lines that make the folders, and the key."""


def ending(signals: str) -> list[str]:
    """Returns lines after which ``signals`` end the script and what it has started."""
    return [f"end() {{ trap '' {signals}; kill -TERM $(jobs -p) 2>/dev/null; wait; exit 0; }}", f"trap end {signals}"]


def engine_flags(topology: InferenceTopology, jaeger: str) -> dict[str, str | int]:
    """Returns the flags of ``tandem serve`` for one instance that do not say where it listens."""
    device: dict[str, str | int] = {"device": "cuda", "dtype": "bfloat16"} if topology.node.gpus else {"threads": topology.cpus}
    return {"tensor-parallel-size": topology.tensor_parallel, **device, **({"otlp-traces-endpoint": jaeger} if jaeger else {})}


def engine_command(topology: InferenceTopology, port: str, *, host: str, jaeger: str) -> list[str]:
    """Returns the words of a command that serves one instance at ``port``, a number or a variable of the shell, on ``host``."""
    model = topology.model
    return [
        *map(shlex.quote, ("tandem", "serve", model.source, f"--host={host}")), f"--port={port}", shlex.quote(f"--served-model-name={model.name}"),
        *(shlex.quote(f"--{name}={value}") for name, value in engine_flags(topology, jaeger).items()),
        f"--targets-folder={TARGETS}", f"--log-folder={LOGS}", f"--api-key=@{ENGINE_KEY}",
    ]  # fmt: skip


def script(*lines: str | Sequence[str]) -> str:
    """Returns the text of a script of bash, whose further ``lines`` may be lists of them."""
    flat = [line for each in lines for line in ([each] if isinstance(each, str) else each)]
    return "\n".join(["#!/bin/bash", *flat, ""])
