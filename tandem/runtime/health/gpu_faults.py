"""What becomes wrong with the GPUs of a machine while a run works: looks at ``nvidia-smi`` and at the kernel's log again and again. Imports no torch."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.runtime.machine.gpus import DRIVER
from tandem.runtime.machine.nvidia_health import GpuHealth, parse_xids, read_kernel_log, read_smi
from tandem.types import RunError


def may_have_gpus() -> bool:
    """Returns whether this machine has NVIDIA's driver, or the program that asks it."""
    return _has_driver() or shutil.which("nvidia-smi") is not None


def _has_driver() -> bool:
    return any(path.exists() for path in DRIVER)


def boot_s() -> float:
    """Returns the seconds since the machine's start, as the kernel's log counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class GpuLook:
    """``gpus``: as ``nvidia-smi`` tells of them. ``faults``: what is wrong now, by GPU. ``fatal``: after which the machine must not compute for the run any
    more, one line each, new since the last look. ``xids``: how many were in the log since the watch began, by their numbers."""

    gpus: Sequence[GpuHealth] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    fatal: Sequence[str] = ()
    xids: Mapping[int, int] = field(default_factory=dict)


@dataclass
class GpuFaults:
    """Looks at the GPUs of this machine. What was wrong before the first look is the preflight's: of counters only what is added counts, and of the kernel's
    log the lines after the watch began."""

    smi: Callable[[], Sequence[GpuHealth]] = read_smi
    log: Callable[[], Sequence[str]] = read_kernel_log
    began_s: float = field(default_factory=boot_s)
    _uncorrected: dict[str, int] = field(default_factory=dict)
    _remapped: set[str] = field(default_factory=set)
    _is_first: bool = True
    _xids: dict[int, int] = field(default_factory=dict)
    _seen: set[tuple[str, int, float | None, str]] = field(default_factory=set)

    def look(self) -> GpuLook:
        """Returns what is wrong now. An ``nvidia-smi`` that does not answer is a fault of the machine."""
        fatal = self._new_xids()
        try:
            gpus = self.smi()
        except RunError as error:
            # A machine without GPUs may have the program.
            faults = {"all GPUs": str(error)} if self._uncorrected or _has_driver() else {}
            return GpuLook((), faults, fatal, dict(self._xids))
        for gpu in gpus:
            name = f"GPU {gpu.bus} ({gpu.name})"
            count, before = gpu.uncorrected or 0, self._uncorrected.get(gpu.bus)
            # A reset of the driver sets the counters back.
            if before is not None and count > before:
                fatal.append(f"{name} has had {count - before} uncorrected ECC errors since the last look")
            self._uncorrected[gpu.bus] = count
            if gpu.remap_failed and before is not None and gpu.bus not in self._remapped:
                fatal.append(f"{name}: the remapping of a row failed")
            if gpu.remap_failed:
                self._remapped.add(gpu.bus)
        faults = {f"GPU {gpu.bus} ({gpu.name})": "; ".join(gpu.faults()) for gpu in gpus if gpu.faults()}
        return GpuLook(gpus, faults, fatal, dict(self._xids))

    def _new_xids(self) -> list[str]:
        fatal, first, self._is_first = list[str](), self._is_first, False
        for xid in parse_xids(self.log()):
            key = (xid.bus, xid.number, xid.at_s, xid.text)
            # Lines without a time that the first look finds may be of any age.
            is_old = xid.at_s < self.began_s if xid.at_s is not None else first
            if key in self._seen or is_old:
                self._seen.add(key)
                continue
            self._seen.add(key)
            self._xids[xid.number] = self._xids.get(xid.number, 0) + 1
            if xid.is_fatal:
                fatal.append(xid.describe())
        return fatal
