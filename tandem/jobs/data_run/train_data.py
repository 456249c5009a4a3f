"""The data of a run: its datasets as one endless order of sequences or examples, and the held-out data."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from tandem.config.pretrain import DataConfig, DatasetConfig, PretrainRecipe
from tandem.config.sft import DemonstrationsConfig
from tandem.config.task import TaskConfig
from tandem.data.example_stream import ExampleStream
from tandem.data.logprob_files import LogprobFiles
from tandem.data.mixture import mixed
from tandem.data.prompts import EncodedDemonstration
from tandem.data.shard_files import ShardFiles
from tandem.data.stream import Piece, TokenStream
from tandem.data.stream import Sequence as Pieces
from tandem.data.task_prompts import task_prompts
from tandem.runtime.records.journal import Journal
from tandem.storage.files import open_storage
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

HELD_OUT_SEED = 0
ROLLOUTS = "rollouts"
"""The folder, in that of a run of ``draft``, of the dataset of rollouts."""
REFERENCE = "reference"
"""The folder, in that of a run, of the log-probabilities of the reference."""
Sequences = Callable[[int], Pieces]


@dataclass(frozen=True, slots=True)
class TrainData:
    """``sequence`` and ``held_out`` (``None``: the run has no held-out data) return sequences by their index. ``held_out_sequences``: the
    number of sequences, examples or pairs, of an evaluation. ``notes``: messages for the user, one line each."""

    sequence: Sequences
    held_out: Sequences | None
    held_out_sequences: int
    notes: tuple[str, ...] = ()


def open_data(recipe: PretrainRecipe, directory: Path, start: Path, journal: Journal | None) -> TrainData:
    """Opens the mixture and the held-out data of the run in ``directory``, or the demonstrations of a task for the model in ``start``. With
    the pairs of DPO come the log-probabilities of the reference, which must have been written before the first one is read. Raises
    ``UserError`` where the data has changed since the run started."""
    if recipe.task is not None:
        return _demonstrations(recipe.task, recipe.demonstrations, recipe.run.seed, recipe.data.sequence_length, start, journal, recipe.learns_from_pairs)
    data = recipe.data if not recipe.data.rollouts else replace(recipe.data, train=(*recipe.data.train, DatasetConfig(str(directory / ROLLOUTS))))
    streams: list[TokenStream | ExampleStream] = []
    sequences: list[Sequences] = []
    digests: dict[str, str] = {}
    notes: list[str] = []
    count, each = len(data.train), recipe.sequences_each
    for number, (path, files) in enumerate(open_datasets(data)):
        seed = HELD_OUT_SEED if number == count else recipe.run.seed
        stream = open_stream(files, recipe.data.sequence_length, seed, examples=is_of_examples(recipe, files), each=each)
        sequences.append(stream.sequence)
        if recipe.has_reference:
            sequences[-1] = LogprobFiles(reference_folder(directory, number), files, recipe.trainer.dtype).beside(stream.sequence)
        if isinstance(stream, ExampleStream) and stream.left_out:
            kind = "pairs" if recipe.learns_from_pairs else "examples"
            notes.append(f"left out of '{path}': {stream.left_out:,} of {files.dataset.documents // each:,} {kind}, which are too long")
        if isinstance(stream, TokenStream) and files.dataset.has_masks:
            notes.append(f"'{path}' has a loss mask, which pretraining ignores")
        streams.append(stream)
        # The folder of a run may be moved.
        digests[ROLLOUTS if path == str(directory / ROLLOUTS) else path] = hashlib.blake2b(files.dataset.to_json(), digest_size=16).hexdigest()
    _check_data(journal, digests)
    weights = [dataset.weight for dataset in data.train]
    train = cast("Sequences", mixed(sequences[:count], weights, recipe.run.seed))
    if len(streams) == count:
        return TrainData(train, None, 0, tuple(notes))
    held_out, measured = streams[count], recipe.evaluation.sequences
    # An example that is evaluated twice would count twice.
    measured = min(measured, held_out.examples) if isinstance(held_out, ExampleStream) else measured
    return TrainData(train, sequences[count], measured, tuple(notes))


def is_of_examples(recipe: PretrainRecipe, files: ShardFiles) -> bool:
    """Returns whether the documents of ``files`` are examples, which are never split. A draft head learns from text too, all of whose tokens count."""
    return files.dataset.has_masks if recipe.trains_draft else recipe.learns_from_examples


def _check_data(journal: Journal | None, digests: dict[str, str]) -> None:
    """Journals the digests of the training data. Raises ``UserError`` where they differ from those of the run's start."""
    saved = None if journal is None else journal.get("data")
    if journal is not None and saved is None:
        journal.set("data", digests)
    elif saved is not None and saved != digests:
        changed = next(path for path in {**saved, **digests} if saved.get(path) != digests.get(path))
        raise UserError(f"the data '{changed}' has changed since this run started; restore it or start a new run")


def _demonstrations(
    task: TaskConfig, config: DemonstrationsConfig, seed: int, context_tokens: int, start: Path, journal: Journal | None, pairs: bool
) -> TrainData:
    """Returns demonstration ``i`` of ``task`` as sequence ``i``; the completion's tokens are learned. ``pairs``: a right one, and a wrong one of the same
    prompt."""
    ends = Tokenizer.from_folder(start).eos_token_ids
    if not ends:
        raise UserError(f"the tokenizer in '{start}' has no end-of-sequence token, which demonstrations need; set eos_token")
    prompts = task_prompts(task, start, seed=seed, context_tokens=context_tokens)
    _check_data(journal, {f"task {task.name}": prompts.fingerprint})

    shares = (0.0, 1.0) if pairs else (config.corrupted_share,)

    def sequence(index: int) -> Pieces:
        return [_piece(index, prompts.demonstration(index, config.seed, share, ends[0])) for share in shares]

    return TrainData(sequence, None, 0)


def _piece(index: int, shown: EncodedDemonstration) -> Piece:
    prompt, completion = shown.prompt_token_ids, shown.completion_token_ids
    learned = array("B", [0] * len(prompt) + list(map(int, shown.learned)))
    return Piece(0, index, 0, memoryview(array("q", (*prompt, *completion))), memoryview(learned))


def open_datasets(data: DataConfig) -> list[tuple[str, ShardFiles]]:
    """Returns the datasets by path, in the order of ``dataset_paths``."""
    cache = Path(data.cache) if data.cache else None
    return [
        (path, ShardFiles(open_storage(path), None if cache is None else cache / f"dataset-{number}"))
        for number, path in enumerate(dataset_paths(data))
    ]


def reference_folder(directory: Path, number: int) -> Path:
    """Returns the folder of the reference's log-probabilities of dataset ``number`` of the run in ``directory``."""
    return directory / REFERENCE / f"dataset-{number}"


def open_stream(files: ShardFiles, length: int, seed: int, *, examples: bool, each: int = 1) -> TokenStream | ExampleStream:
    """Returns the order of one dataset: its documents in sequences of ``length`` tokens, or its examples, of ``each`` documents of at most
    ``length`` tokens."""
    if examples:
        return ExampleStream(all_lengths(files), files.open, seed=seed, longest=length, each=each)
    return TokenStream(files.dataset, files.open, seed=seed, length=length)


def all_lengths(files: ShardFiles) -> list[Sequence[int]]:
    """Returns the number of tokens of each document of each shard."""
    return [files.lengths(number) for number in range(len(files.dataset.shards))]


def dataset_paths(data: DataConfig) -> list[str]:
    """Returns the paths of the training datasets, then that of the held-out one, if there is one."""
    return [dataset.path for dataset in data.train] + ([data.held_out] if data.held_out else [])
