"""The controller's side of a run with simulated pods: ``python simulated_controller.py STORE FOLDER PODS LEASE_S SECONDS``.

Everything here but the trainer and the pod of the run itself is what a run uses: it leads in etcd, prepares pods that join (``Joining``), brings them weights
and rolls out over them with heartbeats and deadlines (``RolloutPods``), follows their leases (``MemberWatch``), has the watchdog and answers ``/metrics``.
Standard output has a JSON line for each iteration and each pod that was found dead, and the processor seconds of this process at each.
"""

import json
import logging
import socket
import sys
import time
from pathlib import Path
from typing import Any

from simulated_pods import sample

from tandem.jobs.exposed.run_metrics import RunMetrics
from tandem.pod.joining import Joining
from tandem.pod.rollout_pod import RolloutPod
from tandem.pod.rollout_pods import RolloutPods
from tandem.runtime.coordination.election import campaign
from tandem.runtime.coordination.membership import join
from tandem.runtime.coordination.open import open_store
from tandem.runtime.coordination.session import Session
from tandem.runtime.exposition.http_server import MetricsServer
from tandem.runtime.exposition.text import CONTENT_TYPE
from tandem.runtime.process.learned_deadline import LearnedDeadline
from tandem.runtime.process.watchdog import Watchdog
from tandem.types import Prompt
from tandem.types.wire import Frame
from tandem.types.wire_records import decode_prompts, decode_samples, encode_prompts, encode_samples

CREDENTIAL = "c0" * 32
PAUSE_S = 20.0
"""Of an iteration, in which no pod is called: the trainer's work."""
GROUPS_PER_POD, GROUP_SIZE = 2, 4
_DEADLINE_S = 240.0


def tell(**event: Any) -> None:
    sys.stdout.write(json.dumps({**event, "at": time.time(), "cpu_s": time.process_time()}) + "\n")
    sys.stdout.flush()


class OwnPod:
    """The rollout sidecar of the run's own pod, which is always there."""

    member, is_running, is_remote = "pod-0", True, True

    def __init__(self) -> None:
        self._held: list[Prompt] = []

    def call(self, name: str, meta: Any = None, blobs: Any = None, **_: Any) -> Frame:
        if name == "rollout":
            self._held = [*(self._held if meta["adds"] else ()), *decode_prompts(blobs["prompts"])]
            time.sleep(1.0)
            prompt = self._held.pop(0)
            drawn = [sample(prompt, index, (0, 0)) for index in range(GROUP_SIZE)]
            return Frame({"finished": [prompt.id], "drafts": [0, 0, 0]}, {"samples": encode_samples(drawn)})
        version = list((meta or {}).get("version", ()))
        return Frame({"version": version, "rereads": [], "kv_cache_bytes": 1, "base_bytes": 0, "seconds": 0.0, "revision": 0})

    def start(self) -> None:
        """Does nothing: it is there."""

    kill = close = start


class Found(logging.Handler):
    """Tells of each pod that the log of the controller calls lost, by its number."""

    FORMATS = ("is lost: ", "is left out", "could not be prepared")

    def emit(self, record: logging.LogRecord) -> None:
        if any(each in record.msg for each in self.FORMATS):
            (number,) = [each for each in (record.args or ()) if isinstance(each, int)]
            tell(event="found", number=number, by=record.name.rpartition(".")[2], line=record.getMessage()[:200])


def run(address: str, folder: Path, count: int, lease_s: float, seconds: float) -> None:
    for each in ("logs", "pod", "model"):
        (folder / each).mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    logging.getLogger("tandem.pod").addHandler(Found())
    metrics, listener = RunMetrics(folder.name, "grpo", True), socket.create_server(("127.0.0.1", 0))
    server = MetricsServer(listener, metrics.text, CONTENT_TYPE)
    metrics.started(str(folder), 1000, None)
    tell(event="metrics", port=server.address[1])
    store = open_store(address)
    with Session(store, lease_s) as session:
        guard = campaign(session, b"{}", 10)
        join(session, "pod-0", {"host": "127.0.0.1"})
        joining = Joining("{}", CREDENTIAL, 1, count, 1, lambda: guard.revision, _DEADLINE_S, 2 * lease_s)
        own = RolloutPod(0, OwnPod(), 1)  # type: ignore[arg-type]
        pods = RolloutPods([own], lambda: open_store(address), address, 64, _DEADLINE_S, LearnedDeadline(10, 60, _DEADLINE_S), joining)
        with Watchdog(folder, folder / "pod", metrics.waiting, memory_alarm_bytes=4 * 2**30, lag_alarm_s=5.0) as watchdog:
            pods.start()
            pods.call("start_engine", {"folder": str(folder / "model")})
            pods.least, pods.join_timeout_s = count + 1, 600.0
            pods.call("update_weight", {"version": [1, 0]})
            pods.least = 1
            tell(event="ready", pods=len(pods.there))
            ends, step = time.monotonic() + seconds, 1
            while time.monotonic() < ends:
                iterate(pods, joining, metrics, count, step)
                step += 1
            tell(event="end", gauges=watchdog.take_gauges())
        pods.close()
    server.close()


def iterate(pods: RolloutPods, joining: Joining, metrics: RunMetrics, count: int, step: int) -> None:
    began = time.monotonic()
    pods.call("update_weight", {"version": [1, step]})
    updated = time.monotonic()
    prompts = [Prompt(f"p{step}-{number}", "", (1, 2, 3)) for number in range(GROUPS_PER_POD * count)]
    meta = {"step": step, "settings": {"n": GROUP_SIZE}, "expected": [8.0] * len(prompts), "restarts_left": 10 * count}
    reply = pods.call("rollout", meta, {"prompts": encode_prompts(prompts), "unfinished": encode_samples([])}, on_progress=lambda progress: None)
    ids = [each.id for blob in reply.blobs.values() for each in decode_samples(blob)]
    assert len(ids) == len(set(ids)) == GROUP_SIZE * len(prompts), (len(ids), len(set(ids)))
    drawn = time.monotonic()
    metrics.row({"step": step, "timing_s/rollout": drawn - updated, "timing_s/step": drawn - began + PAUSE_S, "pods": len(pods.there)})
    names = {pod.number: pod.name for pod in joining.all_lives()} | {number: name for name, number in joining.numbers.items()}
    tell(event="step", step=step, pods=len(pods.there), update_s=updated - began, rollout_s=drawn - updated, names=names)
    time.sleep(PAUSE_S)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
