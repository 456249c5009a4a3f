"""What the store costs on the critical path of an iteration, in milliseconds: the embedded one beside real etcd, in the same run.

    python benchmarks/coordination.py [--repeat 300]

An iteration makes four calls, one after the other: the controller reads the key that it leads by, the trainer reads what is published, publishes the next
manifest by a compare-and-swap that is guarded by the leader's revision, and an engine reads it. The manifest is that of Qwen3-8B (399 tensors); writing and
reading its JSON is the same work with either store and not counted. Every value of
etcd is durable before the call returns (no ``--unsafe-no-fsync``). Also one call of each kind, and how long a watch takes to see a write.
"""

import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from machine import machine, write_report
from options import parser

from tandem.config.coordination import CoordinationConfig
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.runtime.coordination.election import LEADER, campaign
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Store
from tandem.types import PartEntry, TensorEntry, WeightVersion
from tandem.weight_transfer.manifest import make_manifest, to_json
from tandem.weight_transfer.publication import KEY

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from etcd_server import WHY_SKIPPED, EtcdServer, program

LIMIT_MS = 30.0
QWEN3_8B = ModelShapes("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 40960, False, qk_norm=True)


def tensors() -> list[TensorEntry]:
    """The entries of a manifest, each tensor one part with a digest of the usual length."""
    made, place = [], 0
    for number, parameter in enumerate(parameters(QWEN3_8B)):
        shape, size = parameter.shape, 2 * math.prod(parameter.shape)
        part = PartEntry(0, (0,) * len(shape), shape, f"{number:032x}")
        made.append(TensorEntry(parameter.name, "bfloat16", shape, "tandem-0123456789ab-weights-0", place, size, (part,)))
        place += size
    return made


def milliseconds(call: Callable[[int], object], repeat: int) -> tuple[float, float]:
    """The median and the 99th percentile."""
    took = []
    for number in range(repeat):
        began = time.perf_counter()
        call(number)
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took), sorted(took)[int(0.99 * len(took))]


def watch_latency(store: Store, other: Store, repeat: int) -> tuple[float, float]:
    """From the begin of a write to the return of a watch that was there before."""
    took = []
    for number in range(repeat):
        revision, seen = store.put("watched", b"0"), list[float]()
        thread = threading.Thread(target=lambda revision=revision, seen=seen: (other.watch("watched", revision, 60), seen.append(time.perf_counter())))
        thread.start()
        time.sleep(0.02)
        began = time.perf_counter()
        store.put("watched", str(number).encode())
        thread.join()
        took.append(1e3 * (seen[0] - began))
    return statistics.median(took), sorted(took)[int(0.99 * len(took))]


def measure(config: CoordinationConfig, folder: Path, repeat: int) -> dict[str, tuple[float, float]]:
    address = store_address(config, folder)
    controller, trainer, engine = open_store(address), open_store(address), open_store(address)
    entries = tensors()
    with Session(controller, 60) as session:
        guard = campaign(session, b"benchmark", 10)
        values = [to_json(make_manifest(WeightVersion(1, step), entries)) for step in range(repeat)]

        def iterate(step: int) -> None:
            leader, published = controller.get(LEADER), trainer.get(KEY)
            assert leader is not None and leader.revision == guard.revision
            trainer.compare_and_swap(KEY, None if published is None else published.revision, values[step], guard=guard)
            read = engine.get(KEY)
            assert read is not None and read.value == values[step]

        found = {f"an iteration, manifest of {len(values[0]) / 1e3:.0f} kB": milliseconds(iterate, repeat)}
        found["read"] = milliseconds(lambda _: controller.get(LEADER), repeat)
        found["write"] = milliseconds(lambda number: controller.put("small", str(number).encode()), repeat)
        found["a watch sees a write"] = watch_latency(controller, engine, 50)
    for store in (controller, trainer, engine):
        store.close()
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=300)
    chosen = options.parse_args()
    if program() is None:
        sys.exit(WHY_SKIPPED)
    with tempfile.TemporaryDirectory() as scratch:
        server = EtcdServer(Path(scratch) / "etcd").start()
        (Path(scratch) / "pod").mkdir()
        try:
            text = machine()
            rows = {
                "embedded": measure(CoordinationConfig(), Path(scratch), chosen.repeat), "etcd": measure(server.config(), Path(scratch), chosen.repeat)
            }  # fmt: skip
        finally:
            server.kill()
    lines = [f"{name} | " + " | ".join(f"{rows[store][name][0]:.2f} ({rows[store][name][1]:.2f})" for store in rows) for name in rows["etcd"]]
    cost = next(iter(rows["etcd"].values()))[0]
    table = "\n".join(f"| {line} |" for line in lines)
    report = (
        f"# The store on the critical path of an iteration\n\n{text}\n\nMilliseconds, median of {chosen.repeat} (99th percentile), manifest of "
        f"Qwen3-8B; etcd with one member on the same machine.\n\n| | embedded | etcd |\n| --- | --- | --- |\n{table}\n\n"
        f"An iteration over etcd: {cost:.1f} ms; the limit is {LIMIT_MS:.0f} ms.\n"
    )
    print(report)
    write_report("coordination", report, chosen.out)


if __name__ == "__main__":
    main()
