"""What is looked at before a run begins: files, prompts, reward functions, and whether the machine is large enough."""

import contextlib
import logging
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.estimate.memory import PodMemory
from tandem.estimate.model_bytes import optimizer_bytes, weight_bytes
from tandem.jobs.sft_inputs import check_shown
from tandem.layout.expert_balance import check_balance
from tandem.layout.mesh_check import check_layout
from tandem.layout.pipeline_stages import spans_of
from tandem.layout.placement import check_placement
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface_config import read_shapes
from tandem.model.new_model import folder_without_weights
from tandem.model_registry.open import open_registry
from tandem.pod.prompts import context_tokens, prompt_source
from tandem.pod.residents import plan
from tandem.rl.rewards.pool import RewardPool
from tandem.storage.files import open_storage
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will need, known before it begins: memory of every phase, whether the engine stays between steps, and the
    most that its checkpoints and models take on the disk."""

    memory: PodMemory
    sleep_mode: str
    disk_bytes: int

    def lines(self) -> list[str]:
        """For a person, one line a figure."""
        mebibytes = {name: getattr(self.memory, name) / 2**20 for name in ("trainer", "rollout", "segments")}
        return [
            f"between steps: {self.sleep_mode} the engine",
            *(f"predicted {name}: {size:,.0f} MiB" for name, size in mebibytes.items()),
            f"predicted disk: {self.disk_bytes / 2**20:,.0f} MiB",
        ]


def check_inputs(recipe: Recipe) -> RunPlan:
    """Refuse, before any work, what the recipe's own checks cannot see: files and folders that are not what it says,
    prompts that do not fit, a machine that is too small."""
    with ExitStack() as stack:
        if recipe.model.create is not None:
            folder = stack.enter_context(folder_without_weights(recipe.model.create))
        else:
            folder = Path(recipe.model.path or "")
            _check_folder(folder)
        shapes, context = read_shapes(folder), context_tokens(recipe, folder)
        _check_mesh(recipe, shapes)
        memory, sleep_mode = plan(recipe, shapes, context)
        source = stack.enter_context(contextlib.closing(prompt_source(recipe, folder)))
        if recipe.sft is not None:
            check_shown(source, recipe.sft.demonstrations, folder)
    if recipe.checkpoint.upload:
        open_storage(recipe.checkpoint.upload, create=True)
    if recipe.registry.is_on:
        open_registry(recipe.registry, create=True).close()
    with RewardPool(recipe.rewards):
        logger.debug("every reward function loads")
    kept, models = recipe.checkpoint.keep + 1, 3
    weights = weight_bytes(shapes, recipe.trainer.dtype)
    found = RunPlan(memory, sleep_mode, kept * (weights + optimizer_bytes(shapes)) + models * weights)
    check_disk(Path(recipe.run.directory), found.disk_bytes)
    return found


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"'model.path' is '{folder}', which is no folder; name a local Hugging Face folder")
    shapes, tokenizer = read_shapes(folder), Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > shapes.vocab_size:
        raise UserError(
            f"the tokenizer in '{folder}' has {tokenizer.vocab_size} tokens and the model {shapes.vocab_size}; they do not belong together"
        )
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise UserError(f"'{folder}' has neither model.safetensors nor model.safetensors.index.json; only safetensors weights are read")


def _check_mesh(recipe: Recipe, shapes: ModelShapes) -> None:
    """Refuse a mesh that this model or this recipe's batches cannot be divided over."""
    parallel = recipe.parallel
    check_placement(parallel)
    check_layout(shapes, parallel)
    check_balance(shapes, recipe.trainer)
    spans_of(parallel, shapes)
    if recipe.sft is not None and recipe.sft.batch_size < parallel.data:
        raise UserError(
            f"'parallel.data' is {parallel.data} and a step of section 'sft' has {recipe.sft.batch_size} demonstrations; raise sft.batch_size, so "
            "that every rank has one"
        )


def check_disk(directory: Path, needed: int, fix: str = "make room, lower checkpoint.keep or set run.directory") -> None:
    """Raise ``RunError`` where the disk of ``directory``, which need not be there yet, has fewer than ``needed`` bytes free."""
    standing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    total, _, free = shutil.disk_usage(standing)
    if total and free < needed:
        raise RunError(
            f"this run needs up to {needed / 2**20:,.0f} MiB on the disk of '{directory}' and {free / 2**20:,.0f} MiB are free; "
            f"{fix}"
        )
