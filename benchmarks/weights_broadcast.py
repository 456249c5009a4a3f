"""Seconds until N engines of one host have a published version: each verifying a copy of its own, or all taking it from the shared memory, verified once.

Engines are processes of their own, as rollout workers are, which the benchmark drives as their shim does. What an engine does with the tensors then (it
packs them for its kernels) is not in the time.
"""

import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from weight_update import MODELS, shards_of, train

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.parallel.ranks import alone
from tandem.types import WeightVersion
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.update import WeightReader
from tandem.weight_transfer.verify import PublishedVerifier

ENGINES = 1, 4


def engine(folder: Path, threads: int) -> None:
    """One engine: ``copy STEP`` or ``take STEP`` on a line of its input, the revision on its output."""
    reader = WeightReader(EmbeddedStore(folder / "store.sqlite"), threads)
    print("ready", flush=True)
    for line in sys.stdin:
        how, step = line.split()
        if how == "forget":
            print(forget(reader), flush=True)
            continue
        version = WeightVersion(1, int(step))
        print((reader.read if how == "copy" else reader.view)(version).revision, flush=True)


def forget(reader: WeightReader) -> int:
    """Makes ``reader`` read everything again, into the memory that it has."""
    reader._held.clear()
    return 0


class Engines:
    def __init__(self, folder: Path, count: int, threads: int) -> None:
        command = [sys.executable, __file__, str(folder), str(threads)]
        self.processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        assert {self._answer(process) for process in self.processes} == {"ready\n"}

    def _answer(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def ask(self, line: str, count: int) -> list[int]:
        for process in self.processes[:count]:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return [int(self._answer(process)) for process in self.processes[:count]]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def broadcast(name: str, repeat: int, threads: int) -> str:
    """The table."""
    model = MODELS[name]
    shards = shards_of(model)
    placed = place_shards(alone().world, shards, [shard.name for shard in shards])
    seconds: dict[tuple[str, int], list[float]] = {(how, count): [] for how in ("copy", "take") for count in ENGINES}
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        store, buffers = EmbeddedStore(folder / "store.sqlite"), WeightBuffers.create("bench" + uuid.uuid4().hex[:8], segment_bytes(model, "float32"))
        writer, verifier, engines = WeightWriter(buffers, store, threads), PublishedVerifier(store, threads), Engines(folder, max(ENGINES), threads)
        try:
            for step in range(repeat + 2):
                version = WeightVersion(1, step)
                train(shards)
                writer.publish(placed, version)
                for how, count in seconds:
                    if how == "copy":
                        # An engine that held the version would not copy it again.
                        engines.ask("forget 0", max(ENGINES))
                    began = time.perf_counter()
                    revisions = engines.ask(f"{how} {step}", count)
                    if how == "take":
                        verifier.verify(version, set(revisions))
                    if step > 1:  # The first use of each of two buffers is cold.
                        seconds[how, count].append(time.perf_counter() - began)
        finally:
            engines.close()
            verifier.close()
            writer.close()
            store.close()
    lines = ["| engines of one host | one, ms | four, ms | four / one | bytes of private copies |", "| --- | --- | --- | --- | --- |"]
    for how, title in (("copy", "each verifies a copy of its own"), ("take", "taken from the shared memory, verified once")):
        one, four = (statistics.median(seconds[how, count]) for count in ENGINES)
        lines.append(f"| {title} | {one * 1e3:.0f} | {four * 1e3:.0f} | {four / one:.2f} | {'4 x the model' if how == 'copy' else 'none'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    engine(Path(sys.argv[1]), int(sys.argv[2]))
