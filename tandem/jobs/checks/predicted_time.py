"""The predicted time of a run, for a dry run: its work, at the speed that this machine was measured to have."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from tandem.config.machine import MachineConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.config.trainer import TrainerConfig
from tandem.estimate.mesh_work import mesh_work
from tandem.estimate.prompt_beginnings import Prompts
from tandem.estimate.rl_work import rl_work
from tandem.estimate.time import Work, training_work
from tandem.jobs.checks.check_run import folder_to_check
from tandem.jobs.checks.measured_speed import measure, with_exchanges
from tandem.jobs.data_run.train_data import open_datasets
from tandem.jobs.display import duration
from tandem.jobs.prediction import data_work
from tandem.model.huggingface.model_config import read_shapes
from tandem.pod.rl_models import rl_models
from tandem.runtime.machine.gpus import Device, check_pod_device, chosen_device
from tandem.runtime.process.processes import threads_of
from tandem.types import UserError


class RLSeconds(NamedTuple):
    """Seconds of one step's ``generation``, ``inference`` and ``training``, of one ``evaluation`` and the ``final_evaluation``, and of one step of section
    ``sft``."""

    generation: float
    inference: float
    training: float
    evaluation: float
    final_evaluation: float
    sft: float


class DataSeconds(NamedTuple):
    """Seconds of one ``step``, and of the ``reference``'s pass over the data of DPO."""

    step: float
    reference: float


def rl_seconds(recipe: Recipe, prompts: Prompts, completion_tokens: float) -> RLSeconds:
    """Returns the predicted seconds for completions of so many tokens. Raises ``UserError`` where the machine cannot be measured."""
    with folder_to_check(recipe.model) as folder:
        models = rl_models(recipe, read_shapes(folder, implemented_by=recipe.model.implemented_by))
    parts = rl_work(recipe, models, prompts, completion_tokens)
    device = check_pod_device(recipe.machine, recipe.ranks_here, recipe.rollout.engine_ranks)
    seconds = iter(_seconds([work for part in parts for work in part], recipe.trainer, recipe.machine, device, recipe.parallel.world))
    return RLSeconds(*(sum(islice(seconds, len(part))) for part in parts))


def data_seconds(recipe: PretrainRecipe) -> DataSeconds:
    """Returns the predicted seconds where all sequences of a step have ``data.sequence_length`` tokens. Raises ``UserError`` where the machine cannot be
    measured."""
    with folder_to_check(recipe.model) as folder:
        shapes = read_shapes(folder, "any" if recipe.trains_values else "language", recipe.model.implemented_by)
    trainer, length = recipe.trainer, recipe.data.sequence_length
    work = [data_work(recipe, shapes)]
    if recipe.has_reference:
        tokens = sum(files.dataset.tokens for _, files in open_datasets(recipe.data))
        work.append(training_work(shapes, trainer.dtype, tokens, length, recipe.most_tokens, 1, 0))
    seconds = _seconds(work, trainer, recipe.machine, chosen_device(recipe.machine, recipe.ranks_here), recipe.parallel.world)
    return DataSeconds(seconds[0], sum(seconds[1:]))


def data_cpu_seconds(recipe: PretrainRecipe) -> float:
    """Returns the predicted CPU-seconds of a step of all ranks on a CPU together, where all sequences have ``data.sequence_length`` tokens. Raises
    ``UserError`` where the machine cannot be measured."""
    with folder_to_check(recipe.model) as folder:
        shapes = read_shapes(folder, "any" if recipe.trains_values else "language", recipe.model.implemented_by)
    if recipe.trains_draft:
        return _cpu_seconds([data_work(recipe, shapes, waits=False)], recipe)
    work = mesh_work(shapes, recipe.trainer, recipe.parallel, recipe.step_tokens, recipe.data.sequence_length, recipe.most_tokens)
    return _cpu_seconds([work], recipe)


def rl_cpu_seconds(recipe: Recipe, prompts: Prompts, completion_tokens: float) -> float:
    """Returns the predicted CPU-seconds of a step on a CPU for completions of so many tokens. Raises ``UserError`` as ``rl_seconds``."""
    with folder_to_check(recipe.model) as folder:
        models = rl_models(recipe, read_shapes(folder, implemented_by=recipe.model.implemented_by))
    parts = rl_work(recipe, models, prompts, completion_tokens, waits=False)
    return _cpu_seconds([*parts.generation, *parts.inference, *parts.training], recipe)


def _cpu_seconds(work: Sequence[Work], recipe: AnyRecipe) -> float:
    # Every rank has its share of the threads.
    machine = replace(recipe.machine, threads=max(1, threads_of(recipe.machine) // recipe.parallel.world))
    speed = measure(sorted({product for each in work for product in each.products}), recipe.trainer.dtype, "cpu", machine)
    if any(each.calls for each in work):
        speed = with_exchanges(speed)
    return sum(each.cpu_seconds(speed) for each in work)


def describe_rl_time(recipe: Recipe, prompts: Prompts) -> str:
    """Returns a line on the time of a run with such ``prompts``, whose completions all have ``rollout.max_tokens``."""
    tokens, steps = recipe.rollout.max_tokens, recipe.run.max_steps
    try:
        took = rl_seconds(recipe, prompts, tokens)
    except UserError as error:
        return f"predicted time: not known, {error}"
    step = took.generation + took.inference + took.training
    evaluations = (steps // recipe.evaluation.every_steps + 1) * took.evaluation + took.final_evaluation
    sft = took.sft * recipe.sft.steps if recipe.sft is not None else 0.0
    inference = f"inference {_short(took.inference)}, " if took.inference else ""
    parts = [f"{steps} steps of {_short(step)} (generation {_short(took.generation)}, {inference}training {_short(took.training)})"]
    parts += [f"sft {_short(sft)}"] if recipe.sft is not None else []
    rounds = f" and every step {recipe.algorithm.rounds} rounds of rollout" if recipe.algorithm.rounds > 1 else ""
    speculative = recipe.rollout.engine.speculative_config
    drafts = "" if speculative is None else f" (drafts by '{speculative.method}' are not counted)"
    return (
        f"predicted time: {duration(steps * step + evaluations + sft)} if every completion has rollout.max_tokens ({tokens}) tokens{rounds}: "
        f"{', '.join(parts)}, evaluation {_short(evaluations)}{drafts}"
    )


def describe_data_time(recipe: PretrainRecipe) -> str:
    """Returns a line on the time of a run on data whose sequences are all of ``data.sequence_length`` tokens."""
    try:
        step, reference = data_seconds(recipe)
    except UserError as error:
        return f"predicted time: not known, {error}"
    steps, passed = recipe.run.max_steps, f", reference pass {_short(reference)}" if recipe.has_reference else ""
    return f"predicted time: {duration(reference + steps * step)}, {steps} steps of {recipe.step_tokens:,} tokens and {_short(step)}{passed}"


def _seconds(work: Sequence[Work], trainer: TrainerConfig, machine: MachineConfig, device: Device, ranks: int) -> list[float]:
    """Returns the seconds of each of ``work``. The ranks of a CPU share its cores; each of ``ranks`` GPUs does its share."""
    products = sorted({product for each in work for product in each.products})
    reduced = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}.get(trainer.precision) if device == "cuda" else None
    speed = measure(products, reduced or trainer.dtype, device, machine, precision="fp32" if device == "cuda" else trainer.precision)
    return [each.seconds(speed) / (ranks if device == "cuda" else 1) for each in work]


def _short(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"
