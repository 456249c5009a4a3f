"""What a run of ``draft`` makes in its folder before its first step: a dataset of the rollouts, and the head that it starts from."""

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tandem.config.pretrain import DataConfig, PretrainRecipe
from tandem.data.shard_files import ShardFiles
from tandem.data.shards import ShardWriter, token_dtype
from tandem.data.tokenizing.tokenize import DATASET, TokenizedDataset, shard_name
from tandem.data.tokenizing.tokenize_plan import tokenizer_fingerprint
from tandem.jobs.data_run.train_data import ROLLOUTS
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.eagle3 import MOST_DRAFT_VOCABULARY, eagle3_shapes
from tandem.layout.shapes import ModelShapes
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import initialise_eagle3, load_eagle3, save_eagle3
from tandem.model.huggingface.model_config import read_shapes
from tandem.runtime.process.temporary import whole_folder
from tandem.runtime.records.journal import Journal
from tandem.storage.files import open_storage
from tandem.types import UserError

HEAD = Path("models") / "draft"
"""The folder, in that of a run, of the head that it starts from."""
EVERY_STEP = 2**62


def rollouts_of(run: Path, steps: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the tokens of each sample of the newest ``steps`` steps (0: all) of the run of reinforcement learning ``run``, and 1 for each that was sampled.
    Raises ``UserError`` for a folder without samples."""
    if not (run / "journal.sqlite").is_file():
        raise UserError(f"'{run}' in 'data.rollouts' is not the folder of a run; name one of reinforcement learning")
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        chosen = sorted(journal.steps_before(EVERY_STEP, steps or EVERY_STEP))
        if not chosen:
            raise UserError(f"'{run}' in 'data.rollouts' has no samples; name a run of reinforcement learning that has drawn some")
        for step in chosen:
            for number in range(len(journal.sample_blobs(step))):
                for sample in journal.samples(step, number) or []:
                    for each in sample.sequences:
                        yield [*each.prompt_token_ids, *each.token_ids], [0] * len(each.prompt_token_ids) + [int(own) for own in each.is_sampled]


def check_rollouts(data: DataConfig, vocab_size: int) -> list[str]:
    """Returns a line on the samples of ``data.rollouts``; none without. Raises ``UserError`` where they are not of a model of ``vocab_size`` tokens, or are all
    too long."""
    lines = []
    for run in data.rollouts:
        lengths = list[int]()
        for tokens, learned in rollouts_of(Path(run), data.rollout_steps):
            if max(tokens) >= vocab_size:
                raise UserError(f"'{run}' in 'data.rollouts' has token {max(tokens)} and the model has {vocab_size}; they do not belong together")
            lengths += [len(tokens)] * (len(tokens) <= data.sequence_length and any(learned))
        if not lengths:
            raise UserError(f"'{run}' in 'data.rollouts' has no sample of at most {data.sequence_length} tokens; raise data.sequence_length")
        lines.append(f"rollouts of '{run}': {len(lengths):,} samples of at most {data.sequence_length} tokens, {sum(lengths):,} tokens")
    return lines


def make_draft_inputs(recipe: PretrainRecipe, directory: Path, start: Path) -> None:
    """Makes the dataset and the head of the run in ``directory``, whose target is in ``start``, unless they are there. Raises ``UserError``."""
    target = read_shapes(start)
    if recipe.data.rollouts and not (directory / ROLLOUTS).exists():
        _write_rollouts(recipe.data, directory / ROLLOUTS, start, target.vocab_size)
    if (directory / HEAD).exists():
        return
    if recipe.algorithm.init_from:
        save_eagle3(load_eagle3(recipe.algorithm.init_from, ReferenceKernels(), target), directory / HEAD)
        return
    size = min(recipe.algorithm.draft_vocab_size or MOST_DRAFT_VOCABULARY, target.vocab_size)
    head = Eagle3Head(eagle3_shapes(target, size), ReferenceKernels())
    initialise_eagle3(head, recipe.run.seed)
    head.target_ids = torch.tensor(_frequent_tokens(recipe, directory, target, size))
    save_eagle3(head, directory / HEAD)


def _write_rollouts(data: DataConfig, folder: Path, start: Path, vocab_size: int) -> None:
    with whole_folder(folder) as made:
        dtype, shards = token_dtype(vocab_size), []
        for number, run in enumerate(data.rollouts):
            writer = ShardWriter(made, shard_name(number), dtype, has_masks=True)
            for tokens, learned in rollouts_of(Path(run), data.rollout_steps):
                if len(tokens) <= data.sequence_length and any(learned[1:]):
                    writer.add(tokens, learned)
            shards.append(writer.close())
        fingerprint = tokenizer_fingerprint(start) if (start / "tokenizer.json").is_file() else ""
        (made / DATASET).write_bytes(TokenizedDataset(fingerprint, vocab_size, None, dtype, tuple(shards)).to_json())


def _frequent_tokens(recipe: PretrainRecipe, directory: Path, target: ModelShapes, size: int) -> list[int]:
    """Returns the ``size`` most frequent tokens of the training data, ascending; among equals, and of those that it lacks, the lowest ids."""
    if size == target.vocab_size:
        return list(range(size))
    counts: Counter[int] = Counter()
    paths = [dataset.path for dataset in recipe.data.train] + ([str(directory / ROLLOUTS)] if recipe.data.rollouts else [])
    for path in paths:
        files = ShardFiles(open_storage(path), Path(recipe.data.cache) if recipe.data.cache else None)
        for number in range(len(files.dataset.shards)):
            reader = files.open(number)
            for document, length in enumerate(reader.lengths):
                counts.update(array("q", reader.tokens(document, 0, length)))
    return sorted(sorted(range(target.vocab_size), key=lambda token: (-counts[token], token))[:size])
