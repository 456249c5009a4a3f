"""The inference topology on machines without Kubernetes: one with all of it, or the nodes of a job of Slurm."""

from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.emit.gateways import envoy_file, gateway_file, gateway_settings
from tandem.cluster.emit.scripts import BEFORE, ENGINE_KEY, FOLDER, KEEP, LOGS, TARGETS, ending, engine_command, script
from tandem.cluster.emit.topology import InferenceTopology

_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8")
_DRAIN_S = 600
"""In which engines and gateways finish what they have; their default."""
_ENDS = "# Everything ends with this script, and engines finish what they have."


@dataclass(frozen=True, slots=True)
class SlurmPlace:
    """``partition`` and ``account``: of the job; empty for the default ones. ``time``: its limit; empty for the partition's."""

    partition: str = ""
    account: str = ""
    time: str = ""


def local(topology: InferenceTopology, jaeger: str) -> dict[str, str]:
    """Returns the files of a topology on one machine: ``start.sh`` starts it, until it is ended."""
    gpus, parallel = topology.node.gpus, topology.tensor_parallel
    visible = f'CUDA_VISIBLE_DEVICES=$(seq -s, $((index * {parallel})) $((index * {parallel} + {parallel - 1}))) ' if gpus else ""
    engine = " ".join(engine_command(topology, "$port", host="127.0.0.1", jaeger=jaeger))
    gateways = [f"./keep.sh tandem gateway gateway-{number}.yaml > logs/gateway-{number}.out 2>&1 &" for number in range(topology.gateways)]
    start = script(
        f"# Starts {topology.instances} engines, {topology.gateways} gateways and, where it is installed, Envoy at port {topology.port}; Ctrl-C ends them.",
        "set -u", FOLDER, BEFORE, _ENDS, ending("TERM INT"),
        f"for index in $(seq 0 {topology.instances - 1}); do",
        f"    port=$(({topology.engine_port(0)} + index))",
        f"    {visible}./keep.sh {engine} > logs/engine-$index.out 2>&1 &", "done",
        gateways, *envoy_lines("envoy.yaml"),
        f'echo "gateways at {", ".join(f"http://127.0.0.1:{topology.gateway_port(number)}" for number in range(topology.gateways))}"',
        # It is interrupted by the signal that ends all.
        "wait",
    )  # fmt: skip
    engines = [f"http://127.0.0.1:{topology.engine_port(number)}" for number in range(topology.instances)]
    return {"start.sh": start, "keep.sh": KEEP, **gateway_files(topology, engines, ["127.0.0.1"] * topology.gateways, jaeger, host="127.0.0.1")}


def slurm(topology: InferenceTopology, place: SlurmPlace, folder: Path, jaeger: str) -> dict[str, str]:
    """Returns the files of a topology as one job of Slurm. ``folder``: the absolute path of the files, which all nodes have."""
    per_node, gpus = topology.instances_per_node, topology.node.gpus
    asked = {
        "job-name": "tandem-inference", "output": f"{folder}/logs/slurm-%j.out", "open-mode": "append", "chdir": str(folder), "nodes": str(topology.nodes),
        **{name: value for name, value in (("partition", place.partition), ("account", place.account), ("time", place.time)) if value},
        **({"gpus-per-node": str(min(gpus, per_node * topology.tensor_parallel))} if gpus else {}),
    }  # fmt: skip
    engine = " ".join(engine_command(topology, "$port", host="0.0.0.0", jaeger=jaeger))
    gpu_flags = f" --gpus-per-task={topology.tensor_parallel}" if gpus else ""
    # A step of Slurm has its cores, and the GPUs of no other step, for itself. Gateways and Envoy share those of an engine.
    step = "srun --nodes=1 --ntasks=1 --kill-on-bad-exit=0 --unbuffered"
    beside = f"{step} --overlap --cpus-per-task=1"
    hosts = " ".join(f'-e "s/engine-{number}\\.invalid/${{addresses[{number // per_node}]}}/"' for number in range(topology.instances))
    fronts = " ".join(f'-e "s/gateway-{number}\\.invalid/${{addresses[{number % topology.nodes}]}}/"' for number in range(topology.gateways))
    batch = script(
        *(f"#SBATCH --{name}={value}" for name, value in asked.items()),
        # Whole nodes: the ports are theirs alone.
        "#SBATCH --exclusive", "#SBATCH --requeue", f"#SBATCH --signal=B:TERM@{_DRAIN_S + 30}", "",
        "set -u", 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")', 'here=jobs/"$SLURM_JOB_ID"', 'mkdir -p "$here"', BEFORE,
        "# The nodes are known only now. Their addresses are those at which Slurm reaches them.",
        'mapfile -t addresses < <(for each in "${hosts[@]}"; do scontrol show node --oneliner "$each" | grep -o "NodeAddr=[^ ]*" | cut -d= -f2; done)',
        f"for file in gateway-*.yaml envoy.yaml; do sed {hosts} {fronts} \"$file\" > \"$here/$file\"; done",
        _ENDS, ending("TERM"),
        f"for index in $(seq 0 {topology.instances - 1}); do",
        f"    port=$(({topology.engine_port(0)} + index))",
        f'    {step} --exact --nodelist="${{hosts[index / {per_node}]}}" --cpus-per-task={topology.cpus}{gpu_flags} \\',
        f"        ./keep.sh {engine} > logs/engine-$index.out 2>&1 &", "done",
        f"for number in $(seq 0 {topology.gateways - 1}); do",
        f'    {beside} --nodelist="${{hosts[number % {topology.nodes}]}}" \\',
        '        ./keep.sh tandem gateway "$here/gateway-$number.yaml" > logs/gateway-$number.out 2>&1 &',
        "done",
        *envoy_lines("$here/envoy.yaml", f'{beside} --nodelist="${{hosts[0]}}" '),
        f'echo "gateways at $(for number in $(seq 0 {topology.gateways - 1}); do echo -n '
        f'"http://${{addresses[number % {topology.nodes}]}}:$(({topology.gateway_port(0)} + number)) "; done)"',
        "wait",
    )  # fmt: skip
    engines = [f"http://engine-{number}.invalid:{topology.engine_port(number)}" for number in range(topology.instances)]
    names = [f"gateway-{number}.invalid" for number in range(topology.gateways)]
    # Slurm writes the output of a job to a folder that is there.
    return {"inference.sbatch": batch, "keep.sh": KEEP, f"{LOGS}/.keep": "", **gateway_files(topology, engines, names, jaeger, folder)}


def envoy_lines(file: str, within: str = "", after: str = "") -> list[str]:
    """Returns the lines of a script that start Envoy where it is installed. ``within``: the beginning of a command that starts it elsewhere; ``after``: what
    follows the command on its line."""
    return [
        "if command -v envoy > /dev/null; then",
        f'    {within}./keep.sh envoy -c "{file}" --use-dynamic-base-id --log-level warn > logs/envoy.out 2>&1 &{after}',
        "else",
        '    echo "envoy is not on the PATH, so there is no load balancer: clients use the gateways"', "fi",
    ]  # fmt: skip


def gateway_files(
    topology: InferenceTopology, engines: list[str], hosts: list[str], jaeger: str, folder: Path = Path(), *, host: str = "0.0.0.0",
    engine_key: str = ENGINE_KEY, replicas: int = 0,
) -> dict[str, str]:  # fmt: skip
    """Returns the settings of each gateway, and of Envoy in front of them. ``hosts``: of the gateways, as Envoy reaches them; ``host``: on which they listen.
    ``folder``: of all files, where the settings are moved to another one. ``engine_key``: the file with the engines' key; empty: they ask for none.
    ``replicas``: as of ``gateway_settings``."""
    folders = {"targets_folder": str(folder / TARGETS), "log_folder": str(folder / LOGS)}
    settings = [
        gateway_settings(
            engines, topology.gateway_port(number), _PRIVATE, host=host, jaeger=jaeger, engine_key=str(folder / engine_key) if engine_key else "",
            folders=folders, replicas=replicas,
        )
        for number in range(topology.gateways)
    ]
    files = {f"gateway-{number}.yaml": gateway_file(each) for number, each in enumerate(settings)}
    urls = [f"http://{each}:{topology.gateway_port(number)}" for number, each in enumerate(hosts)]
    return {**files, "envoy.yaml": envoy_file(settings[0], urls, topology.port)}
