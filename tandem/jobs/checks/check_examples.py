"""Checks before supervised fine-tuning starts: whether its datasets hold examples, and their lengths."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tandem.config.pretrain import DataConfig, PretrainRecipe
from tandem.config.run import RunConfig
from tandem.config.sft import DemonstrationsConfig
from tandem.config.task import TaskConfig
from tandem.data.prompts import PromptSource
from tandem.data.shard_files import ShardFiles
from tandem.data.task_prompts import task_prompts
from tandem.jobs.data_run.train_data import all_lengths
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError


def check_examples(recipe: PretrainRecipe, datasets: Sequence[tuple[str, ShardFiles]]) -> list[str]:
    """Returns what will be learned, one line for each figure. ``datasets``: by path, the held-out one last. Raises ``UserError`` where a
    dataset has no loss mask, no example that fits, or pairs where examples are learned or the reverse."""
    data, each, kind = recipe.data, recipe.sequences_each, "pairs" if recipe.learns_from_pairs else "examples"
    longest, examples, lines = data.sequence_length, 0, []
    for number, (path, files) in enumerate(datasets):
        if not files.dataset.has_masks:
            raise UserError(
                f"'{path}' does not say which tokens are learned; make it with 'tandem tokenize --{kind}', or set algorithm.name to pretrain"
            )
        if files.dataset.pairs != recipe.learns_from_pairs:
            has, other = ("preference pairs", "dpo or reward_model") if files.dataset.pairs else ("no preference pairs", "sft")
            raise UserError(
                f"'{path}' has {has}, and algorithm.name is '{recipe.algorithm.name}'; make it with 'tandem tokenize --{kind}', or set "
                f"algorithm.name to {other}"
            )
        too_long = [
            (length, f"document {document} of {files.dataset.shards[shard].name}")
            for shard, lengths in enumerate(all_lengths(files))
            for document, length in ((first, max(lengths[first : first + each])) for first in range(0, len(lengths), each))
            if length > longest
        ]
        count = files.dataset.documents // each
        kept = count - len(too_long)
        if too_long and data.too_long == "refuse":
            most, where = max(too_long, key=lambda example: example[0])
            raise UserError(
                f"'{path}' has {kind} of more than data.sequence_length ({longest}) tokens ({len(too_long):,} of {count:,}), the "
                f"longest {most} ({where}); raise it, or set data.too_long to leave_out"
            )
        if kept == 0:
            raise UserError(f"'{path}' has no {kind[:-1]} of at most {longest} tokens; raise data.sequence_length")
        if too_long:
            lines.append(f"left out of '{path}': {len(too_long):,} of {count:,} {kind}, which have more than {longest} tokens")
        examples += kept if number < len(data.train) else 0
    asked = recipe.run.max_steps * data.global_batch_size
    learned = sum(files.dataset.learned for _, files in datasets[: len(data.train)])
    tokens = sum(files.dataset.tokens for _, files in datasets[: len(data.train)])
    return [
        f"data: {examples:,} {kind} in {len(data.train)} datasets, {learned:,} of {tokens:,} tokens learned",
        f"asked for: {asked:,} {kind}, {asked / examples:.2f} epochs",
        *lines,
    ]


def check_demonstrations(
    task: TaskConfig, demonstrations: DemonstrationsConfig, data: DataConfig, run: RunConfig, folder: Path, pairs: bool
) -> list[str]:
    """Returns what the model in ``folder`` will learn, one line for each figure. ``pairs``: wrong demonstrations beside right ones. Raises
    ``UserError`` where demonstrations of ``task`` cannot be made or do not fit."""
    with closing(task_prompts(task, folder, seed=run.seed, context_tokens=data.sequence_length)) as prompts:
        count = prompts.task.size
        check_shown(prompts, demonstrations, folder)
        if pairs:
            check_shown(prompts, replace(demonstrations, corrupted_share=1.0), folder)
    asked = run.max_steps * data.global_batch_size
    epochs = f", {asked / count:.2f} epochs" if count else ""
    return [f"data: {count or 'endless'} demonstrations of task '{task.name}'", f"asked for: {asked:,} demonstrations{epochs}"]


def check_shown(prompts: PromptSource, config: DemonstrationsConfig, folder: Path) -> None:
    """Makes every demonstration of a finite task, else the first one. Raises ``UserError`` where one cannot be made or does not fit."""
    ends = Tokenizer.from_folder(folder).eos_token_ids
    if not ends:
        raise UserError(f"the tokenizer in '{folder}' has no end-of-sequence token, which demonstrations (section 'sft') need; set eos_token")
    for index in range(prompts.task.size or 1):
        prompts.demonstration(index, config.seed, config.corrupted_share, ends[0])
