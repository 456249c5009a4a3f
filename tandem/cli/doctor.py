"""Show what Tandem finds and uses on this machine, or measure it as one node of a cluster.

With --preflight it measures what a run on several nodes measures of each before it begins: matrix products, memory and disk, and what is free in /dev/shm
and on the disk. --compare takes the reports of several nodes and says which is not fit, with exit status 1; the first is that of the run's first node.

examples:
  tandem doctor
  tandem doctor --preflight
  tandem doctor --preflight --json > reports/$(hostname).json
  tandem doctor --compare reports/*.json
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.backends.environment import installed
from tandem.backends.sidecars import SIDECARS
from tandem.runtime.machine.numerics import instruction_set
from tandem.runtime.process.processes import available_cores
from tandem.types import UserError

OPTIONAL = {
    "jinja2": "chat templates (pip install tandem-rl[chat])",
    "huggingface_hub": "models of the Hugging Face Hub (pip install tandem-rl[hub])",
    "fastapi": "tandem serve (pip install tandem-rl[serve])",
    "reasoning_gym": "tasks by name (pip install tandem-rl[reasoning-gym])",
    "verifiers": "environments by name (pip install tandem-rl[verifiers])",
    "math_verify": "comparing mathematical answers (pip install tandem-rl[math])",
    "triton": "kernels on CUDA devices (pip install tandem-rl[gpu])",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--preflight", action="store_true", help="measure this machine as a node")
    what.add_argument("--compare", nargs="+", metavar="FILE", type=Path, help="compare the reports of nodes")
    parser.add_argument("--json", action="store_true", help="with --preflight: print the report as JSON")


def run(options: argparse.Namespace) -> int:
    if options.json and not options.preflight:
        raise UserError("--json is given without --preflight, whose report it prints; add --preflight")
    if options.preflight:
        return _preflight(options.json)
    if options.compare:
        return _compare(options.compare)
    memory = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    lines = [
        ("Python", sys.version.split()[0]),
        ("machine", f"{platform.machine()}, {available_cores()} cores available to this process"),
        ("instruction set", instruction_set()),
        ("memory", _memory()),
        ("shared memory", f"{memory.free / 2**30:.1f} GiB free in /dev/shm" if memory else "no /dev/shm: a pod cannot run here"),
        ("disk", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free here"),
        ("torch", importlib.metadata.version("torch") if importlib.util.find_spec("torch") else "missing: pip install torch"),
        ("kernels", _kernels()),
    ]
    server = shutil.which("etcd")
    lines.append(("etcd", f"client: built in (coordination.store: etcd); server: {server or 'not on the PATH; any reachable one will do'}"))
    lines += [(f"{name} sidecar", _sidecar(name)) for name in SIDECARS]
    for module, use in OPTIONAL.items():
        lines.append((module, "installed" if importlib.util.find_spec(module) else f"not installed; for {use}"))
    for name, value in lines:
        print(f"{name:<16} {value}")
    return 0


def _preflight(as_json: bool) -> int:
    from tandem.cluster.health.measure import measure_node
    from tandem.config.cluster import ClusterConfig
    from tandem.config.machine import MachineConfig
    from tandem.runtime.health.compare import findings

    report = measure_node(socket.gethostname(), MachineConfig())
    if as_json:
        print(report.to_json())
        return 0
    lines = [*report.versions.items(), ("devices", ", ".join(report.devices) or "no GPU")]
    lines += [(what, f"{value / 1e9:.3g} {'GFLOP/s' if what.startswith('matrix') else 'GB/s'}") for what, value in report.speeds.items()]
    lines += [(f"{place} free", f"{value / 2**30:.1f} GiB") for place, value in report.free_bytes.items()]
    for name, text in lines:
        print(f"{name:<16} {text}")
    found = findings([report], {}, ClusterConfig())
    for each in found:
        print(each.text)
    return int(bool(found))


def _compare(paths: Sequence[Path]) -> int:
    from tandem.cluster.health.preflight import check_nodes
    from tandem.config.cluster import ClusterConfig
    from tandem.runtime.health.compare import findings
    from tandem.runtime.health.node_report import read_report
    from tandem.types.input_file import MOST_JSON_BYTES, read_input

    reports = []
    for path in paths:
        try:
            reports.append(read_report(read_input(path, MOST_JSON_BYTES), f"'{path}'"))
        except OSError as error:
            raise UserError(f"'{path}' cannot be read: {error.strerror}; name a report of 'tandem doctor --preflight --json'") from None
    check_nodes([report.node for report in reports])
    found = findings(reports, {}, ClusterConfig())
    for each in found:
        print(each.text)
    print(f"{len(reports) - len({each.node for each in found})} of {len(reports)} nodes are fit")
    return int(bool(found))


def _sidecar(name: str) -> str:
    try:
        record = installed(name)
    except UserError as error:
        return f"broken: {error}"
    return f"not installed; {SIDECARS[name].purpose} (tandem sidecar install {name})" if record is None else ", ".join(map(" ".join, record.versions.items()))


def _memory() -> str:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return "unknown"
    facts = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if line.split()[1:]}
    return f"{facts['MemAvailable'] / 2**20:.1f} of {facts['MemTotal'] / 2**20:.1f} GiB available"


def _kernels() -> str:
    from tandem.kernels import select
    from tandem.types import UserError

    try:
        return f"{select('cpu').name} (C++, built)"
    except UserError as error:
        return f"reference (plain torch, slower): {error}"
