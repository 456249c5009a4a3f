"""A run of reinforcement learning in a pod, from the model it starts from to the trained one and its report."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import sleep

from tandem.config.recipe import Recipe
from tandem.config.watchdog import WatchdogConfig
from tandem.data.prompts import PromptSource
from tandem.data.tools.load import tool_files
from tandem.estimate.prompt_beginnings import Prompts
from tandem.jobs.checks.check_rl import check_pod
from tandem.jobs.corrupt_nodes import cordon_corrupt
from tandem.jobs.distrust import distrust
from tandem.jobs.finished import remove_model, target_reached
from tandem.jobs.pod_plan import plan_of
from tandem.jobs.prediction import rl_prediction
from tandem.jobs.registered import Registered
from tandem.jobs.result import Figure, RunResult, finish_run
from tandem.jobs.rl import reinforce
from tandem.jobs.rl_run.rl_run import RLRun
from tandem.jobs.run_files import (
    CRITIC_FOLDER,
    DRAFT_FOLDER,
    SFT_FOLDER,
    begun,
    check_config,
    continue_from,
    initial_folder,
    opened_files,
    rl_start_folder,
)
from tandem.jobs.sft import run_sft_stage, sft_recipe
from tandem.jobs.tiers_of_run import near_tiers
from tandem.jobs.try_commands import task_commands
from tandem.jobs.uploads import make_uploader
from tandem.jobs.verify.input_files import check_input_files
from tandem.jobs.verify.start_model import check_start_model
from tandem.jobs.verify.verify_records import steps_on_disk
from tandem.layout.placement import mesh_of
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.model_source import found_model
from tandem.planner.measured_run import measured_run
from tandem.pod.failures import SidecarDied
from tandem.pod.leadership import leading
from tandem.pod.nodes import Nodes
from tandem.pod.pod import Pod
from tandem.pod.pod_checkpoints import PodCheckpoints
from tandem.pod.pod_threads import rank_threads
from tandem.pod.prompts import context_tokens, prompt_source
from tandem.pod.recovery import clear, recover
from tandem.pod.rl_models import draft_folder, published_bytes
from tandem.pod.sidecars import RolloutSidecar, TrainerSidecar
from tandem.pod.start import begin_again, joining_of, nodes_of, open_channels, shared_store
from tandem.report.run_facts import PREDICTION_KEY
from tandem.rl.agents.agent_worker import agent_files
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.round_prompts import RoundPrompts, recorded_batch
from tandem.runtime.callback import Callback
from tandem.runtime.health.node_watch import NodeWatch
from tandem.runtime.health.run_health import RunHealth
from tandem.runtime.machine.gpus import check_pod_device
from tandem.runtime.machine.numerics import numerics_record
from tandem.runtime.process.backoff import Backoff, describe_wait
from tandem.runtime.process.faults import FaultPlan, no_fault
from tandem.runtime.process.stacks import stacks_in
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.runtime.process.waits import WAITS
from tandem.runtime.process.watchdog import Watchdog
from tandem.runtime.records.agreements import trusted_step
from tandem.runtime.records.entropies import EntropyFile
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import forget_local
from tandem.runtime.records.logs import setup
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.records.run_records import Records
from tandem.trainer.checkpoint.trigger import CheckpointTrigger
from tandem.trainer.corruption.finding import SilentCorruption
from tandem.types import RunError, UserError


def execute_rl(
    recipe: Recipe, directory: Path, inline: bool, callback: Callback, faults: FaultPlan | None, resumed: bool
) -> RunResult:
    """Run ``recipe`` in ``directory``, from its newest whole checkpoint where it is ``resumed``; ``inline``: in this process. After silent data corruption
    it begins again at the newest checkpoint that is trusted (``jobs.distrust``), as a resume does."""
    restarts = 0
    while True:
        try:
            return _execute(recipe, directory, inline, callback, faults, resumed or restarts > 0)
        except SilentCorruption as corruption:
            is_replaced = cordon_corrupt(recipe, directory.name, corruption.finding)
            restarts, _ = distrust(
                directory, corruption.finding, recipe.checkpoint, callback, restarts, recipe.run.max_restarts, is_replaced=is_replaced
            )


def _execute(
    recipe: Recipe, directory: Path, inline: bool, callback: Callback, faults: FaultPlan | None, resumed: bool
) -> RunResult:
    device = check_pod_device(recipe.machine, recipe.ranks_here, recipe.rollout.engine_ranks)
    with ExitStack() as stack:
        stack.enter_context(begun(directory, "controller", callback, recipe.run.max_steps, recipe.evaluation.target_accuracy))
        fault_point = faults.point("controller", directory) if faults else no_fault
        journal, metrics = stack.enter_context(opened_files(directory, fault_point))
        records = Records(journal, metrics, callback)
        fence = stack.enter_context(leading(recipe.coordination, directory, journal, callback.message, pods_join=recipe.pods.may_join))
        trainer_channel, rollout_channel = open_channels(recipe, directory, inline, faults, fence)
        watchdog = stack.enter_context(_watched(recipe.watchdog, directory, callback))
        stack.callback(trainer_channel.close)
        stack.callback(rollout_channel.close)
        trainer = TrainerSidecar(trainer_channel)
        if resumed and not rl_start_folder(recipe, directory).exists():
            check_pod(recipe)
        start = _start_model(recipe, directory, trainer, journal, callback, inline, faults)
        # The stage before had logs of its own.
        setup("controller", directory / "logs")
        shapes, context = read_shapes(start, implemented_by=recipe.model.implemented_by), context_tokens(recipe.model, recipe.rollout.max_tokens, start)
        planned = plan_of(recipe, shapes, context, start)
        journal.set("memory", asdict(planned.host))
        journal.set("residents", {**asdict(planned.residency), "why": planned.why})
        if planned.why:
            for line in planned.describe():
                callback.message(line)
        prompts = stack.enter_context(contextlib.closing(prompt_source(recipe, start)))
        _check_prompts(prompts, journal)
        rewards = stack.enter_context(RewardPool(recipe.rewards, log_dir=directory / "logs"))
        of_agent = {} if recipe.rollout.agent is None else agent_files(recipe.rollout.agent.function)
        check_input_files({**prompts.task.files, **rewards.files, **tool_files(recipe.task.tools), **of_agent}, journal, callback)
        registered = stack.enter_context(contextlib.closing(Registered(recipe, directory, journal, callback)))
        uploader = make_uploader(recipe.checkpoint, directory, callback.message, start if start.is_relative_to(directory) else None)
        if uploader is not None:
            stack.callback(uploader.close)

        def check_inputs() -> None:
            check_config(directory, journal)
            check_start_model(start, journal)
            if recipe.has_critic and recipe.critic.path:
                check_start_model(found_model(recipe.critic.path).resolve(), journal, key="critic_model")
            if recipe.reference.path:
                check_start_model(found_model(recipe.reference.path).resolve(), journal, key="reference_model")
            if recipe.draft is not None:
                check_start_model(draft_folder(recipe), journal, key="draft_head")
            if recipe.reward_model.path:
                check_start_model(found_model(recipe.reward_model.path).resolve(), journal, key="reward_model")

        def committed(step: int, digest: str) -> None:
            registered.enter(step, digest, {})
            if uploader is not None:
                uploader.add(step)

        def in_use() -> set[int]:
            """The steps whose folders are kept: those being uploaded, and the one that is returned to after silent data corruption."""
            kept = uploader.in_use() if uploader is not None else set()
            trusted = trusted_step(journal, steps_on_disk(directory))
            return kept if trusted is None else kept | {trusted}

        near = stack.enter_context(contextlib.closing(near_tiers(recipe, directory, journal, metrics, joining_of(rollout_channel), callback.message)))
        pod = Pod(
            trainer, RolloutSidecar(rollout_channel), start, published_bytes(recipe, shapes), journal,
            partial(recorded_batch, recipe, journal), records, PodCheckpoints(journal, callback, near, committed, in_use),
            recipe.run.max_restarts, planned.residency, planned.prefetch, recipe.has_inference,
            check_inputs=check_inputs, fence=fence, shared_store=shared_store(recipe, directory),
            verify_every=recipe.rollout.verify_weights_every_steps, pods=recipe.pods,
        )
        pod.entropies = stack.enter_context(contextlib.closing(EntropyFile(directory, callback.message)))
        pod.health = stack.enter_context(_health(recipe, directory, journal, callback, nodes_of(rollout_channel)))
        step = _bring_up(pod, journal)
        near.begun()
        numerics = numerics_record(rank_threads(recipe), pod.kernels)
        continue_from(
            step, journal, metrics, callback, numerics=numerics, shape=mesh_of(recipe.parallel),
            device=device, journal_loaded=pod.checkpoints.journal_loaded, resumed=resumed,
        )  # fmt: skip
        trigger = CheckpointTrigger(recipe.checkpoint, stack.enter_context(SignalRequests(callback.message, callback.wants_stop)))
        run = RLRun(
            directory=directory, records=records, first_step=step, recipe=recipe, journal=journal, prompts=RoundPrompts(prompts, recipe, journal),
            rewards=rewards, memory=planned.host, trigger=trigger, watchdog=watchdog, uploader=uploader,
        )  # fmt: skip
        _predict(pod, recipe, shapes, prompts, metrics)
        records.begin_rows()
        try:
            steps = reinforce(pod, run)
        except SilentCorruption:
            begin_again(rollout_channel)
            raise
        records.sync()
        return _finish(pod, run, steps)


def _predict(pod: Pod, recipe: Recipe, shapes: ModelShapes, prompts: PromptSource, metrics: MetricsFile) -> None:
    """Journals the predicted seconds of the phases of a step, from the speed that the trainer's ranks measure and, in a run that is resumed, from how much its
    completions begin alike."""
    first, rows = Prompts.of([prompt.token_ids for prompt in prompts.for_step(0)]), metrics.rows()
    begun = measured_run(recipe, shapes, rows, first).begun if rows else 0.0
    try:
        pod.journal.set(PREDICTION_KEY, rl_prediction(recipe, shapes, pod.residency, first, pod.trainer.measure, begun))
    except SidecarDied as death:
        # The loop replaces it; a prediction is not worth a restart of its own.
        pod.records.callback.message(f"{death}; the time of this run is not predicted")


@contextlib.contextmanager
def _watched(config: WatchdogConfig, directory: Path, callback: Callback) -> Iterator[Watchdog]:
    """Inside, the run's processes answer with their stacks, and the watchdog looks at what this process waits for."""
    WAITS.begin("the controller", factor=config.deadline_factor, least_s=config.min_deadline_s)
    folder, memory = directory / "pod" / "stacks", config.memory_alarm_gib * 2**30
    with stacks_in(folder), Watchdog(directory, folder, callback.waiting, memory_alarm_bytes=memory, lag_alarm_s=config.lag_alarm_s) as watchdog:
        yield watchdog


@contextlib.contextmanager
def _health(recipe: Recipe, directory: Path, journal: Journal, callback: Callback, nodes: Nodes | None) -> Iterator[RunHealth]:
    """Inside, this machine is watched, and what the others find is taken from the cluster manager ``nodes``, which is told of those that are broken."""
    unfit: Callable[[str, str], None] = (lambda node, reason: None) if nodes is None else nodes.unfit
    health = RunHealth(mesh_of(recipe.parallel), recipe.health, journal.record_event, callback, unfit)
    if nodes is not None:
        nodes.on_reading = health.reading
    with NodeWatch(socket.gethostname(), recipe.health, health.reading, logs_of=directory, own="the controller"):
        yield health


def _start_model(
    recipe: Recipe, directory: Path, trainer: TrainerSidecar, journal: Journal, callback: Callback, inline: bool, faults: FaultPlan | None
) -> Path:
    """The folder of the model that reinforcement learning starts from: given or made, and fine-tuned as section ``sft`` says."""
    trained = rl_start_folder(recipe, directory)
    if recipe.sft is not None and trained.exists():
        return trained
    folder, left, backoff = initial_folder(recipe.model, directory), recipe.run.max_restarts, Backoff()
    while recipe.model.create is not None and not folder.exists():
        callback.phase("create_model", 0)
        try:
            trainer.channel.start()
            trainer.create_model(folder)
        except SidecarDied as death:
            if left == 0:
                raise RunError(f"{death}; see the run's logs") from None
            left -= 1
            journal.record_event("recovery", {"role": death.role, "part": death.part, "reason": death.reason, "step": 0})
            wait_s = backoff.wait_s(0)
            callback.message(f"{death}; replacing it {describe_wait(wait_s)}")
            trainer.channel.discard()
            sleep(wait_s)
    if recipe.sft is None:
        return folder
    callback.phase("sft", 0)
    stage = sft_recipe(recipe, directory, folder, context_tokens(recipe.model, recipe.rollout.max_tokens, folder))
    return run_sft_stage(stage, directory / SFT_FOLDER, callback, inline, faults)


def _bring_up(pod: Pod, journal: Journal) -> int:
    """Returns the step of the newest whole checkpoint, or 0, whose state becomes one."""
    while True:
        try:
            step = pod.start_trainer()
            if pod.checkpoints.all_damaged and journal.checkpoints():
                raise RunError(
                    "no checkpoint of this run is whole (logs/trainer_worker.log says what is wrong with each), and a new beginning would overwrite "
                    "what it has; put one back from a copy, or start a new run"
                )
            return step
        except SidecarDied as death:
            clear(pod, death, 0)


def _check_prompts(prompts: PromptSource, journal: Journal) -> None:
    """Record which prompts a run draws from, and refuse to go on with others."""
    saved = journal.get("prompts")
    if saved is None:
        journal.set("prompts", prompts.fingerprint)
    elif saved != prompts.fingerprint:
        raise UserError("the task's prompts are not those that this run began with (a file has changed?); restore them or start a new run")


def _finish(pod: Pod, run: RLRun, steps: int) -> RunResult:
    """Writes the model, a critic of its own and the report, in place of those of an earlier end of the run."""
    model, critic, draft = (run.directory / name for name in ("model", CRITIC_FOLDER, DRAFT_FOLDER))
    # A run with its model has its critic and its draft head.
    for folder in (model, critic, draft):
        remove_model(folder)
    while True:
        try:
            pod.export(model, critic, draft)
            break
        except SidecarDied as death:
            recover(pod, death, steps)

    def accuracy(step: int, kind: str) -> float | None:
        evaluation = run.journal.evaluation(step, kind)
        return None if evaluation is None else float(evaluation["accuracy"])

    if pod.checkpoints.near.is_spread and pod.checkpoints.near.local is not None:
        # What stays on the disk of a machine that dies now is no reason to start it again.
        with contextlib.suppress(SidecarDied):
            pod.trainer.forget_local()
    forget_local(run.recipe.checkpoint.local_directory, run.journal)
    pod.checkpoints.near.forget()
    figures = {
        "accuracy": Figure(accuracy(0, "sampled"), accuracy(steps, "final")),
        "greedy_accuracy": Figure(accuracy(0, "greedy"), accuracy(steps, "final_greedy")),
    }
    settings = run.recipe.model
    context = context_tokens(settings, run.recipe.rollout.max_tokens, model)
    commands = task_commands(model, run.prompts.source.held_out(1)[0].text, settings.implemented_by, context)
    return finish_run(run.directory, run.journal, model, steps, figures, commands, target_reached(run.journal, run.recipe.evaluation, steps))
