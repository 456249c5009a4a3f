"""What a pod that joins a run is asked before it takes part, whatever has started it and however late: the clock and the versions of its machine."""

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

from tandem.config.cluster import ClusterConfig
from tandem.pod.rollout_pod import RolloutPod
from tandem.runtime.coordination.embedded import boot_id
from tandem.runtime.coordination.membership import Member
from tandem.runtime.health.compare import setup_findings
from tandem.runtime.health.node_report import NodeReport, own_versions
from tandem.types import RunError

_CLOSE, _MOST_ASKED = 0.25, 5
"""Share of the limit within which the offset of a clock must be known, and how often a pod is asked until it is."""


def describe_machine() -> dict[str, Any]:
    """Returns what a pod answers: the time, and the name and the versions of its machine."""
    return {"time_s": time.time(), "machine": socket.gethostname(), "versions": own_versions()}


def check_joining(pod: RolloutPod, config: ClusterConfig, deadline_s: float) -> None:
    """Compares the machine of ``pod`` with this one, the controller's. Raises ``RunError``, in one line, for a clock that differs by more than the limit of
    ``config``, beyond doubt, and for other versions; those of a call to the pod as ``RolloutPod.ask``."""
    report = NodeReport(pod.name, clock_error_s=float("inf"))
    for _ in range(_MOST_ASKED):
        asked, began = time.time(), time.monotonic()
        told = pod.ask("describe", deadline_s=deadline_s).meta
        error_s = (time.monotonic() - began) / 2
        if error_s < report.clock_error_s:
            node = pod.name if told["machine"] == pod.name else f"{pod.name} ({told['machine']})"
            report = NodeReport(node, dict(told["versions"]), clock_offset_s=asked + error_s - float(told["time_s"]), clock_error_s=error_s)
        if report.clock_error_s <= _CLOSE * config.max_clock_offset_s:
            break
    if findings := setup_findings(report, NodeReport("the controller", own_versions()), config):
        raise RunError("; ".join(each.text for each in findings))


def process_space() -> str:
    """Returns what tells the process ids that this process sees from those of other machines and containers; empty where that is not known."""
    with contextlib.suppress(OSError):
        return f"{boot_id()}/{Path('/proc/self/ns/pid').readlink()}"
    return ""


def has_died(member: Member) -> bool:
    """Returns whether ``member`` was a process beside this one that is there no more, though its lease may not have ended."""
    if not (space := process_space()) or member.facts.get("processes") != space:
        return False
    try:
        stat = Path(f"/proc/{int(member.facts['pid'])}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    # One that has ended and that its new parent has not waited for.
    return stat.rpartition(")")[2].split()[0] in "ZX"
