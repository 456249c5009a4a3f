"""The measurements of the preflight on one node. Each is of the node alone; ``preflight`` measures what is between nodes."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tandem.config.machine import MachineConfig
from tandem.estimate.time import Product
from tandem.jobs.checks.measured_speed import measure
from tandem.runtime.health.node_report import NodeReport, own_versions
from tandem.runtime.machine.available_memory import available_bytes
from tandem.runtime.machine.gpus import DRIVER, probe, visible_gpus
from tandem.runtime.machine.nvidia_health import parse_xids, read_kernel_log, read_smi
from tandem.storage.disk_space import free_bytes
from tandem.types import RunError, UserError

_T = TypeVar("_T")
PRODUCT = {"cpu": Product(256, 1024, 1024), "cuda": Product(1024, 8192, 8192)}
"""The matrix product that is measured on each device: large enough for its full speed, and some tenths of a second in all."""
_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
WRITTEN_BYTES = 1 << 25
_CHUNK = 1 << 20
RECENT_S = 86400.0
"""An Xid that is older is not held against a node."""
_SHM = Path("/dev/shm")
_DRIVER_S = 60.0


def measure_node(node: str, machine: MachineConfig, folder: Path | None = None) -> NodeReport:
    """Returns the report of this machine as ``node``, for a run of section ``machine``. ``folder``: of which the disk is measured (``None``: that for temporary
    files). What cannot be measured is in ``failed``."""
    failed: dict[str, str] = {}

    def attempt(what: str, do: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return do()
        except (UserError, OSError, subprocess.SubprocessError) as error:
            failed[what] = " ".join(str(error).split())
            return otherwise

    folder = folder or Path(tempfile.gettempdir())
    nothing: dict[str, float] = {}
    no_fault: dict[str, str] = {}
    no_device: tuple[str, ...] = ()
    devices = attempt("device", lambda: _devices(machine), no_device)
    versions = own_versions()
    if devices:
        versions["driver"] = attempt("driver", driver_version, "")
        failed |= attempt("nvidia-smi", _faults_of_gpus, no_fault)
    speeds: dict[str, float] = {}
    for number, _ in enumerate(devices):
        speeds |= attempt(f"GPU {number}", partial(_speeds, machine, "cuda", f" of GPU {number}", visible_gpus(number, 1)), nothing)
    if not devices:
        speeds |= attempt("processor", lambda: _speeds(machine, "cpu", "", {}), nothing)
    written = attempt("disk", lambda: _written_bytes_per_s(folder), 0.0)
    if written:
        speeds["disk"] = written
    free = {"disk": attempt("disk", lambda: free_bytes(folder), 0), "memory": available_bytes(0)}
    free["shm"] = attempt("shm", _free_shm, 0)
    return NodeReport(node, versions, devices, speeds, free, failed=failed)


def driver_version() -> str:
    """Returns the version of NVIDIA's driver, as ``nvidia-smi`` names it. Raises ``OSError`` or ``SubprocessError`` without an answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=True)
    return " ".join(sorted(set(done.stdout.split())))


def _devices(machine: MachineConfig) -> tuple[str, ...]:
    if machine.device == "cpu" or (machine.device == "auto" and not any(path.exists() for path in DRIVER)):
        return ()
    probed = probe()
    if not probed.gpus:
        raise RunError(f"no GPU is found: {probed.why}")
    return tuple(gpu.name for gpu in probed.gpus)


def _faults_of_gpus() -> dict[str, str]:
    """Returns what NVIDIA's driver says is wrong with the GPUs, by their PCI addresses. Of the kernel's log the errors that are not old count: the GPU may have
    been reset since, and the machine not."""
    found = {f"GPU {gpu.bus} ({gpu.name})": "; ".join(gpu.faults()) for gpu in read_smi() if gpu.faults()}
    since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - RECENT_S
    for xid in parse_xids(read_kernel_log()):
        if xid.is_fatal and (xid.at_s is None or xid.at_s > since_s):
            found[f"XID {xid.number} of GPU {xid.bus}"] = xid.describe()
    return found


def _speeds(machine: MachineConfig, device: str, of: str, environment: dict[str, str]) -> dict[str, float]:
    product = PRODUCT[device]
    speed = measure([product], _DTYPE[device], device, machine, environment)
    flops = 2.0 * product.rows * product.outputs * product.inputs
    return {f"matrix products{of}": flops / speed.seconds[product], f"memory{of}": speed.bytes_per_s}


def _written_bytes_per_s(folder: Path) -> float:
    """Writes a file without a name to ``folder`` and flushes it to the disk."""
    data = os.urandom(_CHUNK)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(WRITTEN_BYTES // _CHUNK):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - began)


def _free_shm() -> int:
    with tempfile.TemporaryFile(dir=_SHM) as file:
        # A mount that is full or read-only has no place for one page.
        file.write(bytes(4096))
        file.flush()
        return free_bytes(_SHM)
