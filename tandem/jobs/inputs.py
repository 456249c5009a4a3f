"""What is looked at before a run begins: files, prompts, reward functions, and whether the machine is large enough."""

import contextlib
import logging
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.config.warm_up import WarmUpConfig
from tandem.data.prompts import PromptSource
from tandem.estimate.memory import PodMemory
from tandem.estimate.model_bytes import optimizer_bytes, weight_bytes
from tandem.model.huggingface_config import read_shapes
from tandem.model.new_model import folder_without_weights
from tandem.pod.prompts import context_tokens, prompt_source
from tandem.pod.residents import plan
from tandem.rl.rewards.pool import RewardPool
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
        memory, sleep_mode = plan(recipe, shapes, context)
        source = stack.enter_context(contextlib.closing(prompt_source(recipe, folder)))
        if recipe.warm_up is not None:
            _check_demonstrations(recipe.warm_up, source, folder)
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


def _check_demonstrations(config: WarmUpConfig, source: PromptSource, folder: Path) -> None:
    """A whole epoch of a finite task, else the first one."""
    ends = Tokenizer.from_folder(folder).eos_token_ids
    if not ends:
        raise UserError(f"the tokenizer in '{folder}' names no end of sequence, which a section 'warm_up' needs; set eos_token")
    for index in range(source.task.size or 1):
        source.demonstration(index, config.seed, config.corrupted_share, ends[0])


def check_disk(directory: Path, needed: int, fix: str = "make room, lower checkpoint.keep or set run.directory") -> None:
    """Raise ``RunError`` where the disk of ``directory``, which need not be there yet, has fewer than ``needed`` bytes free."""
    standing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    total, _, free = shutil.disk_usage(standing)
    if total and free < needed:
        raise RunError(
            f"this run needs up to {needed / 2**20:,.0f} MiB on the disk of '{directory}' and {free / 2**20:,.0f} MiB are free; "
            f"{fix}"
        )
