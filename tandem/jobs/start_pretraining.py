"""Begin a pretraining run, or go on with one: its model, its data and its end."""

import contextlib
import hashlib
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from tandem.config.pretrain import PretrainRecipe
from tandem.data.mixture import mixed
from tandem.data.shard_files import ShardFiles
from tandem.data.storage import open_storage
from tandem.data.stream import Sequence as Pieces
from tandem.data.stream import TokenStream
from tandem.data.tokenize import TokenizedDataset, tokenizer_fingerprint
from tandem.jobs.pretrain import PretrainRun, pretrain
from tandem.kernels import select
from tandem.layout.bytes import activation_bytes_per_token, optimizer_bytes, weight_bytes
from tandem.model.huggingface import load_model
from tandem.model.huggingface_config import read_shapes
from tandem.pod.create_model import create_model
from tandem.pod.new_model import folder_without_weights
from tandem.pod.residents import available_bytes
from tandem.report.run_report import report_run
from tandem.runtime.journal import Journal
from tandem.runtime.listener import Listener
from tandem.runtime.logs import setup
from tandem.runtime.metrics import MetricsFile
from tandem.runtime.numerics import check_numerics, numerics_record
from tandem.runtime.processes import available_cores
from tandem.runtime.run_lock import RunLock
from tandem.trainer.optimizer import AdamW
from tandem.trainer.save import load_checkpoint, newest_committed
from tandem.types import RunError, UserError

HELD_OUT_SEED = 0
Sequences = Callable[[int], Pieces]


@dataclass(frozen=True, slots=True)
class PretrainResult:
    """``before`` and ``loss``: nats a token on the held-out data (``None``: there is none)."""

    directory: Path
    steps: int
    before: float | None
    loss: float | None
    model: Path
    report: Path
    commands: tuple[str, ...]

    def summary(self) -> str:
        """What a person wants to know at the end."""
        held_out = ""
        if self.loss is not None and self.before is not None:
            held_out = f": held-out loss {self.before:.4f} -> {self.loss:.4f} (perplexity {math.exp(min(self.loss, 700.0)):.2f})"
        lines = [f"{self.steps} steps{held_out}", f"report: {self.report}", "try the model:", *(f"  {command}" for command in self.commands)]
        return "\n".join(lines)


def check_pretraining(recipe: PretrainRecipe) -> list[str]:
    """Refuse, before any work, what the recipe's own checks cannot see; what will be needed, a line a figure."""
    with ExitStack() as stack:
        if recipe.model.create is not None:
            folder = stack.enter_context(folder_without_weights(recipe.model.create))
        else:
            folder = Path(recipe.model.path or "")
            if not folder.is_dir():
                raise UserError(f"'model.path' is '{folder}', which is no folder; name a local Hugging Face folder")
        shapes = read_shapes(folder)
        if recipe.data.sequence_length > shapes.max_positions:
            raise UserError(f"'data.sequence_length' is {recipe.data.sequence_length}; the model has {shapes.max_positions} positions")
        datasets = [(path, ShardFiles(open_storage(path)).dataset) for path in _paths(recipe)]
        for path, dataset in datasets:
            _check_dataset(path, dataset, folder, shapes.vocab_size)
        weights = weight_bytes(shapes, recipe.trainer.dtype)
        tokens = min(recipe.trainer.micro_batch_tokens, recipe.data.sequence_length * recipe.data.sequences_per_step)
        needed = 2 * weights + optimizer_bytes(shapes) + tokens * activation_bytes_per_token(shapes)
        free = available_bytes(recipe.machine.memory_gib)
        if needed > free:
            raise RunError(
                f"this run needs {needed / 2**30:.2f} GiB and may take {free / 2**30:.2f}; lower trainer.micro_batch_tokens or raise "
                "machine.memory_gib"
            )
        total = sum(dataset.tokens for path, dataset in datasets if path != recipe.data.held_out)
        asked = recipe.run.max_steps * recipe.data.sequences_per_step * recipe.data.sequence_length
        return [
            f"data: {total:,} tokens in {len(recipe.data.train)} datasets",
            f"asked for: {asked:,} tokens, {asked / total:.2f} epochs",
            f"predicted memory: {needed / 2**20:,.0f} MiB besides the process itself",
        ]


def _check_dataset(path: str, dataset: TokenizedDataset, folder: Path, vocab_size: int) -> None:
    if dataset.vocab_size > vocab_size:
        raise UserError(f"'{path}' was tokenized with {dataset.vocab_size} ids and the model has {vocab_size}; they do not belong together")
    if (folder / "tokenizer.json").is_file() and dataset.tokenizer != tokenizer_fingerprint(folder):
        raise UserError(f"'{path}' was tokenized with another tokenizer than the model's; tokenize it again with the model's own")


def _paths(recipe: PretrainRecipe) -> list[str]:
    return [dataset.path for dataset in recipe.data.train] + ([recipe.data.held_out] if recipe.data.held_out else [])


def execute_pretraining(recipe: PretrainRecipe, directory: Path, listener: Listener, resumed: bool = False) -> PretrainResult:
    """Run ``recipe`` in ``directory``, from its newest whole checkpoint where there is one."""
    with ExitStack() as stack:
        stack.enter_context(RunLock(directory))
        setup("trainer", directory / "logs")
        journal = stack.enter_context(Journal(directory / "journal.sqlite"))
        metrics = stack.enter_context(contextlib.closing(MetricsFile(directory / "metrics.jsonl")))
        listener.started(str(directory), recipe.run.max_steps, None)
        threads = recipe.machine.threads or available_cores()
        torch.set_num_threads(threads)
        start = _start_model(recipe, directory, listener)
        sequence, held_out = _data(recipe, journal)
        kernels = select(recipe.machine.kernels)
        model = load_model(start, kernels)
        optimizer = AdamW(model.named_parameters(), recipe.trainer)
        found = newest_committed(directory / "checkpoints")
        step = 0
        if found is not None:
            load_checkpoint(found.folder, model, optimizer)
            step = found.step
        _check_numerics(journal, numerics_record(threads, kernels.name))
        journal.cut_after(step)
        metrics.cut_after(step)
        if resumed:
            journal.record_event("resume", {"step": step})
        run = PretrainRun(recipe, directory, start, model, optimizer, sequence, held_out, journal, metrics, listener, step)
        steps = pretrain(run)
        metrics.sync()
        return _finish(run, steps)


def _start_model(recipe: PretrainRecipe, directory: Path, listener: Listener) -> Path:
    if recipe.model.create is None:
        return Path(recipe.model.path or "").resolve()
    folder = directory / "models" / "initial"
    listener.phase("create_model", 0)
    create_model(recipe.model.create, recipe.run.seed, folder)
    return folder


def _data(recipe: PretrainRecipe, journal: Journal) -> tuple[Sequences, Sequences | None]:
    """The mixture and the held-out data. Refuses to go on with other data than the run began with."""
    cache = Path(recipe.data.cache) if recipe.data.cache else None
    length, streams, digests = recipe.data.sequence_length, {}, {}
    for number, path in enumerate(_paths(recipe)):
        files = ShardFiles(open_storage(path), None if cache is None else cache / f"dataset-{number}")
        held_out = path == recipe.data.held_out and number == len(recipe.data.train)
        streams[number] = TokenStream(files.dataset, files.open, seed=HELD_OUT_SEED if held_out else recipe.run.seed, length=length)
        digests[path] = hashlib.blake2b(files.dataset.to_json(), digest_size=16).hexdigest()
    saved = journal.get("data")
    if saved is None:
        journal.set("data", digests)
    elif saved != digests:
        changed = next(path for path in {**saved, **digests} if saved.get(path) != digests.get(path))
        raise UserError(f"the data '{changed}' is not what this run began with; restore it or start a new run")
    count = len(recipe.data.train)
    weights = [dataset.weight for dataset in recipe.data.train]
    train = cast("Sequences", mixed([streams[i].sequence for i in range(count)], weights, recipe.run.seed))
    return train, streams[count].sequence if count in streams else None


def _check_numerics(journal: Journal, now: dict[str, str | int]) -> None:
    saved = journal.get("numerics")
    if saved is None:
        journal.set("numerics", now)
    else:
        check_numerics(saved, now)


def _finish(run: PretrainRun, steps: int) -> PretrainResult:
    model = run.export()
    evaluations = [result["loss"] for _, kind, result in run.journal.evaluations() if kind == "held_out"]
    commands = (f'tandem generate {model} --prompt "import " --max-tokens 64',)
    run.journal.set("commands", list(commands))
    report = report_run(run.directory)
    before, after = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    return PretrainResult(run.directory, steps, before, after, model, report, commands)
