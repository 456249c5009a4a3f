"""Begins or resumes a run on data: its model, its data and its end."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from tandem.config.pretrain import PretrainRecipe
from tandem.estimate.peak_bytes import peak_bytes
from tandem.jobs.data_run.data_checkpoints import DataCheckpoints
from tandem.jobs.data_run.data_run import DataRun
from tandem.jobs.data_run.device_speed import DeviceSpeed
from tandem.jobs.data_run.train_data import open_data
from tandem.jobs.pretrain import pretrain
from tandem.jobs.result import Figure, RunResult, finish_run
from tandem.jobs.run_files import begun, continue_from, opened_files
from tandem.jobs.try_commands import data_commands
from tandem.kernels import select
from tandem.kernels.api import Kernels
from tandem.kernels.attention_backends import fast_attention
from tandem.kernels.mixed import is_emulated
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_config import read_shapes
from tandem.runtime.callback import Callback
from tandem.runtime.machine.available_memory import available_bytes
from tandem.runtime.machine.gpus import chosen_device
from tandem.runtime.machine.heap import freed_memory_kept, large_memory_given_back
from tandem.runtime.machine.numerics import numerics_record
from tandem.runtime.process.processes import available_cores
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.records.run_records import Records
from tandem.runtime.records.tracing import Tracer
from tandem.trainer.build import ReplicaSettings, build_replica
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.rank_process import Rank, rank_alone, rank_device


def execute_data_run(recipe: PretrainRecipe, directory: Path, callback: Callback, resumed: bool = False) -> RunResult:
    """Run ``recipe`` in ``directory`` in this process, from its newest whole checkpoint if there is one."""
    with begun(directory, "trainer", callback, recipe.run.max_steps):
        found = train_on(this_process(recipe, directory), recipe, callback, resumed=resumed)
        assert found is not None
        return found


def this_process(recipe: PretrainRecipe, directory: Path) -> Rank:
    """This process as the only rank of a run."""
    threads = recipe.machine.threads or available_cores()
    torch.set_num_threads(threads)
    return rank_alone(directory, rank_device(chosen_device(recipe.machine, 1), 0), threads)


def train_on(rank: Rank, recipe: PretrainRecipe, callback: Callback, *, resumed: bool) -> RunResult | None:
    """Run ``recipe`` on this rank, from the run's newest whole checkpoint if there is one; its result, on the first rank.

    ``callback`` is asked on the first rank only."""
    with opened_run(rank, recipe, callback, resumed=resumed) as run:
        with run.checkpoints.requests:
            steps = pretrain(run)
        run.records.sync()
        run.records.enter("export", steps)
        model, journal = run.export(), run.records.journal
        if journal is None:
            return None
        losses = [result["loss"] for _, kind, result in journal.evaluations() if kind == "held_out"]
        figures = {"loss": Figure(losses[0], losses[-1])} if losses else {}
        commands = data_commands(model, run.data.sequence(0)[0] if recipe.learns_from_examples else None)
        return finish_run(rank.directory, journal, model, steps, figures, commands)


KEPT_TIMES = 1.25
"""The most that a rank was measured to hold of what is predicted, where freed memory is kept (``tests/jobs/test_jobs_memory.py``)."""


@contextlib.contextmanager
def opened_run(
    rank: Rank, recipe: PretrainRecipe, callback: Callback, *, resumed: bool = False, at_most: int | None = None
) -> Iterator[DataRun]:
    """``recipe`` on this rank, ready for its next step, from the run's newest whole checkpoint of step ``at_most`` or before."""
    ranks, directory = rank.ranks, rank.directory
    with ExitStack() as stack:
        journal = metrics = None
        if ranks.is_first:
            journal, metrics = stack.enter_context(opened_files(directory))
        records = Records(journal, metrics, callback if ranks.is_first else Callback(), rank.heartbeat, rank.fault_point)
        records.enter("load", 0)
        if ranks.is_first:
            _make_start_model(recipe, directory, callback)
        # The model is not read before it is written.
        ranks.world.barrier("the model to start from")
        start, is_alone = _start_folder(recipe, directory), ranks.world.size == 1
        keeps_freed = is_alone or _has_room_to_keep(recipe, start)
        # What loading takes meanwhile is no training step's, and would stay with a rank for good.
        stack.enter_context(freed_memory_kept() if is_alone else large_memory_given_back())
        data = open_data(recipe, start, journal)
        for note in data.notes if ranks.is_first else ():
            callback.message(note)
        replica, kernels = _load(recipe, directory, ranks, callback, start)
        guard = GradScaler(recipe.trainer)
        checkpoints = DataCheckpoints(recipe, directory, start, replica, guard, rank.saving, records)
        stack.callback(checkpoints.close)
        # A checkpoint holds the state of these random numbers; whether the model was made just now must not show in it.
        torch.manual_seed(recipe.run.seed)
        step = checkpoints.load(at_most)
        if keeps_freed and not is_alone:
            stack.enter_context(freed_memory_kept())
        if journal is not None and metrics is not None:
            if step and at_most is None:
                _tell_of_gaps(journal, metrics, step, callback)
            continue_from(
                step, journal, metrics, callback, numerics=numerics_record(torch.get_num_threads(), kernels.name), shape=ranks.mesh.shape,
                device=ranks.device.type, journal_loaded=checkpoints.journal_loaded, resumed=resumed,
            )  # fmt: skip
        labels = {"pipeline": ranks.mesh.group("pipeline")[0]}
        tracer = Tracer(directory / "traces", ranks.mesh.rank, recipe.run.trace_steps, labels)
        yield DataRun(
            directory=directory, records=records, first_step=step, recipe=recipe, start=start, replica=replica, data=data, guard=guard,
            checkpoints=checkpoints, tracer=tracer,
        )  # fmt: skip


def _has_room_to_keep(recipe: PretrainRecipe, start: Path) -> bool:
    """Whether this machine has room for freed memory that every rank keeps; where it is given back, steps were measured a fifth slower."""
    parallel = recipe.parallel
    held = parallel.world * peak_bytes(read_shapes(start), recipe.trainer, recipe.most_tokens, parallel)
    return not recipe.trainer.offloads and KEPT_TIMES * held <= available_bytes(recipe.machine.memory_gib)


def _tell_of_gaps(journal: Journal, metrics: MetricsFile, step: int, callback: Callback) -> None:
    """Say what the run's files lack of the steps before its checkpoint; the checkpoint itself is whole."""
    if not journal.checkpoints():
        callback.message(f"the journal has nothing of the {step} steps before this checkpoint: their evaluations and events are gone")
    missing = step - len({row["step"] for row in metrics.rows() if row["step"] < step})
    if missing:
        callback.message(f"metrics.jsonl lacks {missing} of the {step} rows before this checkpoint: the curves have a gap")


def _load(recipe: PretrainRecipe, directory: Path, ranks: Ranks, callback: Callback, start: Path) -> tuple[Replica, Kernels]:
    """The model to start from and its optimizer, on this rank."""
    trainer, on_gpu = recipe.trainer, ranks.device.type == "cuda"
    if on_gpu:
        callback.message(DeviceSpeed(ranks.device, trainer.precision).describe())
    if is_emulated(trainer.precision, ranks.device):
        callback.message(
            f"trainer.precision {trainer.precision} is emulated here: operands are rounded to it and multiplied in fp32, "
            "which shows its numbers and not its speed"
        )
    if trainer.offload == "cpu" and not on_gpu:
        callback.message("trainer.offload cpu changes nothing here: the weights and the optimizer's state are in the host's memory already")
    kernels = _kernels(recipe, ranks.device, read_shapes(start).head_dim)
    return build_replica(ReplicaSettings(start, directory, trainer, recipe.parallel, recipe.most_tokens), ranks, kernels), kernels


def _kernels(recipe: PretrainRecipe, device: torch.device, head_dim: int) -> Kernels:
    machine = recipe.machine
    if device.type != "cuda" or machine.attention != "auto":
        return select(machine.kernels, device=device, deterministic=device.type != "cuda", attention=machine.attention)
    # No engine has to find the same bits: products and attention of 16 bits are those of torch's libraries.
    fast = fast_attention(head_dim) if machine.kernels == "auto" and recipe.trainer.precision != "fp32" else None
    return select(machine.kernels, device=device, deterministic=False, attention=fast or "auto")


def _start_folder(recipe: PretrainRecipe, directory: Path) -> Path:
    return Path(recipe.model.path or "").resolve() if recipe.model.create is None else directory / "models" / "initial"


def _make_start_model(recipe: PretrainRecipe, directory: Path, callback: Callback) -> None:
    if recipe.model.create is not None:
        callback.phase("create_model", 0)
        create_model(recipe.model.create, recipe.run.seed, _start_folder(recipe, directory))
