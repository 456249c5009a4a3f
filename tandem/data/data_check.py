"""What ``tandem data check`` tells of a data file: its first rows as the model will see them, lengths in tokens, and what is wrong in which line."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandem.config.task import TaskConfig
from tandem.data.examples import BrokenExample, read_example
from tandem.data.prompt_format import ChatFormat, PromptFormat, chat_format_of, text_encode
from tandem.data.rows.messages import ASSISTANT, Message, is_messages
from tandem.data.rows.preference_rows import read_preference
from tandem.data.rows.row import Rows, keys_of
from tandem.data.tasks.prompt_rows import find_keys, read_prompt
from tandem.data.tokenizing.encode_examples import ExampleEncoder
from tandem.data.tools.load import tool_schemas
from tandem.text.long_text import exceeds
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

Form = Literal["prompts", "examples", "preferences", "text"]
FORMS: tuple[Form, ...] = ("prompts", "examples", "preferences", "text")


class Keys(NamedTuple):
    """The keys of examples and texts; those of prompts are in the task."""

    completion: str = "completion"
    text: str = "text"


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row as the model will see it. ``answer``: the ground truth of a prompt. ``tokens``: ``None`` without a tokenizer."""

    where: str
    text: str
    tokens: int | None = None
    answer: Any = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens. ``allowed``: tokens that a row may have (0: not known); ``too_long``: rows with more."""

    min: int
    median: int
    p99: int
    max: int
    allowed: int
    too_long: int


@dataclass(frozen=True)
class DataReport:
    """The result of a check. ``keys``: what is read from which key. ``duplicates``: rows whose prompt another row has before. ``problems``: place and reason
    of each row that cannot be used, in order."""

    name: str
    kind: str
    digest: str
    rows: int
    form: Form
    keys: str
    columns: tuple[str, ...]
    shown: tuple[ShownRow, ...]
    lengths: Lengths | None
    duplicates: int
    problems: tuple[tuple[str, str], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": [{"where": where, "problem": problem} for where, problem in self.problems]}


class ModelText(NamedTuple):
    """What reads the rows: the tokenizer of ``folder``, and the tokens that a row may have (0: not known)."""

    folder: Path
    tokenizer: Tokenizer
    allowed: int


def form_of(rows: Rows) -> Form:
    """Returns the form of the first row that can be read."""
    values: Mapping[str, Any] = next((row.values for row in rows.rows if row.values is not None), {})
    if "chosen" in values and "rejected" in values:
        return "preferences"
    if "completion" in values:
        return "examples"
    if "text" in values and "prompt" not in values:
        return "text"
    messages = values.get("messages")
    return "examples" if isinstance(messages, list) and is_messages(messages) and messages[-1].get("role") == ASSISTANT else "prompts"


def check_rows(rows: Rows, form: Form, task: TaskConfig, model: ModelText | None, shown: int, keys: Keys) -> DataReport:
    """Reads every row. ``task``: the keys and the format of prompts. ``shown``: the number of first rows in the report. Raises ``UserError`` where no row
    can be used as ``form``."""
    reader = _READERS[form](rows, task, model, keys)
    problems: list[tuple[str, str]] = []
    lengths: list[int] = []
    first: list[ShownRow] = []
    seen: set[str] = set()
    duplicates = too_long = 0
    columns: dict[str, None] = {}
    for row in rows.rows:
        if row.values is None:
            problems.append((row.where, row.problem))
            continue
        columns.update(dict.fromkeys(row.values))
        try:
            read = reader.read(row.where, row.values)
            tokens = None if model is None else _count(read.encoded, model.allowed)
        except (UserError, BrokenExample) as error:
            problems.append((row.where, str(error).removeprefix(f"{row.where}: ")))
            continue
        duplicates += read.asked in seen
        seen.add(read.asked)
        if tokens is not None and model is not None:
            lengths.append(tokens)
            if model.allowed and tokens > model.allowed:
                too_long += 1
                problems.append((row.where, f"it has {tokens:,} tokens, more than {model.allowed:,}; shorten it or raise the context"))
        if len(first) < shown:
            first.append(ShownRow(row.where, read.shown, tokens, read.answer))
    return DataReport(
        rows.name, rows.kind, rows.digest, len(rows.rows), form, reader.describe, tuple(columns), tuple(first),
        _lengths(lengths, model.allowed if model is not None else 0, too_long), duplicates, tuple(problems),
    )  # fmt: skip


class _Read(NamedTuple):
    """``encoded``: the texts whose tokens are counted, each with its encoder; the largest sum of a list counts. ``asked``: what makes a duplicate."""

    shown: str
    asked: str
    encoded: Sequence[Sequence[tuple[Callable[[str], Sequence[int]], str]]]
    answer: Any = None


class _Reader(NamedTuple):
    describe: str
    read: Callable[[str, Mapping[str, Any]], _Read]


def _count(encoded: Sequence[Sequence[tuple[Callable[[str], Sequence[int]], str]]], allowed: int) -> int:
    total = 0
    for side in encoded:
        for encode, text in side:
            if allowed and exceeds(encode, text, allowed):
                raise UserError(f"it has {len(text):,} characters, far more than {allowed:,} tokens; shorten it or raise the context")
        total = max(total, sum(len(encode(text)) for encode, text in side))
    return total


def _prompts(rows: Rows, task: TaskConfig, model: ModelText | None, keys: Keys) -> _Reader:
    placed = [(row.where, row.values) for row in rows.rows if row.values is not None]
    if not placed:
        return _Reader("no row can be read", lambda where, values: _Read("", "", ()))
    prompt_keys = find_keys(placed, task.prompt_key, task.answer_key)
    chat_format = _plain_chat() if model is None else chat_format_of(model.folder, model.tokenizer, tool_schemas(task.tools))
    style = PromptFormat(task, text_encode(model.tokenizer) if model is not None else lambda text: [], chat_format, prompt_keys.has_messages)

    def read(where: str, values: Mapping[str, Any]) -> _Read:
        item = read_prompt(where, values, prompt_keys)
        text = style.render(item)
        return _Read(text, item.text, [[(style.encode, text)]], item.ground_truth)

    return _Reader(prompt_keys.describe(), read)


def _examples(rows: Rows, task: TaskConfig, model: ModelText | None, keys: Keys) -> _Reader:
    prompt_key = task.prompt_key if task.prompt_key != "auto" else "prompt"
    end = None if model is None or not model.tokenizer.eos_token_ids else model.tokenizer.eos_token_ids[0]
    encoder = None if model is None else ExampleEncoder(model.folder, model.tokenizer.backend, end)

    def read(where: str, values: Mapping[str, Any]) -> _Read:
        example = read_example(values, prompt_key, keys.completion)
        if encoder is None:
            return _Read(_talk(example.messages) if example.messages else f"{example.prompt}{example.completion}", example.asked, ())
        rendered = encoder.render(example)
        return _Read(f"{rendered.prompt or ''}{rendered.text}", example.asked, [[(lambda text: encoder.encode([rendered])[0][0], rendered.text)]])

    return _Reader(f"examples: 'messages', or '{prompt_key}' with '{keys.completion}'", read)


def _preferences(rows: Rows, task: TaskConfig, model: ModelText | None, keys: Keys) -> _Reader:
    chat_format = _plain_chat() if model is None else chat_format_of(model.folder, model.tokenizer)

    def read(where: str, values: Mapping[str, Any]) -> _Read:
        pair = read_preference(where, values)
        encode = chat_format.encode if model is None or not isinstance(pair.prompt, str) else text_encode(model.tokenizer)
        prompt = pair.prompt if isinstance(pair.prompt, str) else chat_format.render(pair.prompt, pair.tools)
        chosen, rejected = (answer if isinstance(answer, str) else _answer(answer) for answer in (pair.chosen, pair.rejected))
        shown = f"{prompt}\n[chosen] {chosen}\n[rejected] {rejected}"
        return _Read(shown, prompt, [[(encode, f"{prompt}{answer}")] for answer in (chosen, rejected)])

    implicit = "" if any(row.values is not None and row.values.get("prompt") is not None for row in rows.rows) else " (implicit: what both begin with)"
    return _Reader(f"preference pairs: 'chosen' and 'rejected' after 'prompt'{implicit}", read)


def _texts(rows: Rows, task: TaskConfig, model: ModelText | None, keys: Keys) -> _Reader:
    def read(where: str, values: Mapping[str, Any]) -> _Read:
        text = values.get(keys.text)
        if not isinstance(text, str):
            raise UserError(f"there is no text under the key '{keys.text}' (it has {keys_of(values)})")
        return _Read(text, text, [[(model.tokenizer.encode, text)]] if model is not None else ())

    return _Reader(f"documents under '{keys.text}'", read)


_READERS: Mapping[Form, Callable[[Rows, TaskConfig, ModelText | None, Keys], _Reader]] = {
    "prompts": _prompts, "examples": _examples, "preferences": _preferences, "text": _texts,
}  # fmt: skip


def _plain_chat() -> ChatFormat:
    """Without a tokenizer there is no template: messages are shown one below the other."""
    return ChatFormat(lambda messages, tools: _talk(messages), lambda text: [], lambda messages, tools: ([], []))


def _talk(messages: Sequence[Message]) -> str:
    return "\n".join(f"[{message['role']}] {message.get('content') or json.dumps(message.get('tool_calls'), ensure_ascii=False)}" for message in messages)


def _answer(messages: Sequence[Message]) -> str:
    return str(messages[0].get("content", "")) if len(messages) == 1 else _talk(messages)


def _lengths(lengths: list[int], allowed: int, too_long: int) -> Lengths | None:
    if not lengths:
        return None
    ordered = sorted(lengths)
    # Nearest rank: the smallest length that at least the share of all rows do not exceed.
    at = lambda share: ordered[max(-(-int(share * 1000) * len(ordered) // 1000) - 1, 0)]
    return Lengths(ordered[0], at(0.5), at(0.99), ordered[-1], allowed, too_long)


def lines_of(report: DataReport, most_problems: int = 20) -> Iterator[str]:
    """Yields the report for a person."""
    yield f"{report.name}: {report.rows:,} rows, {report.kind}, digest {report.digest}"
    yield report.keys
    yield f"columns: {', '.join(report.columns) or 'none'}"
    for row in report.shown:
        tokens = "" if row.tokens is None else f", {row.tokens:,} tokens"
        answer = "" if row.answer is None else f", answer {row.answer!r}"
        yield ""
        yield f"{row.where}{tokens}{answer}"
        yield from (f"  | {line}" for line in row.text.split("\n"))
    yield ""
    if report.lengths is not None:
        lengths = report.lengths
        limit = f"; {lengths.too_long:,} of {report.rows:,} rows have more than {lengths.allowed:,}" if lengths.allowed else ""
        yield f"tokens: min {lengths.min:,}, median {lengths.median:,}, p99 {lengths.p99:,}, max {lengths.max:,}{limit}"
    else:
        yield "tokens: not counted; name the model's folder with --model"
    if report.duplicates:
        yield f"duplicates: {report.duplicates:,} rows have the prompt of an earlier row"
    for where, problem in report.problems[:most_problems]:
        yield f"{where}: {problem}"
    if len(report.problems) > most_problems:
        yield f"... and {len(report.problems) - most_problems:,} more"
    yield f"{len(report.problems):,} problems" if report.problems else "no problems"
