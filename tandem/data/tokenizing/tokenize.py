"""Distributed tokenizing: files of text to shards of token ids, by many processes, with resume.

The shards depend on the source, the tokenizer and the settings only, not on the number of processes or on how often one of them was
killed. Each unit of work becomes one shard; its record under ``units/`` commits it, and ``dataset.json``, which
is written last, commits the whole.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tandem.data.shards import LENGTH_BYTES, Shard, token_dtype
from tandem.data.tokenizing.documents import LINES, Part, check_whole, divide
from tandem.data.tokenizing.tokenize_plan import PLAN, TokenizeSettings, check_plan, make_plan, tokenizer_fingerprint
from tandem.data.tokenizing.tokenize_worker import Unit, UnitProgress
from tandem.data.webdataset import TARS
from tandem.runtime.process.processes import Threads, available_cores
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import WorkerDied, message_from, message_meta
from tandem.storage.files import Storage, open_storage, read
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, UserError

DATASET = "dataset.json"
UNIT_DEADLINE_S = 24 * 3600.0
MOST_DEATHS = 3

Progress = Callable[[int, int, int], None]
"""Called with (bytes of the source done, total bytes, tokens so far)."""


@dataclass(frozen=True, slots=True)
class TokenizedDataset:
    """The content of ``dataset.json``. ``tokenizer``: the fingerprint of the tokenizer used; ``end_token``: appended to every document
    (``None``: nothing), for examples to every completion; ``dtype``: of the ids. ``pairs``: documents 2i and 2i + 1 of a shard are the chosen
    and the rejected example of a preference pair."""

    tokenizer: str
    vocab_size: int
    end_token: int | None
    dtype: str
    shards: tuple[Shard, ...]
    pairs: bool = False

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def skipped(self) -> int:
        return sum(shard.skipped for shard in self.shards)

    @property
    def has_masks(self) -> bool:
        """Whether every token has a mask that says whether it is learned."""
        return bool(self.shards) and all(shard.has_masks for shard in self.shards)

    @property
    def learned(self) -> int:
        """The number of learned tokens; 0 without masks."""
        return sum(shard.learned or 0 for shard in self.shards)

    def to_json(self) -> bytes:
        facts: dict[str, Any] = {"format": 1, "documents": self.documents, "tokens": self.tokens, "skipped": self.skipped}
        if self.has_masks:
            facts["learned"] = self.learned
        if self.pairs:
            facts["pairs"] = True
        facts |= {"tokenizer": self.tokenizer, "vocab_size": self.vocab_size, "end_token": self.end_token, "dtype": self.dtype}
        facts["shards"] = [shard.to_json() for shard in self.shards]
        return json.dumps({**facts, "digest": _digest(facts)}, indent=1).encode() + b"\n"


def _digest(facts: Mapping[str, Any]) -> str:
    """Returns the BLAKE2b-128 of a dataset's facts, in hexadecimal."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_dataset(storage: Storage) -> TokenizedDataset:
    """Returns the dataset in ``storage``. Raises ``UserError`` if there is no finished one."""
    try:
        data = json.loads(read(storage, DATASET))
        digest = data.pop("digest", None)
        if digest != _digest(data):
            raise ValueError("it does not have the digest it was written with" if digest is not None else "it has no digest")
        shards = tuple(Shard.from_json(shard) for shard in data["shards"])
        return TokenizedDataset(data["tokenizer"], data["vocab_size"], data["end_token"], data["dtype"], shards, data.get("pairs", False))
    except FileNotFoundError:
        raise UserError(f"'{storage.url}' has no {DATASET}; make it with 'tandem tokenize', or let that command finish") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{DATASET} in '{storage.url}' is damaged ({error}); remove it and start 'tandem tokenize' again") from None


def tokenize(settings: TokenizeSettings, on_progress: Progress | None = None) -> TokenizedDataset:
    """Tokenizes the units that are not done yet and returns the whole dataset. Raises ``UserError`` for wrong settings before any work, and
    for a broken document."""
    settings.check()
    tokenizer = Tokenizer.from_folder(settings.tokenizer)
    if settings.append_end and not tokenizer.eos_token_ids:
        raise UserError(f"the tokenizer in '{settings.tokenizer}' has no end-of-sequence token; set eos_token or do not append one")
    source = open_storage(settings.source)
    files = source.files()
    check_whole(source, files, settings.form)
    units = divide(files, settings.form, settings.unit_bytes)
    if not units:
        kinds = ", ".join((*LINES, *TARS, *settings.form.suffixes))
        raise UserError(f"'{settings.source}' contains no document (a file that is not empty and ends in {kinds}); name the right folder or suffix")
    destination = open_storage(settings.destination, create=True)
    plan = make_plan(settings, units)
    sizes = {file.name: file.size for file in destination.files()}
    names = set(sizes)
    check_plan(destination, plan, names)
    end = tokenizer.eos_token_ids[0] if settings.append_end else None
    fingerprint, dtype = tokenizer_fingerprint(settings.tokenizer), token_dtype(tokenizer.vocab_size)
    with destination.scratch() as scratch:
        if PLAN not in names:
            _put(destination, PLAN, plan, scratch)
        done = {number for number in range(len(units)) if _record(number) in names and _is_whole(destination, number, sizes)}
        _Crew(settings, units, dtype, end, scratch).work(sorted(set(range(len(units))) - done), done, on_progress)
        shards = tuple(Shard.from_json(json.loads(read(destination, _record(number)))) for number in range(len(units)))
        dataset = TokenizedDataset(fingerprint, tokenizer.vocab_size, end, dtype, shards, settings.form.pairs)
        if DATASET not in names:
            _put(destination, DATASET, dataset.to_json(), scratch)
    return dataset


class _Crew:
    """Worker processes that tokenize one unit after another; a dead worker is replaced and its unit is repeated."""

    def __init__(self, settings: TokenizeSettings, units: Sequence[tuple[Part, ...]], dtype: str, end: int | None, scratch: Path) -> None:
        self.settings, self.units, self.scratch = settings, units, scratch
        self.dtype, self.end = dtype, end
        self.lock = threading.Lock()
        self.ending = False
        self.bytes: dict[int, int] = {}
        self.tokens: dict[int, int] = {}

    def work(self, waiting: Sequence[int], done: set[int], on_progress: Progress | None) -> None:
        total = sum(map(self._size, range(len(self.units))))
        self.bytes = {number: self._size(number) for number in done}
        if not waiting:
            return
        count = min(self.settings.workers or available_cores(), len(waiting))
        workers = [self._start(i) for i in range(count)]
        idle: SimpleQueue[int] = SimpleQueue()
        for i in range(count):
            idle.put(i)

        def one(number: int) -> None:
            slot = idle.get()
            try:
                self._unit(number, workers, slot, lambda: on_progress and on_progress(sum(self.bytes.values()), total, sum(self.tokens.values())))
            finally:
                idle.put(slot)

        with ThreadPoolExecutor(count, thread_name_prefix="tokenize") as pool:
            futures = [pool.submit(one, number) for number in waiting]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self.ending = True
                for future in futures:
                    future.cancel()
                for worker in workers:
                    worker.stop(grace_s=0.0)
                raise
        for worker in workers:
            worker.stop()

    def _unit(self, number: int, workers: list[Worker], slot: int, report: Callable[[], Any]) -> None:
        def progress(meta: dict[str, Any]) -> None:
            done = message_from(UnitProgress, meta)
            with self.lock:
                # The last line of a part may end after the part.
                self.bytes[number] = min(done.bytes, self._size(number))
                self.tokens[number] = done.tokens
                report()

        unit = Unit([list(part) for part in self.units[number]], shard_name(number), _record(number), str(self.scratch.absolute()))
        for _ in range(MOST_DEATHS):
            try:
                workers[slot].call("unit", message_meta(unit), deadline_s=UNIT_DEADLINE_S, on_progress=progress)
                progress(message_meta(UnitProgress(self._size(number), self.tokens.get(number, 0))))
                return
            except WorkerDied as death:
                died = death
                if self.ending:
                    raise
                workers[slot] = self._start(slot)
        raise RunError(f"{died}, {MOST_DEATHS} times in a row on {self.units[number][0].name}; is there enough memory? finished units are kept")

    def _start(self, slot: int) -> Worker:
        settings = self.settings
        options = json.dumps(
            {
                "source": settings.source, "destination": settings.destination, "tokenizer": settings.tokenizer, "dtype": self.dtype,
                "form": asdict(settings.form), "end": self.end, "side": settings.side, "held_out_share": settings.held_out_share,
            }
        )
        # Ctrl-C in a terminal is handled by the command, which ends its workers; they may still be starting.
        return Worker(f"tokenizer {slot}", "tandem.data.tokenizing.tokenize_worker", ["--options", options], threads=Threads(1), new_session=True)

    def _size(self, number: int) -> int:
        return sum(part.stop - part.start for part in self.units[number])


def shard_name(number: int) -> str:
    return f"shard-{number:06d}"


def _is_whole(destination: Storage, number: int, sizes: Mapping[str, int]) -> bool:
    """Returns whether the files in the record of a unit exist with the recorded sizes; a lost shard is made again."""
    try:
        shard = Shard.from_json(json.loads(read(destination, _record(number))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
    return sizes.get(f"{shard.name}.tar") == shard.size and sizes.get(f"{shard.name}.lengths") == shard.documents * LENGTH_BYTES


def _record(number: int) -> str:
    return f"units/{number:06d}.json"


def _put(destination: Storage, name: str, content: bytes, scratch: Path) -> None:
    path = scratch / "put.tmp"
    path.write_bytes(content)
    destination.put(name, path)
