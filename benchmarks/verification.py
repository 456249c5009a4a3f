"""What verification costs: ``tandem verify`` beside hashing the same files with xxh3-128, and the journal's digests beside a step.

    python benchmarks/verification.py [--megabytes 2000] [--rounds 5]

A run of one checkpoint of the given size is verified, in process and as a command; the peer reads the same files once and hashes
them with ``xxhash``. Both read from the page cache. The second table takes the rows, transitions and commits of a step of
``recipes/sort.yaml``, and writes them to a journal with its chain of digests and to one without.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import xxhash
from machine import ROOT, best_and_median, machine, write_report
from options import parser as shared_parser

from tandem.jobs.verify.verify_run import parts_of
from tandem.runtime.records import journal as journal_module
from tandem.runtime.records.chained_tables import ChainedTables
from tandem.runtime.records.journal import Journal
from tandem.types import FinishReason, Sample, Score, ScoreState, WeightVersion

VERIFY_GATE, STEP_GATE = 1.2, 0.01
TRANSITIONS = 14
"""Transitions of one step of a pod whose engine is kept."""


def make_run(folder: Path, megabytes: int) -> Path:
    """Trains one step of a model whose checkpoint has about the given size, in fp32 with AdamW: 12 bytes a parameter."""
    hidden = 512
    layers = max(1, int(megabytes * 1e6 / 12 / (12 * hidden * hidden)))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
algorithm: {{name: sft}}
model: {{create: {{architecture: qwen3, hidden_size: {hidden}, num_hidden_layers: {layers}, num_attention_heads: 8, num_key_value_heads: 8,
  head_dim: 64, intermediate_size: {4 * hidden * 2 // 3}}}}}
task: {{name: sort}}
data: {{sequence_length: 32, global_batch_size: 1}}
checkpoint: {{every_steps: 1, keep: 1}}
run: {{max_steps: 1, name: run, directory: {folder}}}
"""
    )
    subprocess.run([sys.executable, "-m", "tandem.cli.main", "train", str(recipe)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder / "run"


def hash_files(run: Path) -> int:
    """Reads what ``tandem verify`` reads, one file after the other, and hashes it. Returns the number of bytes."""
    total, memory = 0, memoryview(bytearray(1 << 20))
    for path in sorted(run.rglob("*")):
        if path.is_file() and "logs" not in path.parts and path.name not in ("report.html", "lock"):
            digest = xxhash.xxh3_128()
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(memory):
                    digest.update(memory[:count])
                    total += count
            digest.hexdigest()
    return total


def verify(run: Path) -> None:
    assert [finding for part in parts_of(run) for finding in part.verify()] == []


def timed(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def step_of(journal: Journal, step: int) -> None:
    """Journals what a step of ``recipes/sort.yaml`` does: 512 samples of 14 tokens, their scores, its transitions and its row."""
    version = (WeightVersion(1, step),) * 14
    ids, logprobs = tuple(range(14)), tuple(-0.1 * i for i in range(14))
    samples = [Sample(f"{step}/p/{i}", "p", i, ids, ids, logprobs, logprobs, version, FinishReason.STOP, "x" * 14) for i in range(512)]
    scores = [Score(sample.id, ScoreState.NUMBER, 0.5, {"match": 0.5}, None) for sample in samples]
    for number in range(TRANSITIONS):
        with journal.transition(step, "trainer", f"state-{number}") as detail:
            detail["bytes"] = number
    journal.commit_samples(step, samples)
    journal.commit_scores(step, scores)
    journal.record_row(step, "0" * 32)


class WithoutChain(ChainedTables):
    """The same tables with no entries and no head."""

    def _append(self, table: str, key: str, content: bytes) -> None:
        pass

    def _write_head(self, is_durable: bool) -> None:
        pass


def journal_seconds(folder: Path, tables: type[ChainedTables], steps: int) -> float:
    journal_module.ChainedTables = tables  # type: ignore[misc, attr-defined]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with Journal(folder / "journal.sqlite") as journal:
        step_of(journal, 0)
        began = perf_counter()
        for step in range(1, steps + 1):
            step_of(journal, step)
        return (perf_counter() - began) / steps


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--megabytes", type=int, default=2000, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.42, help="seconds of a step of recipes/sort.yaml on this machine (make run)")
    options = parser.parse_args()
    described = machine()
    found: dict[str, list[float]] = {name: [] for name in ("hash", "verify", "command", "chained", "plain")}
    with tempfile.TemporaryDirectory(dir=options.folder if hasattr(options, "folder") else None) as name:
        folder = Path(name)
        run = make_run(folder, options.megabytes)
        size = hash_files(run)
        for _ in range(options.rounds):
            found["hash"].append(timed(lambda: hash_files(run)))
            found["verify"].append(timed(lambda: verify(run)))
            found["command"].append(
                timed(lambda: subprocess.run([sys.executable, "-m", "tandem.cli.main", "verify", str(run)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL))
            )
            found["chained"].append(journal_seconds(folder / "journal", ChainedTables, 20))
            found["plain"].append(journal_seconds(folder / "journal", WithoutChain, 20))
    best, median = ({name: best_and_median(values)[index] for name, values in found.items()} for index in (0, 1))
    ratio, cost = median["verify"] / median["hash"], (median["chained"] - median["plain"]) / options.step_seconds
    text = "\n".join(
        [
            "# Verification", "", described, "", f"A run of {size / 1e6:,.0f} MB in the page cache, {options.rounds} rounds taken in turn.", "",
            "| | best s | median s | GB/s (median) |", "|---|---|---|---|",
            *(f"| {label} | {best[name]:.3f} | {median[name]:.3f} | {size / median[name] / 1e9:.2f} |" for name, label in (
                ("hash", "xxh3-128 of the files, one thread"), ("verify", "verification of the run"), ("command", "`tandem verify`, with its start"))),
            "", f"Verification takes {ratio:.2f} of the time of hashing (at most {VERIFY_GATE}): {'met' if ratio <= VERIFY_GATE else 'MISSED'}.", "",
            "| journal of a step | best ms | median ms |", "|---|---|---|",
            *(f"| {label} | {1e3 * best[name]:.2f} | {1e3 * median[name]:.2f} |" for name, label in (
                ("chained", "with the chain of digests"), ("plain", "the same tables without it"))),
            "", f"The chain costs {1e3 * (median['chained'] - median['plain']):.2f} ms, {100 * cost:.2f} % of a step of {options.step_seconds:g} s "
            f"(at most {100 * STEP_GATE:g} %): {'met' if cost <= STEP_GATE else 'MISSED'}.",
        ]
    )  # fmt: skip
    print(text)
    print(f"wrote {write_report('verification', text, options.out)}")


if __name__ == "__main__":
    main()
