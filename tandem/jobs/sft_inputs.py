"""What is looked at before supervised fine-tuning begins: whether its datasets are of examples, and how long those are."""

from collections.abc import Sequence

from tandem.config.pretrain import PretrainRecipe
from tandem.data.shard_files import ShardFiles
from tandem.jobs.pretrain_data import all_lengths
from tandem.types import UserError


def check_examples(recipe: PretrainRecipe, datasets: Sequence[tuple[str, ShardFiles]]) -> list[str]:
    """Refuse what cannot be learned from; what will be, a line a figure. ``datasets``: by path, the held-out one last."""
    longest, examples, lines = recipe.data.sequence_length, 0, []
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
        if too_long and recipe.data.too_long == "refuse":
            most, where = max(too_long, key=lambda found: found[0])
            raise UserError(
                f"'{path}' has examples of more than data.sequence_length ({longest}) tokens ({len(too_long):,} of {files.dataset.documents:,}), the "
                f"longest {most} ({where}); raise it, or set data.too_long to leave_out"
            )
        if kept == 0:
            raise UserError(f"'{path}' has no example of at most {longest} tokens; raise data.sequence_length")
        if too_long:
            lines.append(f"left out of '{path}': {len(too_long):,} of {files.dataset.documents:,} examples, which have more than {longest} tokens")
        examples += kept if number < len(recipe.data.train) else 0
    asked = recipe.run.max_steps * recipe.data.global_batch_size
    learned = sum(files.dataset.learned for _, files in datasets[: len(recipe.data.train)])
    tokens = sum(files.dataset.tokens for _, files in datasets[: len(recipe.data.train)])
    return [
        f"data: {examples:,} examples in {len(recipe.data.train)} datasets, {learned:,} of {tokens:,} tokens learned",
        f"asked for: {asked:,} examples, {asked / examples:.2f} epochs",
        *lines,
    ]
