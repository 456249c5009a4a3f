"""Begin a run on data, or go on with one: its model, its data and its end."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from tandem.config.pretrain import PretrainRecipe
from tandem.estimate.training_bytes import saved_bytes, training_bytes, waiting_passes
from tandem.jobs.device_speed import DeviceSpeed
from tandem.jobs.pretrain import PretrainRun, pretrain
from tandem.jobs.pretrain_checkpoints import RunCheckpoints
from tandem.jobs.pretrain_data import open_data
from tandem.jobs.pretrain_records import Records
from tandem.jobs.pretrain_result import PretrainResult
from tandem.jobs.try_command import try_command
from tandem.kernels import select
from tandem.kernels.api import Kernels
from tandem.kernels.attention_backends import fast_attention
from tandem.kernels.mixed import in_precision, is_emulated
from tandem.layout.mesh import MeshShape
from tandem.layout.pipeline_stages import own_spans, spans_of
from tandem.model.create_model import create_model
from tandem.model.huggingface import load_model, read_tensors, unfilled_model
from tandem.model.huggingface_config import read_shapes
from tandem.pod.residents import available_bytes
from tandem.report.run_report import report_run
from tandem.runtime.communicator import Communicator
from tandem.runtime.faults import FaultPoint, no_fault
from tandem.runtime.gpus import Device, chosen_device
from tandem.runtime.heap import freed_memory_kept, large_memory_given_back
from tandem.runtime.journal import Journal
from tandem.runtime.listener import Listener
from tandem.runtime.logs import setup
from tandem.runtime.metrics import MetricsFile
from tandem.runtime.numerics import check_numerics, numerics_record
from tandem.runtime.processes import available_cores
from tandem.runtime.rank_board import RankWriter
from tandem.runtime.run_lock import RunLock
from tandem.runtime.tracing import Tracer
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.offload.activations import ActivationOffload
from tandem.trainer.optimizers.make import offload_folder
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.ranks import Ranks, alone
from tandem.trainer.parallel.replica import Replica, make_replica
from tandem.trainer.parallel.router_balance import make_balance


def execute_pretraining(recipe: PretrainRecipe, directory: Path, listener: Listener, resumed: bool = False) -> PretrainResult:
    """Run ``recipe`` in ``directory`` in this process, from its newest whole checkpoint where there is one."""
    with RunLock(directory):
        setup("trainer", directory / "logs")
        listener.started(str(directory), recipe.run.max_steps, None)
        torch.set_num_threads(recipe.machine.threads or available_cores())
        device = rank_device(chosen_device(recipe.machine, 1), 0)
        found = train_on(alone(device), recipe, directory, listener, resumed=resumed)
        assert found is not None
        return found


def rank_device(kind: Device, rank: int) -> torch.device:
    """What ``rank`` computes on: all ranks of a run stand on one machine, and rank r takes GPU r."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def train_on(
    ranks: Ranks, recipe: PretrainRecipe, directory: Path, listener: Listener, *, resumed: bool, board: RankWriter | None = None,
    fault_point: FaultPoint = no_fault, saving: Communicator | None = None,
) -> PretrainResult | None:
    """Run ``recipe`` on this rank, from the run's newest whole checkpoint where there is one; what it has come to, on the first rank.

    ``listener`` is asked on the first rank only. ``saving``: of all ranks, for the checkpoints alone (``None``: there is but one)."""
    with opened_run(ranks, recipe, directory, listener, resumed=resumed, board=board, fault_point=fault_point, saving=saving) as run:
        with run.checkpoints.requests:
            steps = pretrain(run)
        run.records.sync()
        run.records.enter("export", steps)
        model, journal = run.export(), run.records.journal
        if journal is None:
            return None
        return _finish(directory, journal, model, steps, try_command(model, run.data.sequence(0)[0] if recipe.learns_from_examples else None))

KEPT_TIMES = 3
"""The most that a rank was seen to hold of what it is said to need, where freed memory is kept."""


@contextlib.contextmanager
def opened_run(
    ranks: Ranks, recipe: PretrainRecipe, directory: Path, listener: Listener, *, resumed: bool = False, board: RankWriter | None = None,
    fault_point: FaultPoint = no_fault, saving: Communicator | None = None, at_most: int | None = None,
) -> Iterator[PretrainRun]:
    """``recipe`` on this rank, ready for its next step, from the run's newest whole checkpoint of step ``at_most`` or before. The other
    arguments are those of ``train_on``."""
    with ExitStack() as stack:
        journal = metrics = None
        if ranks.is_first:
            journal = stack.enter_context(Journal(directory / "journal.sqlite"))
            metrics = stack.enter_context(contextlib.closing(MetricsFile(directory / "metrics.jsonl")))
        records = Records(journal, metrics, listener if ranks.is_first else Listener(), board, fault_point)
        records.enter("load", 0)
        if ranks.is_first:
            _make_start_model(recipe, directory, listener)
        # Nobody reads the model before it is written.
        ranks.world.barrier("the model to start from")
        start = _start_folder(recipe, directory)
        stack.enter_context(freed_memory_kept() if _has_room_to_keep(recipe, start) else large_memory_given_back())
        data = open_data(recipe, journal)
        for note in data.notes if ranks.is_first else ():
            listener.message(note)
        replica, kernels = _load(recipe, directory, ranks, listener)
        guard = GradScaler(recipe.trainer)
        checkpoints = RunCheckpoints(recipe, directory, start, replica, guard, saving or ranks.world, records)
        stack.callback(checkpoints.close)
        # A checkpoint holds the state of these random numbers; whether the model was made just now must not show in it.
        torch.manual_seed(recipe.run.seed)
        step = checkpoints.load(at_most)
        if journal is not None and metrics is not None:
            if step and at_most is None:
                _tell_of_gaps(journal, metrics, step, listener)
            _check_numerics(journal, numerics_record(torch.get_num_threads(), kernels.name), ranks, step, listener)
            journal.cut_after(step)
            checkpoints.journal_loaded()
            metrics.cut_after(step)
            if resumed:
                journal.record_event("resume", {"step": step})
        labels = {"pipeline": ranks.mesh.group("pipeline")[0]}
        tracer = Tracer(directory / "traces", ranks.mesh.rank, recipe.run.trace_steps, labels)
        yield PretrainRun(recipe, directory, start, replica, data, records, guard, checkpoints, step, tracer=tracer)


def _has_room_to_keep(recipe: PretrainRecipe, start: Path) -> bool:
    """Whether this machine has room for freed memory that is kept. On ranks, what sums take and free between layers cuts it up:
    several times what is held was measured, and steps a fifth slower where it is given back."""
    parallel = recipe.parallel
    if parallel.world == 1:
        return True
    held = parallel.ranks_of_a_node * training_bytes(read_shapes(start), recipe.trainer, recipe.most_tokens, parallel)
    return not recipe.trainer.offloads and KEPT_TIMES * held <= available_bytes(recipe.machine.memory_gib)


def _tell_of_gaps(journal: Journal, metrics: MetricsFile, step: int, listener: Listener) -> None:
    """Say what the run's files lack of the steps before its checkpoint; the checkpoint itself is whole."""
    if not journal.checkpoints():
        listener.message(f"the journal has nothing of the {step} steps before this checkpoint: their evaluations and events are gone")
    missing = step - len({row["step"] for row in metrics.rows() if row["step"] < step})
    if missing:
        listener.message(f"metrics.jsonl lacks {missing} of the {step} rows before this checkpoint: the curves have a gap")


def _load(recipe: PretrainRecipe, directory: Path, ranks: Ranks, listener: Listener) -> tuple[Replica, Kernels]:
    """The model to start from and its optimizer, on this rank."""
    start = _start_folder(recipe, directory)
    if ranks.device.type == "cuda":
        listener.message(DeviceSpeed(ranks.device, recipe.trainer.precision).describe())
    parallel, stages, on_gpu = recipe.parallel, ranks.groups["pipeline"], ranks.device.type == "cuda"
    kernels = _kernels(recipe, ranks.device, read_shapes(start).head_dim)
    spans = spans_of(parallel, read_shapes(start))
    is_paged = recipe.trainer.offload_parameters == "nvme"
    make = unfilled_model if is_paged else load_model
    model = make(start, kernels, device=ranks.device, parallel=ranks.model_parallel(), spans=own_spans(parallel, spans, stages.rank))
    model.router_balance = make_balance(model, recipe.trainer, ranks)
    model.recompute = recipe.trainer.recompute
    model.kernels = in_precision(kernels, recipe.trainer.precision, model.device)
    if is_emulated(recipe.trainer.precision, model.device):
        listener.message(
            f"trainer.precision {recipe.trainer.precision} is emulated here: operands are rounded to it and multiplied in fp32, "
            "which shows its numbers and not its speed"
        )
    pipeline = Pipeline(model, spans, stages, parallel.schedule) if stages.size > 1 else None
    if recipe.trainer.offload == "cpu" and not on_gpu:
        listener.message("trainer.offload cpu changes nothing here: the weights and the optimizer's state are in the host's memory already")
    replica = make_replica(model, recipe.trainer, ranks, parallel.zero, pipeline, directory, is_filled=not is_paged)
    if recipe.trainer.offload_activations == "nvme":
        expected = saved_bytes(model.shapes, recipe.trainer, recipe.most_tokens, parallel)
        ActivationOffload(model, offload_folder(recipe.trainer, directory), expected, passes=waiting_passes(parallel, stages.rank))
    if is_paged:
        # Read straight into the file: the model need not fit in memory once.
        ReplicaState(replica).fill(read_tensors(start))
    return replica, kernels


def _kernels(recipe: PretrainRecipe, device: torch.device, head_dim: int) -> Kernels:
    machine = recipe.machine
    if device.type != "cuda" or machine.attention != "auto":
        return select(machine.kernels, device=device, deterministic=device.type != "cuda", attention=machine.attention)
    # No engine has to find the same bits: products and attention of 16 bits are those of torch's libraries.
    fast = fast_attention(head_dim) if machine.kernels == "auto" and recipe.trainer.precision != "fp32" else None
    return select(machine.kernels, device=device, deterministic=False, attention=fast or "auto")


def _start_folder(recipe: PretrainRecipe, directory: Path) -> Path:
    return Path(recipe.model.path or "").resolve() if recipe.model.create is None else directory / "models" / "initial"


def _make_start_model(recipe: PretrainRecipe, directory: Path, listener: Listener) -> None:
    if recipe.model.create is not None:
        listener.phase("create_model", 0)
        create_model(recipe.model.create, recipe.run.seed, _start_folder(recipe, directory))


def _check_numerics(journal: Journal, now: dict[str, str | int], ranks: Ranks, step: int, listener: Listener) -> None:
    """Refuse to go on where the bits would be others, unless the ranks or the device were changed, which changes them by intent."""
    saved, mesh, device = journal.get("numerics"), asdict(ranks.mesh.shape), ranks.device.type
    before, on = journal.get("mesh", asdict(MeshShape())), journal.get("device", "cpu")
    if saved is not None and before == mesh and on == device:
        check_numerics(saved, now)
        return
    if saved is not None and on != device:
        listener.message(f"the run was on {on} and goes on on {device} from step {step}: the last bits of its numbers are others")
    if saved is not None:
        journal.record_event("mesh", {"step": step, "before": before, "now": mesh, **({"device": device} if on != device else {})})
    journal.set("numerics", now)
    journal.set("mesh", mesh)
    journal.set("device", device)


def _finish(directory: Path, journal: Journal, model: Path, steps: int, command: str) -> PretrainResult:
    evaluations = [result["loss"] for _, kind, result in journal.evaluations() if kind == "held_out"]
    journal.set("commands", [command])
    report = report_run(directory)
    before, after = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    return PretrainResult(directory, steps, before, after, model, report, (command,))
