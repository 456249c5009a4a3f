"""Check that a trainer's weights reach engines unchanged, for any two layouts, without a training job.

'tandem weights check' fills a model with random numbers, starts the two sidecars of a pod, publishes the weights as the trainer's ranks
hold them, and updates the engines. The trainer then takes a step, and both versions go the same way. Every digest that was published
is compared with the Hugging Face folder, and every tensor that an engine's rank holds, also quantized, with that of an engine that read the
folder itself. Nothing may be missing, unexpected, different, stale or tied wrongly.

--trainer takes keys of a recipe's sections parallel and trainer, --rollout workers, backend, dtype and keys of rollout.engine, as
KEY=VALUE,KEY=VALUE. With backend=vllm a real vLLM is updated and compared with one that has read the folder by its own loaders.
With --all every pair of a table of layouts is checked that this machine can hold, or those with the --trainer or --rollout that is given.
The exit status is 0 if all is right, and 1 if not.

examples:
  tandem weights check --trainer tensor=2,pipeline=2 --rollout tensor_parallel_size=2,quantization=int8,dtype=bfloat16
  tandem weights check --trainer data=2,zero=1 --sleep 2 --model recipes/sort.yaml
  tandem weights check --trainer lora.rank=8 --model models/qwen
  tandem weights check --all --json
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.types import RunError, UserError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tandem.jobs.weights_check.layouts import LayoutPair

RESULTS = {"ok": "ok", "wrong": "WRONG", "failed": "FAILED", "refused": "refused", "too large": "too large"}


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    check = actions.add_parser(
        "check", help="compare what engines hold with the folder of the same numbers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    check.add_argument("--trainer", metavar="LAYOUT", help="for example tensor=2,pipeline=2 (default: one rank)")
    check.add_argument("--rollout", metavar="LAYOUT", help="for example tensor_parallel_size=2,quantization=int8 (default: one rank)")
    check.add_argument("--sleep", type=int, choices=(0, 1, 2), help="the level at which the engine sleeps between two updates (default: 0, awake)")
    check.add_argument(
        "--model", metavar="MODEL", help="a Hugging Face folder, a model of the Hub, or a recipe, whose section model is used (default: a small model)"
    )
    check.add_argument("--all", action="store_true", help="check every pair of a table of layouts")
    check.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    check.add_argument("--threads", type=int, default=0, help="of each sidecar (default: the cores)")
    check.add_argument("--inline", action="store_true", help="both sidecars in this process, for a debugger and layouts of one rank")
    check.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the folders and logs of each pair in this new folder")
    check.add_argument("--json", action="store_true", help="print one JSON object for each pair")


def run(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from tandem.jobs.weights_check.layouts import LayoutPair, recipe_of_pair
    from tandem.jobs.weights_check.table import pairs_of
    from tandem.model.huggingface.model_config import read_shapes
    from tandem.runtime.process.temporary import temporary_folder

    with contextlib.ExitStack() as stack:
        folder = options.keep or stack.enter_context(temporary_folder())
        if options.keep is not None:
            if folder.exists():
                raise UserError(f"--keep is '{folder}', which exists; name a new folder")
            folder.mkdir(parents=True)
        pairs = [LayoutPair(options.trainer or "", options.rollout or "", options.sleep or 0)]
        if not options.all:
            # A layout that cannot be is refused before a model is made.
            recipe_of_pair(pairs[0], folder, options.seed, options.threads)
        model = _model(options, folder)
        if options.all:
            pairs = list(pairs_of(read_shapes(model), options.trainer, options.rollout, options.sleep))
        console = Console(stderr=True)
        progress = stack.enter_context(Progress(console=console, transient=True, disable=not sys.stderr.isatty()))
        bar, rows = progress.add_task("weights check", total=len(pairs)), list[dict[str, Any]]()
        for number, pair in enumerate(pairs):
            row = _row(options, pair, model, folder / f"pair-{number}", partial(_show, progress, bar, pair.title))
            rows.append(row)
            if options.json:
                print(json.dumps(row), flush=True)
            progress.advance(bar)
    if not options.json:
        print("\n".join(_table(rows)))
    return int(any(row["result"] in ("wrong", "failed") for row in rows))


def _show(progress: "Progress", bar: "TaskID", title: str, step: str) -> None:
    progress.update(bar, description=f"{title}: {step}")


def _row(options: argparse.Namespace, pair: "LayoutPair", model: Path, directory: Path, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Returns the result of one pair. With ``--all`` a pair that a recipe refuses or that fails is a row; else its error is the command's."""
    from tandem.jobs.weights_check.pair import PairCheck
    from tandem.jobs.weights_check.table import why_not_held
    from tandem.model.huggingface.model_config import read_shapes

    began, row = time.monotonic(), {"trainer": pair.trainer, "rollout": pair.rollout, "sleep": pair.sleep, "model": options.model or ""}
    try:
        check = PairCheck(pair, model, directory, seed=options.seed, threads=options.threads, inline=options.inline, on_step=on_step)
        if (why := why_not_held(check.recipe, read_shapes(model))) and options.all:
            return {**row, "result": "too large", "found": [why]}
        if why:
            raise UserError(f"{pair.title} {why}; choose a smaller model or fewer ranks")
        directory.mkdir()
        report = check.run()
    except UserError as error:
        if not options.all:
            raise
        return {**row, "result": "failed" if isinstance(error, RunError) else "refused", "found": [str(error)]}
    measured = {"tensors": report.tensors, "bytes": report.size_bytes, "digests": report.digests, "seconds": round(time.monotonic() - began, 1)}
    return {**row, "result": "wrong" if report.found else "ok", "found": list(report.found), **measured}


def _model(options: argparse.Namespace, folder: Path) -> Path:
    """Returns the folder of the model whose shapes are used; one that a recipe creates is made in ``folder``."""
    from tandem.config.bundled import recipe_file
    from tandem.config.model import NewModelConfig
    from tandem.config.recipe import load_config
    from tandem.model.create_model import create_model

    name, create = options.model, NewModelConfig()
    if name is not None:
        if not recipe_file(name).is_file():
            return _declared(name)
        section = load_config(name).model
        if section.implemented_by.is_transformers:
            raise UserError(f"'{name}' has model.implementation 'transformers', whose weights are not checked; name a recipe or a folder without it")
        if section.path is not None:
            return _declared(section.path)
        assert section.create is not None
        create = section.create
    create_model(create, options.seed, folder / "model")
    return folder / "model"


def _declared(name: str) -> Path:
    """Returns the folder of the model ``name``. Raises ``UserError`` for a family that Tandem's own network does not compute."""
    from tandem.model.family import family_of_config
    from tandem.model.huggingface.model_config import read_json
    from tandem.model.model_source import find_model

    folder = find_model(name, "model", option="--model FOLDER")
    family_of_config(read_json(folder / "config.json"), str(folder / "config.json"), ", and the weights of these alone are checked; name a folder of one")
    return folder


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each pair, below it what is wrong, and a last line of counts."""
    cells = [["", "trainer", "rollout", "sleep", "tensors", "digests", "seconds"]]
    for row in rows:
        measured = [str(row.get(key, "")) for key in ("tensors", "digests", "seconds")]
        cells.append([RESULTS[row["result"]], row["trainer"] or "one rank", row["rollout"] or "one rank", str(row["sleep"] or ""), *measured])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    for place in reversed(range(len(rows))):
        lines[place + 2 : place + 2] = [f"{' ' * widths[0]}  {line}" for line in rows[place]["found"]]
    counts = {result: sum(row["result"] == result for row in rows) for result in RESULTS}
    return [*lines, f"{len(rows)} pair{'s' * (len(rows) > 1)}: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)]
