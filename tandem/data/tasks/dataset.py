"""A task from a data file, a folder or a dataset of the Hugging Face Hub. All rows are checked before work begins."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.config.task import TaskConfig
from tandem.data.counter import counter_random
from tandem.data.rows.row import Rows, kind_of
from tandem.data.rows.source import Source, read_rows
from tandem.data.split import Split, split_position
from tandem.data.tasks.base import Demonstration, TaskItem
from tandem.data.tasks.prompt_rows import find_keys, read_prompt
from tandem.types import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetTask:
    """Instances of a dataset, already divided into splits. ``files``: the digest of each file that was read."""

    name: str
    fingerprint: str
    splits: dict[Split, tuple[TaskItem, ...]]
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_messages(self) -> bool:
        return bool(self.splits["train"][0].messages)

    @property
    def size(self) -> int | None:
        return len(self.splits["train"])

    def train_prompt(self, index: int) -> TaskItem:
        return self.splits["train"][index]

    def eval_prompts(self, split: Split, count: int, seed: int) -> list[TaskItem]:
        """Returns all of the split if it has fewer than ``count``."""
        items = list(self.splits[split])
        counter_random("evaluation", split, seed).shuffle(items)
        return items[:count]

    def demonstration(self, index: int, seed: int, corrupted_share: float) -> Demonstration:
        """Returns the file's own answer; each epoch is shuffled differently."""
        if corrupted_share:
            raise UserError(f"task 'dataset' cannot make wrong answers, and 'sft.corrupted_share' is {corrupted_share}; set it to 0")
        items = self.splits["train"]
        epoch, at = divmod(index, len(items))
        order = list(range(len(items)))
        counter_random("demonstration", seed, epoch).shuffle(order)
        item = items[order[at]]
        if item.ground_truth is None:
            raise UserError(f"{item.where}: there is no answer for supervised fine-tuning; set 'task.answer_key' to the key of the answer")
        if not isinstance(item.ground_truth, str | int | float):
            raise UserError(f"{item.where}: the answer is {kind_of(item.ground_truth)}; supervised fine-tuning needs a text: name its key in task.answer_key")
        return Demonstration(item, str(item.ground_truth), True)

    def close(self) -> None:
        pass


def dataset_task(config: TaskConfig, seed: int) -> DatasetTask:
    """Reads and checks ``config.path`` and, if given, the rows for evaluations. Raises ``UserError`` with file and line.

    Rows for evaluations serve both for those of a run and for its final accuracy. Without them, prompts are held out in the order of their hash, with
    equal prompts in the same split.
    """
    rows = read_rows(train_source(config))
    items = items_of(rows, config)
    evaluation = eval_source(config)
    if evaluation is not None:
        eval_rows = read_rows(evaluation)
        held_out = items_of(eval_rows, config)
        if bool(held_out[0].messages) != bool(items[0].messages):
            raise UserError(f"{held_out[0].where}: the prompts of '{evaluation.key}' and of 'task.path' are texts in one and messages in the other")
        shared = {item.text for item in items} & {item.text for item in held_out}
        if shared:
            logger.warning("%d prompts are in both %s and %s: accuracy on them is not held out", len(shared), rows.name, eval_rows.name)
        splits: dict[Split, tuple[TaskItem, ...]] = {"train": tuple(items), "held_out": tuple(held_out), "final": tuple(held_out)}
        return DatasetTask("dataset", f"dataset {rows.digest} {eval_rows.digest} {seed}", splits, _files(rows, eval_rows))
    splits = divided(items, config.share_held_out, str(config.path), "add prompts or give 'task.eval_path'")
    return DatasetTask("dataset", f"dataset {rows.digest} {config.share_held_out} {seed}", splits, _files(rows))


def items_of(rows: Rows, config: TaskConfig) -> list[TaskItem]:
    """Returns the instances of ``rows``. Raises ``UserError`` with file and line for the first row that is none."""
    checked = rows.checked()
    keys = find_keys(checked, config.prompt_key, config.answer_key)
    return [read_prompt(where, values, keys) for where, values in checked]


def train_source(config: TaskConfig) -> Source:
    """Returns where the training prompts are read from."""
    assert config.path is not None
    return Source(config.path, config.subset, config.split, config.revision)


def eval_source(config: TaskConfig) -> Source | None:
    """Returns where the prompts of evaluations are read from, ``None`` if a share of the training prompts is held out."""
    if config.eval_path:
        return Source(config.eval_path, config.subset, config.eval_split or config.split, config.revision, "task.eval_path")
    if config.eval_split:
        assert config.path is not None
        return Source(config.path, config.subset, config.eval_split, config.revision, "task.eval_path")
    return None


def _files(*sources: Rows) -> dict[str, str]:
    return {rows.name: rows.digest for rows in sources if rows.is_file}


def divided(items: list[TaskItem], held_out_share: float, name: str, fix: str) -> dict[Split, tuple[TaskItem, ...]]:
    """Returns the splits of ``items``, which ``name`` has: prompts are held out in the order of their hash. Raises ``UserError``, with ``fix``, for too few."""
    texts = sorted({item.text for item in items}, key=split_position)
    held_out = max(round(len(texts) * held_out_share), 1)
    if len(texts) < 3:
        raise UserError(f"'{name}' has {len(texts)} distinct prompts, too few to hold some out; {fix}")
    side: dict[str, Split] = dict.fromkeys(texts, "train")
    side.update(dict.fromkeys(texts[:held_out], "held_out"))
    side.update(dict.fromkeys(texts[held_out : 2 * held_out], "final"))
    splits: dict[Split, list[TaskItem]] = {"train": [], "held_out": [], "final": []}
    for item in items:
        splits[side[item.text]].append(item)
    return {split: tuple(items) for split, items in splits.items()}
