"""A task from a JSONL file: one JSON object per line. The whole file is checked before work begins."""

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from tandem.config.task import TaskConfig
from tandem.data.counter import counter_random
from tandem.data.split import Split, split_position
from tandem.data.tasks.base import Demonstration, TaskItem
from tandem.runtime.machine.available_memory import total_bytes
from tandem.text.surrogates import has_lone_surrogate
from tandem.types import UserError
from tandem.types.input_file import read_input

BYTES_PER_BYTE = 4
"""Memory for each byte of a file, at least: its content, its lines, its texts and its items."""
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JsonlTask:
    """Instances of a file, already divided into splits."""

    name: str
    fingerprint: str
    splits: dict[Split, tuple[TaskItem, ...]]

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
            raise UserError(f"task 'jsonl' cannot make wrong answers, and 'sft.corrupted_share' is {corrupted_share}; set it to 0")
        items = self.splits["train"]
        epoch, at = divmod(index, len(items))
        order = list(range(len(items)))
        counter_random("demonstration", seed, epoch).shuffle(order)
        item = items[order[at]]
        if item.ground_truth is None:
            raise UserError(f"{item.where}: there is no answer for supervised fine-tuning; set 'task.answer_key' to the key of the answer")
        return Demonstration(item, str(item.ground_truth), True)

    def close(self) -> None:
        pass


def jsonl_task(config: TaskConfig, seed: int) -> JsonlTask:
    """Reads and checks ``config.path`` and, if given, ``config.eval_path``. Raises ``UserError`` with file and line.

    With an evaluation file its rows serve both for evaluations and for the final accuracy. Without one, prompts are held out in the order
    of their hash, with equal prompts in the same split.
    """
    assert config.path is not None
    items, digest = read_jsonl(config.path, config.prompt_key, config.answer_key)
    if config.eval_path:
        held_out, eval_digest = read_jsonl(config.eval_path, config.prompt_key, config.answer_key)
        shared = {item.text for item in items} & {item.text for item in held_out}
        if shared:
            logger.warning(
                "%d prompts are in both %s and %s: accuracy on them is not held out", len(shared), config.path, config.eval_path
            )
        splits: dict[Split, tuple[TaskItem, ...]] = {"train": tuple(items), "held_out": tuple(held_out), "final": tuple(held_out)}
        return JsonlTask("jsonl", f"jsonl {digest} {eval_digest} {seed}", splits)
    return JsonlTask("jsonl", f"jsonl {digest} {config.share_held_out} {seed}", _divide(items, config))


def read_jsonl(path: str, prompt_key: str, answer_key: str) -> tuple[list[TaskItem], str]:
    """Returns every line of ``path`` as an item, and a digest of the file. Raises ``UserError`` with file and line."""
    try:
        content = read_input(path, total_bytes() // BYTES_PER_BYTE, "split it, or use a machine with more memory: all of it is held")
    except FileNotFoundError:
        raise UserError(f"'{path}' does not exist; name the JSONL file in 'task.path' or 'task.eval_path'") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None
    # Only a line feed ends a line: JSON may contain U+2028 and similar characters, at which str.splitlines would split.
    lines = content.split(b"\n")
    if lines[-1].strip() == b"":
        lines.pop()
    if not lines:
        raise UserError(f"'{path}' is empty; it needs at least one JSON object")
    items = [_read_line(line, f"{path}:{number}", prompt_key, answer_key) for number, line in enumerate(lines, 1)]
    return items, hashlib.blake2b(content, digest_size=16).hexdigest()


def _read_line(line: bytes, where: str, prompt_key: str, answer_key: str) -> TaskItem:
    try:
        text = line.decode("utf-8-sig" if where.endswith(":1") else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from None
    if not text:
        raise UserError(f"{where}: the line is empty; remove it")
    try:
        row = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a line is a JSON object, this is {_kind(row)}")
    if has_lone_surrogate(text, row):
        raise UserError(f"{where}: a text contains half of a surrogate pair, which is not a character; correct the text")
    for key in filter(None, (prompt_key, answer_key)):
        if key not in row:
            raise UserError(f"{where}: key '{key}' is missing; the line has {', '.join(map(repr, row)) or 'no keys'}")
    prompt = row[prompt_key]
    if not isinstance(prompt, str):
        raise UserError(f"{where}: '{prompt_key}' is {_kind(prompt)}; it must be a text")
    if not prompt.strip():
        raise UserError(f"{where}: '{prompt_key}' is an empty text; give the prompt or remove the line")
    answer = row[answer_key] if answer_key else None
    if answer_key and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        raise UserError(f"{where}: '{answer_key}' is {_kind(answer)}; it must be a text or a number")
    for reserved in RESERVED_COLUMNS:
        if reserved in row and reserved != prompt_key:
            raise UserError(f"{where}: key '{reserved}' is reserved for the arguments of reward functions; rename it")
    return TaskItem(prompt, where, answer, {key: value for key, value in row.items() if key != prompt_key})


def _divide(items: list[TaskItem], config: TaskConfig) -> dict[Split, tuple[TaskItem, ...]]:
    texts = sorted({item.text for item in items}, key=split_position)
    held_out = max(round(len(texts) * config.share_held_out), 1)
    if len(texts) < 3:
        raise UserError(
            f"'{config.path}' has {len(texts)} distinct prompts, too few to hold some out; add prompts or give 'task.eval_path'"
        )
    side: dict[str, Split] = dict.fromkeys(texts, "train")
    side.update(dict.fromkeys(texts[:held_out], "held_out"))
    side.update(dict.fromkeys(texts[held_out : 2 * held_out], "final"))
    splits: dict[Split, list[TaskItem]] = {"train": [], "held_out": [], "final": []}
    for item in items:
        splits[side[item.text]].append(item)
    return {split: tuple(items) for split, items in splits.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"key '{key}' is given twice")
        row[key] = value
    return row


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is more than a number can be")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "true or false", str: "a text", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names[type(value)]
