"""What NVIDIA's driver says of the health of this machine's GPUs: ``nvidia-smi -q -x`` and the Xid lines of the kernel's log. Imports no torch.

The XML is that of ``nvsmi_device_v12.dtd`` and its predecessors, in which a value that a GPU does not have is ``N/A``. The numbers of Xids and what follows
from them are those of NVIDIA's "XID Errors" catalog.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from tandem.types.errors import RunError

_ANSWER_S = 60.0
FATAL_XIDS = {
    46: "the GPU stopped processing", 48: "double-bit ECC error", 61: "internal microcontroller halt", 62: "internal microcontroller halt",
    64: "ECC page retirement or row remapping failed", 74: "NVLink error", 79: "the GPU has fallen off the bus", 92: "high rate of single-bit ECC errors",
    95: "uncontained ECC error", 109: "context switch timeout", 110: "security fault", 119: "GSP RPC timeout", 120: "GSP error",
    140: "unrecovered ECC error", 143: "GPU initialization error",
}  # fmt: skip
"""Xids after which the machine, not the program, is at fault. Others, such as 13 and 31, are mostly those of programs."""
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>\d+)(?:, (?P<text>.*))?")
_FALLEN = re.compile(r"NVRM: The NVIDIA GPU (?P<bus>[0-9a-fA-F:.]+)$")
"""Newer drivers say so, over several lines, in place of Xid 79."""
_HARMFUL = {
    "hw_slowdown": "hardware slowdown", "hw_thermal_slowdown": "hardware thermal slowdown", "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "software thermal slowdown",
}  # fmt: skip
_FIELDS_OF_ECC = ("dram_uncorrectable", "sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded")


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One GPU. ``bus``: its PCI address. ``uncorrected``: ECC errors since the driver was loaded. ``throttled``: why it is slowed down. ``link``,
    ``link_most``: its PCIe generation and lanes now, and the most that it and the machine have. What the GPU does not tell is ``None``."""

    bus: str
    name: str
    temperature_c: int | None
    power_w: float | None
    utilization_percent: int | None
    uncorrected: int | None
    pending_retirement: bool
    remap_failed: bool
    throttled: Sequence[str]
    link: tuple[int, int] | None
    link_most: tuple[int, int] | None

    def faults(self) -> Sequence[str]:
        """Returns what is wrong with it, in words; a PCIe link may rest at a lower generation, but not with fewer lanes."""
        found = [f"{self.uncorrected} uncorrected ECC errors"] if self.uncorrected else []
        found += ["a page is to be retired at the next reset"] if self.pending_retirement else []
        found += ["the remapping of a row failed"] if self.remap_failed else []
        found += [f"throttled: {why}" for why in self.throttled]
        if self.link is not None and self.link_most is not None and self.link[1] < self.link_most[1]:
            found.append(f"PCIe has {self.link[1]} of {self.link_most[1]} lanes")
        return found


@dataclass(frozen=True, slots=True)
class Xid:
    """An Xid error of the GPU at ``bus``. ``at_s``: seconds since the machine's start, ``None`` if the line does not say."""

    bus: str
    number: int
    text: str
    at_s: float | None

    @property
    def is_fatal(self) -> bool:
        return self.number in FATAL_XIDS

    def describe(self) -> str:
        what = FATAL_XIDS.get(self.number, "")
        return f"XID {self.number} of GPU {self.bus}" + (f" ({what})" if what else "") + (f": {self.text}" if self.text else "")


def parse_smi(text: str) -> Sequence[GpuHealth]:
    """Returns the GPUs in the output of ``nvidia-smi -q -x``. Raises ``RunError`` for another text."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise RunError(f"'nvidia-smi -q -x' gave no XML: {error}") from None
    if root.tag != "nvidia_smi_log":
        raise RunError(f"'nvidia-smi -q -x' gave <{root.tag}> and not <nvidia_smi_log>")
    return [_gpu(element) for element in root.iter("gpu")]


def parse_xids(lines: Sequence[str]) -> Iterator[Xid]:
    """Yields the Xids in lines of the kernel's log, as ``dmesg`` and ``journalctl -k`` write them."""
    for number, line in enumerate(lines):
        at = re.match(r"\[\s*(\d+\.\d+)\]", line)
        at_s = float(at[1]) if at else None
        if (match := _XID.search(line)) is not None:
            yield Xid(match["bus"].lower(), int(match["number"]), (match["text"] or "").strip(), at_s)
        elif (match := _FALLEN.search(line.rstrip())) is not None and any("fallen off the bus" in after for after in lines[number + 1 : number + 3]):
            yield Xid(match["bus"].lower(), 79, "", at_s)


def read_smi() -> Sequence[GpuHealth]:
    """Returns the GPUs of this machine. Raises ``RunError`` where ``nvidia-smi`` does not answer, as it does if a GPU has fallen off the bus."""
    try:
        done = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False)
    except FileNotFoundError:
        raise RunError("no 'nvidia-smi' on the PATH") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"'nvidia-smi -q -x' did not answer within {_ANSWER_S:.0f} s") from None
    if done.returncode:
        raise RunError(f"'nvidia-smi -q -x' failed: {' '.join((done.stdout or done.stderr).split())[:200]}")
    return parse_smi(done.stdout)


def read_kernel_log() -> Sequence[str]:
    """Returns the lines of the kernel's log; none where this user may not read it, or there is no ``dmesg``."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def _gpu(gpu: ElementTree.Element) -> GpuHealth:
    # Reasons have had two names: 'throttle reasons' until driver 535.
    events = gpu.find("clocks_event_reasons")
    if events is None:
        events = gpu.find("clocks_throttle_reasons")
    throttled = [words for event in (events if events is not None else ()) for name, words in _HARMFUL.items() if _is_reason(event.tag, name) and _on(event)]
    volatile = gpu.find("ecc_errors/volatile")
    counts = [_number(volatile.findtext(name)) for name in _FIELDS_OF_ECC] if volatile is not None else []
    if volatile is not None and all(count is None for count in counts):
        # Until Volta: by the size of the error.
        counts = [_number(volatile.findtext("double_bit/total"))]
    told = [int(count) for count in counts if count is not None]
    info = "pci/pci_gpu_link_info"
    return GpuHealth(
        (gpu.findtext("pci/pci_bus_id") or gpu.get("id") or "").lower(), gpu.findtext("product_name") or "",
        _whole(gpu.findtext("temperature/gpu_temp")), _power(gpu),
        _whole(gpu.findtext("utilization/gpu_util")), sum(told) if told else None,
        gpu.findtext("retired_pages/pending_retirement") == "Yes" or gpu.findtext("remapped_rows/remapped_row_pending") == "Yes",
        gpu.findtext("remapped_rows/remapped_row_failure") == "Yes", throttled,
        _pair(gpu.findtext(f"{info}/pcie_gen/current_link_gen"), gpu.findtext(f"{info}/link_widths/current_link_width")),
        _pair(gpu.findtext(f"{info}/pcie_gen/max_link_gen"), gpu.findtext(f"{info}/link_widths/max_link_width")),
    )  # fmt: skip


def _power(gpu: ElementTree.Element) -> float | None:
    """Returns the power that it draws, which has had four names."""
    names = ("gpu_power_readings/instant_power_draw", "gpu_power_readings/average_power_draw", "gpu_power_readings/power_draw", "power_readings/power_draw")
    return next((number for name in names if (number := _number(gpu.findtext(name))) is not None), None)


def _is_reason(tag: str, name: str) -> bool:
    return tag in (f"clocks_event_reason_{name}", f"clocks_throttle_reason_{name}")


def _on(element: ElementTree.Element) -> bool:
    return element.text == "Active"


def _number(text: str | None) -> float | None:
    match = re.match(r"\s*(\d+(?:\.\d+)?)", text or "")
    return float(match[1]) if match else None


def _whole(text: str | None) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _pair(generation: str | None, lanes: str | None) -> tuple[int, int] | None:
    first, second = _whole(generation), _whole(lanes)
    return None if first is None or second is None else (first, second)
