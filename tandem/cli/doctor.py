"""Show what Tandem finds and uses on this machine.

example:
  tandem doctor
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
import sys
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
    """Adds no arguments."""


def run(options: argparse.Namespace) -> int:
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
