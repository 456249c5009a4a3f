"""The predicted time of a run, for a dry run: its work, at the speed that this machine was measured to have."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.config.machine import MachineConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe
from tandem.config.trainer import TrainerConfig
from tandem.estimate.time import Work, generation_work, training_work
from tandem.jobs.checks.check_run import folder_to_check
from tandem.jobs.checks.measured_speed import measure
from tandem.jobs.data_run.train_data import open_datasets
from tandem.jobs.display import duration
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.model_source import found_model
from tandem.runtime.machine.gpus import Device, check_pod_device, chosen_device
from tandem.types import UserError

FORWARD_AND_BACKWARD = 3.0
"""A backward pass has two products for each of the forward pass."""


class RLSeconds(NamedTuple):
    """Seconds of one step's ``generation`` and ``training``, of one ``evaluation`` and the ``final_evaluation``, and of one step of section ``sft``."""

    generation: float
    training: float
    evaluation: float
    final_evaluation: float
    sft: float


class DataSeconds(NamedTuple):
    """Seconds of one ``step``, and of the ``reference``'s pass over the data of DPO."""

    step: float
    reference: float


def rl_seconds(recipe: Recipe, prompt_tokens: float, completion_tokens: float) -> RLSeconds:
    """Returns the predicted seconds for prompts and completions of so many tokens. Raises ``UserError`` where the machine cannot be measured."""
    with folder_to_check(recipe.model) as folder:
        shapes = read_shapes(folder)
    rollout, algorithm, evaluation, trainer = recipe.rollout, recipe.algorithm, recipe.evaluation, recipe.trainer
    length = prompt_tokens + completion_tokens
    has_teacher = algorithm.needs_reference and bool(recipe.reference.path)
    forward_passes = (algorithm.needs_reference and not has_teacher) + (algorithm.old_logprobs == "recompute")

    def generation(prompts: int, samples: int) -> Work:
        engine = rollout.engine
        return generation_work(
            shapes, trainer.dtype, prompts, prompt_tokens, samples, completion_tokens, engine.max_num_seqs, engine.max_num_batched_tokens
        )

    def training(sequences: int, passes: float, updates: int, shapes: ModelShapes = shapes) -> Work:
        return training_work(shapes, trainer.dtype, sequences * length, length, trainer.micro_batch_tokens, passes, updates)

    work = [
        generation(rollout.prompts_per_step, algorithm.group_size),
        training(
            rollout.prompts_per_step * algorithm.group_size, algorithm.epochs * _passes(trainer) + forward_passes, algorithm.epochs * algorithm.minibatches
        ),
        generation(evaluation.prompts, 1),
        generation(evaluation.final_prompts, 1),
        training(recipe.sft.batch_size, _passes(trainer), 1) if recipe.sft is not None else Work(),
    ]
    if has_teacher:
        work.append(training(rollout.prompts_per_step * algorithm.group_size, 1, 0, read_shapes(found_model(recipe.reference.path))))
    device = check_pod_device(recipe.machine, recipe.parallel.world, rollout.engine_ranks)
    generated, trained, *others = _seconds(work, trainer, recipe.machine, device, recipe.parallel.world)
    return RLSeconds(generated, trained + sum(others[3:]), *others[:3])


def data_seconds(recipe: PretrainRecipe) -> DataSeconds:
    """Returns the predicted seconds where all sequences of a step have ``data.sequence_length`` tokens. Raises ``UserError`` where the machine cannot be
    measured."""
    with folder_to_check(recipe.model) as folder:
        shapes = read_shapes(folder, "any" if recipe.trains_values else "language")
    trainer, length = recipe.trainer, recipe.data.sequence_length
    work = [training_work(shapes, trainer.dtype, recipe.step_tokens, length, recipe.most_tokens, _passes(trainer), 1)]
    if recipe.has_reference:
        tokens = sum(files.dataset.tokens for _, files in open_datasets(recipe.data))
        work.append(training_work(shapes, trainer.dtype, tokens, length, recipe.most_tokens, 1, 0))
    seconds = _seconds(work, trainer, recipe.machine, chosen_device(recipe.machine, recipe.parallel.world), recipe.parallel.world)
    return DataSeconds(seconds[0], sum(seconds[1:]))


def describe_rl_time(recipe: Recipe, prompt_tokens: float) -> str:
    """Returns a line on the time of a run whose prompts have ``prompt_tokens`` tokens on average and whose completions all have
    ``rollout.max_tokens``."""
    tokens, steps = recipe.rollout.max_tokens, recipe.run.max_steps
    try:
        took = rl_seconds(recipe, prompt_tokens, tokens)
    except UserError as error:
        return f"predicted time: not known, {error}"
    step = took.generation + took.training
    evaluations = (steps // recipe.evaluation.every_steps + 1) * took.evaluation + took.final_evaluation
    sft = took.sft * recipe.sft.steps if recipe.sft is not None else 0.0
    parts = [f"{steps} steps of {_short(step)} (generation {_short(took.generation)}, training {_short(took.training)})"]
    parts += [f"sft {_short(sft)}"] if recipe.sft is not None else []
    return (
        f"predicted time: {duration(steps * step + evaluations + sft)} if every completion has rollout.max_tokens ({tokens}) tokens: "
        f"{', '.join(parts)}, evaluation {_short(evaluations)}"
    )


def describe_data_time(recipe: PretrainRecipe) -> str:
    """Returns a line on the time of a run on data whose sequences are all of ``data.sequence_length`` tokens."""
    try:
        step, reference = data_seconds(recipe)
    except UserError as error:
        return f"predicted time: not known, {error}"
    steps, passed = recipe.run.max_steps, f", reference pass {_short(reference)}" if recipe.has_reference else ""
    return f"predicted time: {duration(reference + steps * step)}, {steps} steps of {recipe.step_tokens:,} tokens and {_short(step)}{passed}"


def _passes(trainer: TrainerConfig) -> float:
    return FORWARD_AND_BACKWARD + (trainer.recompute == "full")


def _seconds(work: Sequence[Work], trainer: TrainerConfig, machine: MachineConfig, device: Device, ranks: int) -> list[float]:
    """Returns the seconds of each of ``work``. The ranks of a CPU share its cores; each of ``ranks`` GPUs does its share."""
    products = sorted({product for each in work for product in each.products})
    reduced = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}.get(trainer.precision) if device == "cuda" else None
    speed = measure(products, reduced or trainer.dtype, device, machine)
    return [each.seconds(speed) / (ranks if device == "cuda" else 1) for each in work]


def _short(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"
