"""Begin a pretraining run, or go on with one: its model, its data and its end."""

import contextlib
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch

from tandem.config.pretrain import PretrainRecipe
from tandem.data.mixture import mixed
from tandem.data.shard_files import ShardFiles
from tandem.data.stream import Sequence as Pieces
from tandem.data.stream import TokenStream
from tandem.jobs.pretrain import PretrainRun, pretrain
from tandem.jobs.pretrain_checkpoints import RunCheckpoints
from tandem.jobs.pretrain_inputs import dataset_paths
from tandem.jobs.pretrain_result import PretrainResult
from tandem.kernels import select
from tandem.kernels.mixed import in_precision, is_emulated
from tandem.model.huggingface import load_model
from tandem.pod.create_model import create_model
from tandem.report.run_report import report_run
from tandem.runtime.journal import Journal
from tandem.runtime.listener import Listener
from tandem.runtime.logs import setup
from tandem.runtime.metrics import MetricsFile
from tandem.runtime.numerics import check_numerics, numerics_record
from tandem.runtime.processes import available_cores
from tandem.runtime.run_lock import RunLock
from tandem.storage.files import open_storage
from tandem.trainer.guard import StepGuard
from tandem.trainer.optimizers import make_optimizer
from tandem.trainer.parallel.ranks import alone
from tandem.types import UserError

HELD_OUT_SEED = 0
Sequences = Callable[[int], Pieces]


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
        model.kernels = in_precision(kernels, recipe.trainer.precision, model.embed_tokens.device)
        if is_emulated(recipe.trainer.precision, model.embed_tokens.device):
            listener.message(
                f"trainer.precision {recipe.trainer.precision} is emulated here: operands are rounded to it and multiplied in fp32, "
                "which shows its numbers and not its speed"
            )
        optimizer = make_optimizer(model, recipe.trainer)
        guard, ranks = StepGuard(recipe.trainer), alone()
        checkpoints = RunCheckpoints(
            recipe, directory, start, model, optimizer, guard, ranks.world, asdict(ranks.mesh.shape), journal,
            listener.message,
        )  # fmt: skip
        stack.callback(checkpoints.close)
        # A checkpoint holds the state of these random numbers; whether the model was made just now must not show in it.
        torch.manual_seed(recipe.run.seed)
        step = checkpoints.load()
        _check_numerics(journal, numerics_record(threads, kernels.name))
        journal.cut_after(step)
        checkpoints.journal_loaded()
        metrics.cut_after(step)
        if resumed:
            journal.record_event("resume", {"step": step})
        run = PretrainRun(recipe, directory, start, model, optimizer, sequence, held_out, journal, metrics, listener, guard, checkpoints, step)
        with checkpoints.requests:
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
    for number, path in enumerate(dataset_paths(recipe)):
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
