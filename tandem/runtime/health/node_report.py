"""What the preflight measures of a node, as plain values that a store and a file can hold."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version

from tandem import __version__
from tandem.runtime.machine.numerics import instruction_set
from tandem.types import RunError

REPORTS = "reports/"
"""The beginning of the keys, in the store of a run, of the reports of nodes whose pods join one by one."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node.

    Args:
        node: its name.
        versions: of Tandem, Python, torch, the instruction set and, with GPUs, their driver, by these names.
        devices: the names of its GPUs, in order; none where the run computes on the CPU.
        speeds: what it did in a second, by what was measured: FLOP of matrix products and bytes of copies in memory, of each device, and bytes written to disk.
        free_bytes: of ``disk`` (the folder for temporary files), ``shm`` (/dev/shm) and ``memory``.
        clock_offset_s, clock_error_s: how much its clock is behind that of the first node, and by how much that may be wrong.
        links: bytes that one of two nodes reduced in a second with this one, by the other's name; 0: it failed.
        failed: what could not be measured, by what it is, with the reason.
    """

    node: str
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    speeds: Mapping[str, float] = field(default_factory=dict)
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0
    links: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def own_versions() -> dict[str, str]:
    """Returns the versions of this machine but the driver's, as in a report."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"tandem": __version__, "python": platform.python_version(), "torch": torch, "instruction set": instruction_set()}


def read_report(text: str | bytes, where: str) -> NodeReport:
    """Returns the report that ``text`` holds. Raises ``RunError`` for another text; ``where`` it is from."""
    try:
        told = json.loads(text)
        known = {each.name for each in fields(NodeReport)}
        report = NodeReport(**{**{name: value for name, value in told.items() if name in known}, "devices": tuple(told["devices"])})
        numbers = [*report.speeds.values(), *report.free_bytes.values(), *report.links.values(), report.clock_offset_s, report.clock_error_s]
        if not all(type(number) in (int, float) for number in numbers) or not isinstance(report.node, str):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RunError(f"{where} is no report of a node; write it with 'tandem doctor --preflight --json'") from None
    return report
