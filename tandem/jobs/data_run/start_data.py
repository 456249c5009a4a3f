"""Starts or resumes a run on data on this rank: loads its model and its data, trains, exports."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tandem.config.machine import MachineConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.config.trainer import TrainerConfig
from tandem.estimate.time import Product
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import machine_bytes, memory_by_stage
from tandem.jobs.data_run.data_checkpoints import DataCheckpoints
from tandem.jobs.data_run.data_run import HELD_OUT, HELD_OUT_DRAFTS, HELD_OUT_PAIRS, DataRun
from tandem.jobs.data_run.draft_inputs import HEAD, make_draft_inputs
from tandem.jobs.data_run.reference_pass import ReferencePass
from tandem.jobs.data_run.train_data import open_data
from tandem.jobs.prediction import data_prediction
from tandem.jobs.pretrain import pretrain
from tandem.jobs.registered import Registered
from tandem.jobs.result import RunResult, finish_run, held_out_figures
from tandem.jobs.run_files import begun, continue_from, initial_folder, opened_files
from tandem.jobs.try_commands import data_commands, drafting_commands, scoring_commands
from tandem.jobs.verify.start_model import check_start_model
from tandem.jobs.verify.verify_records import steps_on_disk
from tandem.kernels import select, why_reference
from tandem.kernels.api import Kernels
from tandem.kernels.attention_backends import fast_attention
from tandem.kernels.measure import measure, reduced_dtype
from tandem.layout.shapes import adapted_shapes
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.value_folder import make_value_folder
from tandem.planner.recipe_layout import recipe_layout
from tandem.report.run_facts import PREDICTION_KEY
from tandem.runtime.callback import Callback
from tandem.runtime.collectives.agreement import check_same_kernels, gather_values
from tandem.runtime.health.node_watch import NodeWatch
from tandem.runtime.health.run_health import RunHealth
from tandem.runtime.machine.available_memory import available_bytes
from tandem.runtime.machine.gpus import chosen_device
from tandem.runtime.machine.heap import freed_memory_kept, give_back, give_back_large_memory
from tandem.runtime.machine.numerics import numerics_record
from tandem.runtime.machine.rank_device import rank_device
from tandem.runtime.process.processes import available_cores
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import forget_local, local_folder
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.records.run_records import Records
from tandem.runtime.records.tracing import Tracer
from tandem.trainer.build import ReplicaSettings, build_replica
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.tiers.disks_tier import Node
from tandem.trainer.corruption.check import CorruptionCheck, corruption_check
from tandem.trainer.corruption.injected_flips import inject_flips
from tandem.trainer.device_speed import device_notes
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.rank_process import Rank, rank_alone
from tandem.trainer.tensor_record import tensor_record
from tandem.types import RunError


def execute_data_run(recipe: PretrainRecipe, directory: Path, callback: Callback, resumed: bool = False) -> RunResult:
    """Runs ``recipe`` in ``directory`` in this process, from the newest whole checkpoint if there is one."""
    with begun(directory, "trainer", callback, recipe.run.max_steps):
        result = train_on(this_process(recipe.machine, directory), recipe, callback, resumed=resumed)
        assert result is not None
        return result


def this_process(machine: MachineConfig, directory: Path) -> Rank:
    """Returns this process as the only rank of a run."""
    threads = machine.threads or available_cores()
    torch.set_num_threads(threads)
    return rank_alone(directory, rank_device(chosen_device(machine, 1), 0), threads)


def train_on(
    rank: Rank, recipe: PretrainRecipe, callback: Callback, *, resumed: bool, memory: Keepers | None = None, node: Node | None = None,
    recorded: int | None = None, watches_health: bool = True,
) -> RunResult | None:  # fmt: skip
    """Runs ``recipe`` on this rank, from the run's newest whole checkpoint if there is one. Returns its result on the first rank, ``None``
    on others. Only the first rank calls ``callback``. ``memory``: holds checkpoints too. ``node``, ``recorded``: as of
    ``DataCheckpoints``. ``watches_health``: the first rank does; else the controller, where ranks are on several machines."""
    with opened_run(rank, recipe, callback, resumed=resumed, memory=memory, node=node, recorded=recorded, watches_health=watches_health) as run:
        _predict(run)
        with run.checkpoints.requests:
            steps = pretrain(run)
        run.records.sync()
        run.records.enter("export", steps)
        model, journal = run.export(), run.records.journal
        run.checkpoints.forget_local()
        if journal is None:
            return None
        forget_local(recipe.checkpoint.local_directory, journal)
        figures = held_out_figures([result for _, kind, result in journal.evaluations() if kind in (HELD_OUT, HELD_OUT_PAIRS, HELD_OUT_DRAFTS)])
        example = run.data.sequence(0)[0] if recipe.learns_from_examples else None
        if recipe.trains_draft:
            commands = drafting_commands(model, run.start, recipe.context_tokens)
        elif recipe.trains_values:
            commands = scoring_commands(model)
        else:
            commands = data_commands(model, example, recipe.model.implemented_by, recipe.context_tokens)
        return finish_run(rank.directory, journal, model, steps, figures, commands)


def _predict(run: DataRun) -> None:
    """Journals the predicted memory of a rank and seconds of a step, from the speed that all ranks measure at once."""
    recipe, model = run.recipe, run.model
    run.records.enter("predict", run.first_step)
    dtype: torch.dtype = getattr(torch, reduced_dtype(recipe.trainer, model.device.type))

    def quick(products: Sequence[Product]) -> Mapping[str, Any]:
        speed = measure(model.kernels, products, dtype, model.device, quick=True)
        give_back()
        return speed._asdict()

    shapes = adapted_shapes(read_shapes(run.start, "any", recipe.model.implemented_by), recipe.trainer.lora)
    prediction = data_prediction(recipe, shapes, quick)
    if run.records.journal is not None:
        layout = recipe_layout(recipe, shapes, on_cpu=model.device.type == "cpu")
        # Rank 0, which measures itself, is on the first stage.
        run.predicted_bytes = memory_by_stage(shapes, layout)[0].total
        run.records.journal.set("memory", {"trainer": run.predicted_bytes})
        run.records.journal.set(PREDICTION_KEY, prediction)


VALUE_FOLDER = Path("models") / "value"
"""The folder, in that of a run, of a language model that was given a value head."""
LOOPBACK = "127.0.0.1"
KEPT_TIMES = 1.25
"""Largest measured ratio of a rank's resident memory to the prediction where freed memory is kept (``tests/jobs/test_jobs_memory.py``)."""


@contextlib.contextmanager
def opened_run(
    rank: Rank, recipe: PretrainRecipe, callback: Callback, *, resumed: bool = False, at_most: int | None = None, memory: Keepers | None = None,
    node: Node | None = None, recorded: int | None = None, watches_health: bool = True,
) -> Iterator[DataRun]:  # fmt: skip
    """Yields ``recipe`` on this rank, ready for its next step, from the run's newest whole checkpoint of step ``at_most`` or before."""
    ranks, directory = rank.ranks, rank.directory
    with ExitStack() as stack:
        journal = metrics = None
        if ranks.is_first:
            journal, metrics = stack.enter_context(opened_files(directory))
        records = Records(journal, metrics, callback if ranks.is_first else Callback(), rank.heartbeat, rank.fault_point)
        records.enter("load", 0)
        if ranks.is_first:
            _make_start_model(recipe, directory, callback)
        # No rank reads the model before it is written.
        ranks.world.barrier("the model to start from")
        start, is_alone = start_folder(recipe, directory), ranks.world.size == 1
        reference, missing = ReferencePass(recipe, directory, records) if recipe.has_reference else None, list[str]()
        if journal is not None:
            missing = reference.missing() if reference is not None else []
            if missing and at_most is not None:
                raise RunError(f"'{directory / missing[0]}' is not as it was written; resume the run, which computes it again, then replay")
            stays = recipe.trainer.lora is not None or recipe.trains_draft
            _check_start(start, directory, journal, callback, weights_are_used=bool(missing) or not steps_on_disk(directory) or stays)
            if recipe.trains_draft:
                # The checkpoints have its weights, and not the tokens that it can propose.
                check_start_model(directory / HEAD, journal, key="draft_head")
        settings = ReplicaSettings(
            start, directory, recipe.trainer, recipe.parallel, recipe.most_tokens, seed=recipe.run.seed, context=recipe.context_tokens,
            implemented_by=recipe.model.implemented_by, draft=(directory / HEAD, recipe.algorithm.draft_steps) if recipe.trains_draft else None,
        )  # fmt: skip
        keeps_freed = is_alone or _has_room_to_keep(settings, recipe.machine.memory_gib)
        # Memory that only loading needs would otherwise stay with the rank for the whole run.
        if is_alone:
            stack.enter_context(freed_memory_kept())
        else:
            give_back_large_memory()
        data = open_data(recipe, directory, start, journal)
        for note in data.notes if ranks.is_first else ():
            callback.message(note)
        replica, kernels = _load(settings, recipe.machine, ranks, callback)
        if reference is not None and ranks.agreed(len(missing), "whether the reference is known"):
            reference.compute(replica, missing)
        guard, registered = GradScaler(recipe.trainer), None
        if journal is not None:
            registered = stack.enter_context(contextlib.closing(Registered(recipe, directory, journal, callback)))
        own = "" if journal is None or at_most is not None else str(local_folder(recipe.checkpoint.local_directory, directory, journal) or "")
        [told, *_] = gather_values(ranks.world, own, "the folder of local checkpoints")
        local = Path(told) if told else None
        checkpoints = DataCheckpoints(
            recipe.checkpoint, recipe.data.global_batch_size, directory, start, replica, guard, rank.saving, records, registered, memory, local,
            node, recorded,
        )
        stack.callback(checkpoints.close)
        # A checkpoint holds the state of the random numbers, which must not depend on whether the model was made in this process.
        torch.manual_seed(recipe.run.seed)
        step = checkpoints.load(at_most)
        if keeps_freed and not is_alone:
            stack.enter_context(freed_memory_kept())
        if journal is not None and metrics is not None:
            if step and at_most is None:
                _tell_of_gaps(journal, metrics, step, callback, is_journalled=not checkpoints.is_near)
            continue_from(
                step, journal, metrics, callback, numerics=numerics_record(torch.get_num_threads(), kernels.name), shape=ranks.mesh.shape,
                device=ranks.device.type, journal_loaded=checkpoints.journal_loaded, resumed=resumed,
            )  # fmt: skip
        labels = {"pipeline": ranks.mesh.group("pipeline")[0]}
        tracer = Tracer(directory / "traces", ranks.mesh.rank, recipe.run.trace_steps, labels)
        record = tensor_record(directory, ranks.mesh.rank)
        if record is not None:
            record.watch(replica.model, "model")
        check = None
        if at_most is None and record is None:
            check = _corruption_check(recipe, replica, callback)
        if rank.flips is not None:
            inject_flips(replica.model, rank.flips)
        health, here = None, (socket.gethostname(), LOOPBACK)
        if journal is not None and at_most is None and watches_health:
            health = RunHealth(ranks.mesh.shape, recipe.health, journal.record_event, callback)
            # The supervisor of several ranks is part of the run too.
            root = os.getpid() if is_alone else os.getppid()
            stack.enter_context(NodeWatch(here[0], recipe.health, health.reading, logs_of=directory, own="the first rank", root=root))
        table = rank.step_times
        yield DataRun(
            directory=directory, records=records, first_step=step, recipe=recipe, start=start, replica=replica, data=data, guard=guard,
            checkpoints=checkpoints, tracer=tracer, record=record, check=check, health=health,
            step_times=lambda: [each.on(*here) for each in table.read()] if table is not None else [],
        )  # fmt: skip


def _corruption_check(recipe: PretrainRecipe, replica: Replica, callback: Callback) -> CorruptionCheck | None:
    """Returns the check for silent data corruption. On a GPU, attention and 16-bit products may come from libraries whose bits are not reproducible."""
    check = corruption_check(replica, recipe.trainer.corruption_check, recipe.run.seed)
    if check is not None and replica.ranks.device.type == "cuda":
        callback.message("trainer.corruption_check is off: the kernels of a run on data on a GPU do not repeat their bits")
        return None
    return check


def _has_room_to_keep(settings: ReplicaSettings, memory_gib: float) -> bool:
    """Returns whether this machine has room for the freed memory that every rank keeps. Where ranks give it back, steps were measured 20 %
    slower."""
    trainer, parallel = settings.trainer, settings.parallel
    shapes = adapted_shapes(read_shapes(settings.start, "any", settings.implemented_by), trainer.lora)
    peak = machine_bytes(shapes, layout_of_trainer(trainer, parallel, settings.most_tokens))
    return not trainer.offloads and KEPT_TIMES * peak <= available_bytes(memory_gib)


def _check_start(start: Path, directory: Path, journal: Journal, callback: Callback, weights_are_used: bool) -> None:
    """Verifies the model that the run starts from; its weights matter only until there is a checkpoint, for the reference's pass, and if only an
    adapter of them, or a draft head beside them, is trained."""
    for what in check_start_model(start, journal, weights_are_used=weights_are_used):
        journal.record_event("damage", {"reason": what})
        callback.message(f"{what}; the run continues from its checkpoint, which does not depend on it")


def _tell_of_gaps(journal: Journal, metrics: MetricsFile, step: int, callback: Callback, *, is_journalled: bool) -> None:
    """Reports what the run's files lack of the steps before its checkpoint; the checkpoint itself is whole. ``is_journalled``: the journal has those of its
    tier."""
    if is_journalled and not journal.checkpoints():
        lost = f"the journal has no record of the {step} steps before this checkpoint: their evaluations and events are lost"
        journal.record_event("journal_lost", {"step": step, "reason": lost})
        callback.message(lost)
    missing = step - len({row["step"] for row in metrics.rows() if row["step"] < step})
    if missing:
        callback.message(f"metrics.jsonl lacks {missing} of the {step} rows before this checkpoint: the curves have a gap")


def _load(settings: ReplicaSettings, machine: MachineConfig, ranks: Ranks, callback: Callback) -> tuple[Replica, Kernels]:
    """Loads this rank's part of the model to start from, and makes its optimizer."""
    trainer = settings.trainer
    if trainer.offload == "cpu" and ranks.device.type == "cpu":
        callback.message("trainer.offload cpu has no effect on the CPU: weights and optimizer state are in host memory already")
    kernels = _kernels(machine, trainer, ranks.device, read_shapes(settings.start, "any", settings.implemented_by).head_dim)
    for note in device_notes(ranks.device, trainer, kernels):
        callback.message(note)
    check_same_kernels(ranks.world, kernels.name)
    if why := why_reference(machine.kernels, kernels, getattr(torch, trainer.dtype), ranks.device):
        callback.message(why)
    return build_replica(settings, ranks, kernels), kernels


def _kernels(machine: MachineConfig, trainer: TrainerConfig, device: torch.device, head_dim: int) -> Kernels:
    dtype: torch.dtype = getattr(torch, trainer.dtype)
    if device.type != "cuda" or machine.attention != "auto":
        return select(machine.kernels, dtype, device, deterministic=device.type != "cuda", attention=machine.attention)
    # A run on data has no engine whose bits must match, so 16-bit products and attention may come from torch's libraries.
    fast = fast_attention(head_dim) if machine.kernels == "auto" and trainer.multiplies_in != "fp32" else None
    return select(machine.kernels, dtype, device, deterministic=False, attention=fast or "auto")


def _make_start_model(recipe: PretrainRecipe, directory: Path, callback: Callback) -> None:
    """Makes the model that ``recipe`` describes, and a language model with a value head in place of its own if it is to give values, or a
    draft head beside it."""
    given = initial_folder(recipe.model, directory)
    if recipe.model.create is not None:
        callback.phase("create_model", 0)
        create_model(recipe.model.create, recipe.run.seed, given)
    if recipe.trains_values:
        make_value_folder(given, recipe.algorithm.value_head, recipe.run.seed, directory / VALUE_FOLDER)
    if recipe.trains_draft:
        make_draft_inputs(recipe, directory, given)


def start_folder(recipe: PretrainRecipe, directory: Path) -> Path:
    """Returns the folder of the model that the run in ``directory`` starts from, which ``_make_start_model`` has made."""
    made = directory / VALUE_FOLDER
    return made if made.exists() else initial_folder(recipe.model, directory)
