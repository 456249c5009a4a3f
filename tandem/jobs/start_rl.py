"""A run of reinforcement learning in a pod, from the model it starts from to the trained one and its report."""

import contextlib
import os
import shlex
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.data.prompts import PromptSource
from tandem.jobs.numerics import check_run_numerics
from tandem.jobs.registered import Registered
from tandem.jobs.rl import reinforce
from tandem.jobs.run import Run
from tandem.jobs.sft_stage import FOLDER as SFT_FOLDER
from tandem.jobs.sft_stage import run_sft_stage, sft_recipe
from tandem.layout.placement import mesh_of
from tandem.model.huggingface_config import read_shapes
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.prompts import context_tokens, prompt_source
from tandem.pod.residents import plan
from tandem.pod.sidecars import RolloutSidecar, TrainerSidecar
from tandem.pod.start import open_channels, rank_threads
from tandem.report.run_report import report_run
from tandem.rl.rewards.pool import RewardPool
from tandem.runtime.faults import FaultPlan, no_fault
from tandem.runtime.journal import Journal
from tandem.runtime.listener import Listener
from tandem.runtime.logs import setup
from tandem.runtime.metrics import MetricsFile
from tandem.runtime.numerics import numerics_record
from tandem.runtime.requests import SignalRequests
from tandem.runtime.run_lock import RunLock
from tandem.types import RunError, UserError
from tandem.weight_transfer.manifest import segment_bytes


@dataclass(frozen=True, slots=True)
class RunResult:
    """``steps``: optimizer steps taken. ``accuracy``: sampled, on the final prompts, ``before`` the same kind of figure on the
    held-out prompts of step 0; ``greedy`` and ``before_greedy`` on the final prompts. ``model``: the trained model's folder."""

    directory: Path
    steps: int
    before: float | None
    before_greedy: float | None
    accuracy: float
    greedy: float
    reached: bool
    model: Path
    report: Path
    commands: tuple[str, ...]

    def summary(self) -> str:
        """What a person wants to know at the end."""
        before = f" (before: {self.before:.3f})" if self.before is not None else ""
        greedy = f" (before: {self.before_greedy:.3f})" if self.before_greedy is not None else ""
        lines = [
            f"{'target reached' if self.reached else 'target NOT reached'} after {self.steps} steps: "
            f"sampled accuracy {self.accuracy:.3f}{before}, greedy {self.greedy:.3f}{greedy} on fresh prompts",
            f"report: {self.report}",
            "try the model:",
            *(f"  {command}" for command in self.commands),
        ]
        return "\n".join(lines)


def execute_rl(
    recipe: Recipe, directory: Path, inline: bool, listener: Listener, faults: FaultPlan | None, resumed: bool
) -> RunResult:
    """Run ``recipe`` in ``directory``, from its newest whole checkpoint where it is ``resumed``; ``inline``: in this process."""
    with ExitStack() as stack:
        stack.enter_context(RunLock(directory))
        setup("controller", directory / "logs")
        point = faults.point("controller", directory) if faults else no_fault
        journal = stack.enter_context(Journal(directory / "journal.sqlite", fault_point=point))
        metrics = stack.enter_context(contextlib.closing(MetricsFile(directory / "metrics.jsonl")))
        listener.started(str(directory), recipe.run.max_steps, recipe.evaluation.target_accuracy)
        trainer_channel, rollout_channel = open_channels(recipe, directory, inline, faults)
        stack.callback(trainer_channel.close)
        stack.callback(rollout_channel.close)
        trainer = TrainerSidecar(trainer_channel)
        start = _start_model(recipe, directory, trainer, journal, listener, inline, faults)
        shapes, context = read_shapes(start), context_tokens(recipe, start)
        memory, sleep_mode = plan(recipe, shapes, context)
        journal.set("memory", asdict(memory))
        if recipe.trainer.precision != "fp32":
            where = "trainer and rollout" if recipe.rollout_precision == recipe.trainer.precision else "the trainer"
            listener.message(
                f"trainer.precision {recipe.trainer.precision} is emulated in {where}: operands are rounded to it and multiplied in fp32, "
                "which shows its numbers and not its speed"
            )
        prompts = stack.enter_context(contextlib.closing(prompt_source(recipe, start)))
        _check_prompts(prompts, journal)
        rewards = stack.enter_context(RewardPool(recipe.rewards, log_dir=directory / "logs"))
        registered = stack.enter_context(contextlib.closing(Registered(recipe, directory, journal, listener)))
        pod = Pod(
            trainer, RolloutSidecar(rollout_channel), start, segment_bytes(shapes, "float32"), journal, listener, sleep_mode,
            recipe.run.max_restarts, on_committed=lambda step, digest: registered.enter(step, digest, {}),
        )
        step = _bring_up(pod, journal)
        check_run_numerics(journal, numerics_record(rank_threads(recipe), pod.kernels), mesh_of(recipe.parallel), "cpu", step, listener)
        journal.cut_after(step)
        pod.journal_loaded()
        metrics.cut_after(step)
        if resumed:
            journal.record_event("resume", {"step": step})
        requests = stack.enter_context(SignalRequests(listener.message))
        run = Run(recipe, directory, journal, metrics, prompts, rewards, listener, memory, first_step=step, requests=requests)
        steps = reinforce(pod, run)
        metrics.sync()
        return _finish(recipe, directory, pod, run, steps, listener)


def _start_model(
    recipe: Recipe, directory: Path, trainer: TrainerSidecar, journal: Journal, listener: Listener, inline: bool, faults: FaultPlan | None
) -> Path:
    """The folder of the model that reinforcement learning starts from: given or made, and fine-tuned as section ``sft`` says."""
    folder, left = _untrained(recipe, directory), recipe.run.max_restarts
    while recipe.model.create is not None and not folder.exists():
        listener.phase("create_model", 0)
        try:
            trainer.channel.start()
            trainer.create_model(folder)
        except SidecarDied as death:
            if left == 0:
                raise RunError(f"{death}; see the run's logs") from None
            left -= 1
            journal.record_event("recovery", {"role": death.role, "part": death.part, "reason": death.reason, "step": 0})
            listener.message(f"{death}; replacing it")
            trainer.channel.discard()
    if recipe.sft is None:
        return folder
    listener.phase("sft", 0)
    stage = sft_recipe(recipe, directory, folder, context_tokens(recipe, folder))
    return run_sft_stage(stage, directory / SFT_FOLDER, listener, inline, faults)


def start_folder(recipe: Recipe, directory: Path) -> Path:
    """The folder, now or later, of the model that the reinforcement learning of the run in ``directory`` starts from."""
    return _untrained(recipe, directory) if recipe.sft is None else directory / SFT_FOLDER / "model"


def _untrained(recipe: Recipe, directory: Path) -> Path:
    return Path(recipe.model.path).resolve() if recipe.model.path is not None else directory / "models" / "initial"


def _bring_up(pod: Pod, journal: Journal) -> int:
    """The step at which the run stands: its newest whole checkpoint, or 0, which becomes one."""
    while True:
        try:
            step = pod.start_trainer()
            if pod.all_damaged and journal.checkpoints():
                raise RunError(
                    "no checkpoint of this run is whole (logs/trainer_worker.log says what is wrong with each), and a new beginning would overwrite "
                    "what it has; put one back from a copy, or start a new run"
                )
            return step
        except SidecarDied as death:
            pod.clear(death, 0)


def _check_prompts(prompts: PromptSource, journal: Journal) -> None:
    """Record which prompts a run draws from, and refuse to go on with others."""
    saved = journal.get("prompts")
    if saved is None:
        journal.set("prompts", prompts.fingerprint)
    elif saved != prompts.fingerprint:
        raise UserError("the task's prompts are not those that this run began with (a file has changed?); restore them or start a new run")


def _finish(recipe: Recipe, directory: Path, pod: Pod, run: Run, steps: int, listener: Listener) -> RunResult:
    """Write the model and the report."""
    model = directory / "model"
    while True:
        try:
            pod.export(model)
            break
        except SidecarDied as death:
            pod.recover(death, steps)
    journal = run.journal
    final, greedy = journal.evaluation(steps, "final"), journal.evaluation(steps, "final_greedy")
    before, before_greedy = journal.evaluation(0, "sampled"), journal.evaluation(0, "greedy")
    assert final is not None and greedy is not None
    commands = _commands(recipe, model, run)
    journal.set("commands", list(commands))
    report = report_run(directory)
    return RunResult(
        directory, steps, before["accuracy"] if before else None, before_greedy["accuracy"] if before_greedy else None,
        final["accuracy"], greedy["accuracy"],
        run.target_reached(steps), model, report, commands,
    )


def _commands(recipe: Recipe, model: Path, run: Run) -> tuple[str, ...]:
    text = run.prompts.held_out(1)[0].text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    quoted = f"$'{text}'" if "\\n" in text else f'"{text}"'
    return (
        f"tandem generate {shlex.quote(str(model))} --prompt {quoted} --temperature 0",
        f"tandem evaluate {shlex.quote(str(model))} --recipe {shlex.quote(os.path.relpath(model.parent / 'config.yaml'))}",
    )
