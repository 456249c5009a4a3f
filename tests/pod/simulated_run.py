"""A run of simulated pods with deaths at random times: starts etcd, the pods' processes and the controller, kills, and compares what was killed with what
the controller found."""

import json
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etcd_server import EtcdServer

from tandem.runtime.coordination.open import store_address

HERE = Path(__file__).resolve().parent
_SCRAPE_S = 5.0


@dataclass(frozen=True)
class Death:
    """One pod that was killed. ``detected_s``: until the controller said so, in its line ``by`` (``None``: it never did)."""

    name: str
    kind: str
    detected_s: float | None
    by: str


@dataclass
class Outcome:
    """``cpu_share``: processor seconds of the controller in a second of the run. ``false_alarms``: pods that were called lost and lived."""

    pods: int
    lease_s: float
    deaths: list[Death] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    cpu_share: float = 0.0
    join_cpu_s: float = 0.0
    join_s: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)
    gauges: dict[str, float] = field(default_factory=dict)
    scrapes_ms: list[float] = field(default_factory=list)
    series: int = 0

    def latencies(self, kind: str) -> list[float]:
        return sorted(death.detected_s for death in self.deaths if death.kind == kind and death.detected_s is not None)


class _Lines:
    """The JSON lines of a process."""

    def __init__(self, command: Sequence[str], into: "queue.Queue[dict[str, Any]]", log: Path) -> None:
        with log.open("wb") as errors:
            self.process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=HERE)
        self._into = into
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._into.put(json.loads(line))
        self._into.put({"event": "closed"})

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def simulate(folder: Path, pods: int, processes: int, lease_s: float, seconds: float, deaths: int, seed: int = 0) -> Outcome:
    """Runs ``pods`` pods in ``processes`` processes for ``seconds``, in which ``deaths`` of them are killed, in turn as a process and as a machine."""
    etcd = EtcdServer(folder / "etcd").start()
    address = store_address(etcd.config(), Path("simulated"))
    events: queue.Queue[dict[str, Any]] = queue.Queue()
    lines = list[_Lines]()
    try:
        of_pods: queue.Queue[dict[str, Any]] = queue.Queue()
        share = -(-pods // processes)
        for first in range(0, pods, share):
            arguments = [address, str(first), str(min(share, pods - first)), str(lease_s), str(seed)]
            lines.append(_Lines([str(HERE / "simulated_pods.py"), *arguments], of_pods, folder / f"pods-{first}.log"))
        _wait(of_pods, "all", len(lines), 600)
        began = time.time()
        controller = _Lines(
            [str(HERE / "simulated_controller.py"), address, str(folder / "run"), str(pods), str(lease_s), str(seconds)], events, folder / "controller.log"
        )
        lines.append(controller)
        seen = _wait(events, "ready", 1, 600, folder / "controller.log")
        ready = seen[-1]
        outcome = Outcome(pods, lease_s, join_cpu_s=ready["cpu_s"], join_s=ready["at"] - began)
        port = next(event["port"] for event in seen if event["event"] == "metrics")
        stop = threading.Event()
        threading.Thread(target=_scrape, args=(port, stop, outcome), daemon=True).start()
        killer = threading.Thread(target=_kill, args=(lines[:-1], share, pods, seconds - 3 * lease_s, deaths, seed), daemon=True)
        killer.start()
        seen += _wait(events, "end", 1, seconds + 300, folder / "controller.log")
        stop.set()
        end = seen[-1]
        outcome.cpu_share = (end["cpu_s"] - ready["cpu_s"]) / (end["at"] - ready["at"])
        outcome.gauges, outcome.steps = end["gauges"], [event for event in seen if event["event"] == "step"]
        _compare(outcome, [*of_pods.queue], [event for event in seen if event["event"] == "found"])
        return outcome
    finally:
        for line in lines:
            line.close()
        etcd.kill()


def _wait(events: "queue.Queue[dict[str, Any]]", name: str, count: int, seconds: float, log: Path | None = None) -> list[dict[str, Any]]:
    """Returns the events up to the ``count``-th ``name``."""
    seen, ends = list[dict[str, Any]](), time.monotonic() + seconds
    while sum(event["event"] == name for event in seen) < count:
        event = events.get(timeout=max(0.1, ends - time.monotonic()))
        assert event["event"] != "closed", log.read_text()[-3000:] if log is not None else event
        seen.append(event)
    return seen


def _kill(lines: Sequence[_Lines], share: int, pods: int, seconds: float, deaths: int, seed: int) -> None:
    chosen = random.Random(seed)
    names = chosen.sample(range(pods), deaths)
    moments = sorted(chosen.uniform(0, seconds) for _ in names)
    began = time.monotonic()
    for place, (number, moment) in enumerate(zip(names, moments, strict=True)):
        time.sleep(max(0.0, began + moment - time.monotonic()))
        lines[number // share].say(f"sim-{number} {('process', 'machine')[place % 2]}")


def _scrape(port: int, stop: threading.Event, outcome: Outcome) -> None:
    while not stop.wait(_SCRAPE_S):
        began = time.perf_counter()
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
        outcome.scrapes_ms.append(1e3 * (time.perf_counter() - began))
        outcome.series = sum(not line.startswith("#") for line in text.splitlines())


def _compare(outcome: Outcome, of_pods: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> None:
    """Takes each killed life together with the first line of the controller that names it before its next life joined."""
    names = {int(number): name for step in outcome.steps for number, name in step["names"].items()}
    killed = [event for event in of_pods if event["event"] == "killed"]
    for death in killed:
        lines = sorted((event["at"], event["by"]) for event in found if names.get(event["number"]) == death["name"] and event["at"] >= death["at"])
        at, by = lines[0] if lines else (None, "")
        outcome.deaths.append(Death(death["name"], death["kind"], None if at is None else at - death["at"], by))
    dead = {death["name"] for death in killed}
    outcome.false_alarms = [event["line"] for event in found if names.get(event["number"]) not in dead]


def describe(outcome: Outcome) -> str:
    """Returns the rows of a table."""
    rows = [
        f"| processor time of the controller, in a second of the run | {outcome.cpu_share:.2f} s |",
        f"| the same until all had joined, been prepared and had weights | {outcome.join_cpu_s:.1f} s in {outcome.join_s:.0f} s |",
        f"| largest resident size, loop lag | {outcome.gauges['controller/rss_bytes'] / 2**20:.0f} MiB, {outcome.gauges['controller/loop_lag_s']:.2f} s |",
        f"| `/metrics`: {outcome.series} series, median of {len(outcome.scrapes_ms)} scrapes | {statistics.median(outcome.scrapes_ms):.0f} ms |",
        f"| iterations, median seconds of an update of weights, of a rollout | {len(outcome.steps)}, "
        f"{statistics.median(step['update_s'] for step in outcome.steps):.1f}, {statistics.median(step['rollout_s'] for step in outcome.steps):.1f} |",
    ]
    for kind in ("process", "machine"):
        found = outcome.latencies(kind)
        count = sum(death.kind == kind for death in outcome.deaths)
        rows.append(
            f"| deaths of a {kind}: found, seconds until then (median, longest) | {len(found)} of {count}, {statistics.median(found):.1f}, {found[-1]:.1f} |"
        )
    rows.append(f"| pods that were called lost and lived | {len(outcome.false_alarms)} |")
    return "\n".join(rows)
