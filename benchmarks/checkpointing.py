"""Checkpoints of one process: how long training stands still, and how fast the bytes reach the disk.

    python benchmarks/checkpointing.py [--mib 500] [--rounds 9] [--work runs/bench]

The state is fp32 weights and two moments. Every round, taking turns: ours synchronous, ours asynchronous, ``torch.distributed.checkpoint``'s
``save`` and ``async_save`` (with its staging buffers kept, which is its fastest), and ``dd`` with fsync of a file of the same size, read
from memory. The stall is the time that a save keeps the caller; it is measured when nothing else is under way. Ours digests every chunk,
flushes, reads all of it back from the disk and compares it before it commits; the peer flushes and does neither. The system's dirty pages are
flushed before each side. Medians of the rounds, the
first of which (cold buffers) is left out; the best in brackets.
"""

import datetime
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine import machine, write_report
from options import parser as shared_parser
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tandem.layout.shard_offsets import whole_offsets
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.format.shard import Key, Shard

ALONE = Communicator("world", 0, 1, None, 60.0)
STATES = ("weights", "exp_avg", "exp_avg_sq")


def state_of(mebibytes: int) -> dict[str, torch.Tensor]:
    """Tensors of a decoder's sizes, ``mebibytes`` in all."""
    rows = mebibytes * 2**20 // (4 * 1024 * len(STATES) * 16)
    generator = torch.Generator().manual_seed(0)
    return {f"{state}/layers.{i}.weight": torch.randn(rows, 1024, generator=generator) for state in STATES for i in range(16)}


class Ours:
    def __init__(self, folder: Path, state: dict[str, torch.Tensor], asynchronous: bool) -> None:
        self.shards = []
        for name, tensor in state.items():
            kind, _, parameter = name.partition("/")
            self.shards.append(Shard(Key(kind, parameter), tuple(tensor.shape), whole_offsets(tuple(tensor.shape)), tensor))
        self.marks: dict[str, float] = {}
        self.checkpointer = Checkpointer(folder, 1, ALONE, {}, asynchronous=asynchronous, fault_point=self.mark)
        self.checkpointer.prepare(self.shards)
        self.step = 0

    def mark(self, name: str) -> None:
        self.marks[name.rpartition(":")[0]] = time.perf_counter()

    def save(self) -> dict[str, float]:
        self.step += 1
        began = time.perf_counter()
        stall = self.checkpointer.save(self.step, self.shards, {"updates": self.step})
        self.checkpointer.wait()
        self.checkpointer.take_committed()
        whole = time.perf_counter() - began
        return {"stall": stall, "whole": whole, "write": self.marks["after:checkpoint_write"] - self.marks["before:checkpoint_write"]}


def peer_save(folder: Path, state: dict[str, torch.Tensor]) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    dcp.save(state, checkpoint_id=str(folder))
    return {"stall": time.perf_counter() - began, "whole": time.perf_counter() - began}


def peer_async(folder: Path, state: dict[str, torch.Tensor], stager: Any) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    found: Any = dcp.async_save(state, checkpoint_id=str(folder), async_stager=stager)
    # The state may change when it is staged.
    staged = getattr(found, "staging_completion", None)
    if staged is not None:
        staged.result()
    stall = time.perf_counter() - began
    getattr(found, "upload_completion", found).result()
    return {"stall": stall, "whole": time.perf_counter() - began}


def dd(source: Path, target: Path) -> dict[str, float]:
    target.unlink(missing_ok=True)
    began = time.perf_counter()
    subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync"], check=True, capture_output=True)
    return {"write": time.perf_counter() - began}


def main() -> None:
    parser = shared_parser(__doc__ or "", work="checkpoints are")
    parser.add_argument("--mib", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    described = machine()
    state = state_of(options.mib)
    size = sum(tensor.nbytes for tensor in state.values())
    work = options.work / "checkpointing"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    source = Path("/dev/shm") / f"checkpointing-{os.getpid()}"
    source.write_bytes(os.urandom(size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False))
    synchronous, asynchronous = Ours(work / "sync", state, False), Ours(work / "async", state, True)
    sides: dict[str, Callable[[], dict[str, float]]] = {
        "ours, synchronous": synchronous.save, "ours, asynchronous": asynchronous.save, "DCP save": lambda: peer_save(work / "dcp", state),
        "DCP async_save": lambda: peer_async(work / "dcp-async", state, stager), "dd with fsync": lambda: dd(source, work / "dd"),
    }  # fmt: skip
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    try:
        draw = random.Random(0)
        for _ in range(options.rounds + 1):
            for name in draw.sample(list(sides), len(sides)):
                # What the side before has left to the disk, the removal of its files too, is not of this one.
                os.sync()
                measured[name].append(sides[name]())
    finally:
        source.unlink()
        shutil.rmtree(work, ignore_errors=True)
        dist.destroy_process_group()

    def of(name: str, what: str) -> tuple[float, float]:
        values = [found[what] for found in measured[name][1:]]
        return statistics.median(values), min(values)

    def cell(name: str, what: str) -> str:
        return "" if what not in measured[name][0] else "{:.3f} ({:.3f})".format(*of(name, what))

    rows = [f"| {name} | {cell(name, 'stall')} | {cell(name, 'write')} | {cell(name, 'whole')} |" for name in sides]
    sync, stall, theirs = of("ours, synchronous", "whole"), of("ours, asynchronous", "stall"), of("DCP async_save", "stall")
    write, plain = of("ours, asynchronous", "write"), of("dd with fsync", "write")
    ratios = [
        ("stall, asynchronous / synchronous", stall[0] / sync[0], "at most 0.25"),
        ("stall, ours / DCP async_save", stall[0] / theirs[0], ""),
        ("bytes a second, digested, written and flushed, ours / dd with fsync", plain[0] / write[0], "at least 0.70"),
        ("the same, best rounds", plain[1] / write[1], ""),
        ("bytes a second to the commit, read back too, ours / dd with fsync", plain[0] / sync[0], ""),
    ]
    text = "\n".join(
        [
            "# Checkpoints: the stall, and the way to the disk", "", f"{datetime.date.today()}. {described}", "",
            f"{size / 2**20:.0f} MiB of state; seconds, median of {options.rounds} rounds, the best in brackets.", "",
            "| side | stall | write and flush | until it is safe |", "|---|---|---|---|", *rows, "", "| ratio | | target |", "|---|---|---|",
            *(f"| {what} | {value:.2f} | {target} |" for what, value, target in ratios), "",
            f"dd with fsync: {size / plain[0] / 2**20:.0f} MiB/s. Safe means for ours committed after every byte was read back from the disk, for DCP written.",
        ]
    )  # fmt: skip
    print(text)
    print(f"wrote {write_report('checkpointing', text, options.out)}")


if __name__ == "__main__":
    main()
