"""What commands make of absurd values and files: of each key of a recipe and of a gateway's file, each option that takes a value, each file that is read.

    python benchmarks/absurd_values.py [--every N] [--only recipes gateway options special lines changes] [--names metrics. traces]

Each case is the command in a process of its own. It must end within 10 s of computing, with less than 1 GiB of resident memory (5 GiB with a line of 1
GiB), by exit status 0, 1 or 2, and with at most one line on standard error: `tandem: ...`. What ends otherwise is a defect: a traceback, a hang, an
abort (a signal), memory, several lines.

Recipes: `tandem train RECIPE --dry-run` with one key of a recipe of reinforcement learning, or of a section that pretraining and fine-tuning check
otherwise, at each of some 28 numbers (0, -1, 1, 2^31, 2^63, 1e18, 1e308, nan, inf, 400 and 5,000 digits, other types) or 20 texts (empty, 100,000
characters, NUL, lone surrogates, bytes that are not UTF-8, devices, line breaks, escape sequences). Where another key must be set for it to be read, it is.

Gateway: `tandem gateway FILE --check` before a server that is ready, with one key of the file, or of an entry of a list or mapping in it, at the same values.

Options: each option of each command at the same values. Files: each file that a command reads, replaced by a FIFO, a device, a sparse file of 1 TiB, a
YAML bomb, 100,000 nested brackets, numbers of 5,000 digits and others, with a line of 1 GiB where lines are read, and changed at random (bits flipped, bytes
removed, repeated or replaced).

It is the machinery of `tests/cli/test_cli_absurd_values.py` and `test_cli_absurd_*files.py`. The exit status is 1 where there is a defect.
"""

import importlib
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from options import parser as shared_parser

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cli"))

# isort: split
from absurd import FILE_OF_CASE, Case, Outcome, gateway_cases, make_folder, option_cases, recipe_cases, run_forked
from absurd_files import (
    MOST_BYTES_OF_A_LINE,
    SPECIAL,
    command_lines,
    damaged_cases,
    make_files,
    one_line_of_a_gibibyte,
    places_in,
    run_case,
    special_cases,
)

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe

LOADED = ("tandem.jobs.start", "tandem.jobs.display")
LOADED_OF_GATEWAY = ("tandem.gateway.check",)
LOADED_WITH_TORCH = (
    "tandem.engine.llm", "tandem.evaluation.tasks", "tandem.evaluation.perplexity", "tandem.pod.prompts",
    "tandem.data.tokenizing.tokenize", "tandem.data.tokenizing.train_tokenizer", "tandem.model.quantization.quantize", "tandem.jobs.convert",
    "tandem.jobs.weights_check.pair",
)  # fmt: skip
"""What the commands import, loaded once before their processes are forked. A process with torch is forked ten times as slowly."""
OF_DATA = ("algorithm", "data", "demonstrations", "evaluation", "model.path", "model.max", "parallel", "checkpoint")
"""Sections that training on data checks otherwise than reinforcement learning; the others are those of its recipe."""
NAMES = [""]
"""What one of the keys or options to be run has in its name."""
CHANGES = 20
"""Random changes of each file."""
READY_SERVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Ready)
print(server.server_port, flush=True)
server.serve_forever()
"""
VALID = {(f"{command} --port", port) for command in ("serve", "gateway") for port in ("0", "1", "1_0")}
GOOD, DEFECTS = ("accepted", "refused", "failed"), ("traceback", "hang", "abort", "memory", "lines", "status")


class Done(NamedTuple):
    """``part``: of the table. ``name``: of the key, option or file. ``value``: what it was given."""

    part: str
    name: str
    value: str
    outcome: Outcome


def recipes(folder: Path, scratch: Path, every: int) -> Iterator[Done]:
    tokens = folder / "tokens"
    done = run_forked(("tokenize", str(folder / "data"), str(tokens), "--tokenizer", str(folder / "model"), "--workers", "1"))
    assert done.code == 0, done
    held = f"{{algorithm: {{name: pretrain}}, model: {{path: {folder / 'model'}}}, data: {{train: [{{path: {tokens}}}], held_out: {tokens}, "
    (folder / "pretrain.yaml").write_text(held + "sequence_length: 32, global_batch_size: 2}, run: {max_steps: 1}, machine: {threads: 1}}")
    sft = "{algorithm: {name: sft}, model: {path: %s}, task: {name: sort}, data: {sequence_length: 64, global_batch_size: 2}, run: {max_steps: 1}}"
    (folder / "sft.yaml").write_text(sft % (folder / "model"))
    yield from run_all("recipes of reinforcement learning", recipe_cases(Recipe, folder / "recipe.yaml"), scratch, every)
    for part, name, of in (("recipes of pretraining", "pretrain", ("run", *OF_DATA)), ("recipes of fine-tuning on a task", "sft", ("task", *OF_DATA))):
        cases = recipe_cases(PretrainRecipe, folder / f"{name}.yaml")
        yield from run_all(part, (case for case in cases if case.name.startswith(of)), scratch, every)


def options(folder: Path, scratch: Path, every: int) -> Iterator[Done]:
    cases = option_cases(command_lines(str(folder / "model"), str(folder / "data")))
    # A port that is valid serves until it is ended.
    yield from run_all("options of commands", (case for case in cases if (case.name, case.value) not in VALID), scratch, every)


def gateway(folder: Path, scratch: Path, every: int) -> Iterator[Done]:
    # A server that is ready, of its own process, as a fork has no threads.
    server = subprocess.Popen([sys.executable, "-c", READY_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield from run_all("files of a gateway", gateway_cases(f"http://127.0.0.1:{int(server.stdout.readline())}"), scratch, every)
    finally:
        server.kill()
        server.wait()


def run_all(part: str, cases: Iterable[Case], scratch: Path, every: int) -> Iterator[Done]:
    # Four folders deep, so that "../../.." stays inside.
    work = scratch / "a" / "b" / "c" / "work"
    seen: set[str] = set()
    for number, case in enumerate(cases):
        # Of each key and option at least the first value.
        if (number % every and case.name in seen) or not any(name in case.name for name in NAMES):
            continue
        seen.add(case.name)
        folder = make_folder(work)
        if case.content:
            (folder / FILE_OF_CASE).write_text(case.content, "utf-8", "surrogateescape")
        yield Done(part, case.name, case.value, run_forked(case.arguments, cwd=folder))


def special(folder: Path, scratch: Path, every: int) -> Iterator[Done]:
    for case in special_cases(folder, scratch, places_in(folder), every):
        yield Done("special files", case.place.name, case.kind, case.outcome)


def long_lines(folder: Path, scratch: Path, every: int) -> Iterator[Done]:
    for place in (place for place in places_in(folder) if place.path.endswith((".jsonl", ".yaml"))):
        outcome = run_case(folder, scratch, place, one_line_of_a_gibibyte, limit_s=20)
        yield Done("a line of 1 GiB", place.name, "", outcome._replace(most_bytes=MOST_BYTES_OF_A_LINE))


def changes(folder: Path, scratch: Path, every: int) -> Iterator[Done]:
    for case in damaged_cases(folder, scratch, places_in(folder), -(-CHANGES // every)):
        yield Done("random changes of files", case.place.name, case.kind, case.outcome)


PARTS = {"recipes": recipes, "gateway": gateway, "options": options, "special": special, "lines": long_lines, "changes": changes}


def table(done: list[Done]) -> str:
    rows = ["| part | names | cases | accepted | refused (exit 2) | failed (exit 1) | defects | slowest, CPU | largest |", "|" + " --- |" * 9]
    for part in dict.fromkeys(one.part for one in done):
        of = [one for one in done if one.part == part]
        kinds = Counter(one.outcome.kind for one in of)
        counts = " | ".join(f"{kinds[kind]:,}" for kind in GOOD)
        slowest, largest = max(one.outcome.cpu_s for one in of), max(one.outcome.peak_bytes for one in of)
        defects = sum(kinds[kind] for kind in DEFECTS)
        rows.append(f"| {part} | {len({one.name for one in of}):,} | {len(of):,} | {counts} | {defects} | {slowest:.1f} s | {largest / 2**20:,.0f} MiB |")
    total = Counter(one.outcome.kind for one in done)
    counts = " | ".join(f"{total[kind]:,}" for kind in GOOD)
    rows.append(f"| **all** | | {len(done):,} | {counts} | **{sum(total[kind] for kind in DEFECTS)}** | | |")
    return "\n".join(rows)


def report(done: list[Done], every: int) -> str:
    from machine import machine

    defects = [
        f"- {one.part}, {one.name}, {one.value[:60]!a}: {one.outcome.kind}; {one.outcome.err[-200:]!a}"
        for one in done if one.outcome.kind in DEFECTS
    ]  # fmt: skip
    about = (__doc__ or "").split("\n\n", 2)
    return "\n\n".join(
        [
            "# Absurd values and files", about[0], machine(), *([f"One in {every} of the cases was run."] if every > 1 else []), table(done), *about[2:3],
            f"Kinds of special files: {', '.join(SPECIAL)}.", *(["Defects:\n\n" + "\n".join(defects)] if defects else []),
        ]
    )  # fmt: skip


def run_part(name: str, files: Path, every: int, names: list[str]) -> list[Done]:
    """Returns the cases of part ``name``, in a copy of the folder ``files``; with ``every`` N, one in N of them. ``names``: see ``NAMES``."""
    NAMES[:] = names
    for module in LOADED_OF_GATEWAY if name == "gateway" else LOADED if name == "recipes" else (*LOADED, *LOADED_WITH_TORCH):
        importlib.import_module(module)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    done: list[Done] = []
    with TemporaryDirectory(prefix="absurd-") as temporary:
        folder, scratch = Path(temporary) / "files", Path(temporary) / "scratch"
        shutil.copytree(files, folder)
        scratch.mkdir()
        for one in PARTS[name](folder, scratch, every):
            done.append(one)
            if one.outcome.kind in DEFECTS:
                print(f"{one.part}, {one.name}, {one.value[:60]!a}: {one.outcome.kind} {one.outcome.err[-300:]!a}", flush=True)
    return done


def main() -> int:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one in N of the cases, with values that differ from key to key (default: 1, all)")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--names", nargs="+", default=[""], metavar="TEXT", help="only keys and options that have one of these in their name")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="absurd-") as temporary, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        # It needs torch, which this process and that of the recipes do without.
        pool.submit(make_files, Path(temporary)).result()
        parts = [pool.submit(run_part, name, Path(temporary), given.every, given.names) for name in given.only]
        done = [one for part in parts for one in part.result()]
    from machine import write_report

    print(write_report("absurd-values", report(done, given.every), given.out))
    return int(any(one.outcome.kind in DEFECTS for one in done))


if __name__ == "__main__":
    sys.exit(main())
