"""The stage of supervised fine-tuning that a recipe of reinforcement learning starts with: a run of ``sft`` (whose loop is ``pretrain``) on the
task's demonstrations, in a folder of its own, with its own checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.model import ModelConfig
from tandem.config.pretrain import DataConfig, PretrainConfig, PretrainRecipe
from tandem.config.recipe import Recipe
from tandem.jobs.data_run.supervise import supervise
from tandem.jobs.run_files import SFT_FOLDER, write_recipe
from tandem.runtime.callback import Callback
from tandem.runtime.machine.gpus import pod_device
from tandem.runtime.process.faults import FaultPlan

CHECKPOINT_STEPS = 100
"""Steps between checkpoints of the stage."""


def sft_recipe(recipe: Recipe, directory: Path, model: Path, context_tokens: int) -> PretrainRecipe:
    """Returns the recipe of the stage of the run in ``directory``. ``model``: the folder of the model that it starts from."""
    sft = recipe.sft
    assert sft is not None
    given = recipe.trainer
    # The recipe is saved and read again, so it has no key that the stage does not read.
    trainer = replace(
        given, lora=None, learning_rate=sft.learning_rate, warmup_steps=sft.warmup_steps, schedule=sft.schedule, decay_steps=0, share_prompts=False,
        router_replay="auto",
        # A folder for a pod's residents alone is refused where there is no rollout.
        min_lr_ratio=given.min_lr_ratio if sft.schedule != "constant" else 0.0, offload_folder=given.offload_folder if given.offloads else "",
    )  # fmt: skip
    return PretrainRecipe(
        algorithm=PretrainConfig("sft"),
        model=ModelConfig(path=str(model), max_length=recipe.model.max_length, export_dtype=given.dtype),
        data=DataConfig(sequence_length=context_tokens, global_batch_size=sft.batch_size),
        task=recipe.task,
        demonstrations=sft.demonstrations,
        run=replace(recipe.run, name=SFT_FOLDER, directory=str(directory), max_steps=sft.steps, trace_steps=()),
        trainer=trainer,
        checkpoint=CheckpointConfig(every_steps=min(sft.steps, CHECKPOINT_STEPS), keep=1),
        machine=replace(recipe.machine, device=pod_device(recipe.machine)),
        parallel=recipe.parallel,
    )


def run_sft_stage(recipe: PretrainRecipe, folder: Path, callback: Callback, inline: bool, faults: FaultPlan | None) -> Path:
    """Runs ``recipe`` in ``folder``, from its newest checkpoint if there is one, unless it has ended before. Returns the trained model's folder."""
    model = folder / "model"
    if model.exists():
        return model
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_recipe(recipe, folder)
    if inline:
        from tandem.jobs.data_run.start_data import execute_data_run

        execute_data_run(recipe, folder, _StageCallback(callback, recipe.run.max_steps))
    else:
        supervise(recipe, folder, _StageCallback(callback, recipe.run.max_steps), resumed=(folder / "checkpoints").exists(), faults=faults, is_stage=True)
    return model


class _StageCallback(Callback):
    """Reports the stage as one phase of its run."""

    def __init__(self, callback: Callback, steps: int) -> None:
        self._callback, self._steps = callback, steps

    def row(self, row: Mapping[str, float | int | str]) -> None:
        figures = f"loss {float(row['train/loss']):.3f}, {float(row['perf/tokens_per_s']):.0f} tokens/s"
        self._callback.progress("sft", int(row["step"]) + 1, self._steps, figures)

    def message(self, text: str) -> None:
        self._callback.message(text)

    def health(self, readings: Sequence[Sequence[Any]]) -> None:
        self._callback.health(readings)

    def wants_stop(self) -> bool:
        return self._callback.wants_stop()
