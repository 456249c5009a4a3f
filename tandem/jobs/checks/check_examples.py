"""Checks before supervised fine-tuning starts: whether its datasets hold examples, and their lengths."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tandem.config.pretrain import DataConfig
from tandem.config.run import RunConfig
from tandem.config.sft import DemonstrationsConfig
from tandem.config.task import TaskConfig
from tandem.data.prompts import PromptSource
from tandem.data.shard_files import ShardFiles
from tandem.data.task_prompts import task_prompts
from tandem.jobs.data_run.train_data import all_lengths
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError


def check_examples(data: DataConfig, run: RunConfig, datasets: Sequence[tuple[str, ShardFiles]]) -> list[str]:
    """Returns what will be learned, one line for each figure. ``datasets``: by path, the held-out one last. Raises ``UserError`` where a
    dataset has no loss mask or no example that fits."""
    longest, examples, lines = data.sequence_length, 0, []
    for number, (path, files) in enumerate(datasets):
        if not files.dataset.has_masks:
            raise UserError(
                f"'{path}' does not say which tokens are learned; make it with 'tandem tokenize --examples', or set algorithm.name to pretrain"
            )
        too_long = [
            (length, f"document {document} of {files.dataset.shards[shard].name}")
            for shard, lengths in enumerate(all_lengths(files))
            for document, length in enumerate(lengths)
            if length > longest
        ]
        kept = files.dataset.documents - len(too_long)
        if too_long and data.too_long == "refuse":
            most, where = max(too_long, key=lambda example: example[0])
            raise UserError(
                f"'{path}' has examples of more than data.sequence_length ({longest}) tokens ({len(too_long):,} of {files.dataset.documents:,}), the "
                f"longest {most} ({where}); raise it, or set data.too_long to leave_out"
            )
        if kept == 0:
            raise UserError(f"'{path}' has no example of at most {longest} tokens; raise data.sequence_length")
        if too_long:
            lines.append(f"left out of '{path}': {len(too_long):,} of {files.dataset.documents:,} examples, which have more than {longest} tokens")
        examples += kept if number < len(data.train) else 0
    asked = run.max_steps * data.global_batch_size
    learned = sum(files.dataset.learned for _, files in datasets[: len(data.train)])
    tokens = sum(files.dataset.tokens for _, files in datasets[: len(data.train)])
    return [
        f"data: {examples:,} examples in {len(data.train)} datasets, {learned:,} of {tokens:,} tokens learned",
        f"asked for: {asked:,} examples, {asked / examples:.2f} epochs",
        *lines,
    ]


def check_demonstrations(
    task: TaskConfig, demonstrations: DemonstrationsConfig, data: DataConfig, run: RunConfig, folder: Path
) -> list[str]:
    """Returns what the model in ``folder`` will learn, one line for each figure. Raises ``UserError`` where demonstrations of ``task`` cannot
    be made or do not fit."""
    with closing(task_prompts(task, folder, seed=run.seed, context_tokens=data.sequence_length)) as prompts:
        count = prompts.task.size
        check_shown(prompts, demonstrations, folder)
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
