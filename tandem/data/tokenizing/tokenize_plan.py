"""The settings of ``tandem tokenize``, and the plan that is written before the first shard, so that a destination is only resumed with the
same source, tokenizer and settings."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tandem.data.split import Side
from tandem.data.tokenizing.documents import DocumentFormat, Part
from tandem.storage.files import Storage, read
from tandem.text.chat import template_source
from tandem.types import UserError

PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class TokenizeSettings:
    """``source`` and ``destination``: folders or URLs. ``tokenizer``: a Hugging Face folder. ``unit_bytes``: of the source per shard.
    ``append_end``: appends the tokenizer's end-of-sequence token to every document. ``side``: all documents, or those of one side if
    ``held_out_share`` of them, by a hash of their text, are held out. ``workers``: number of processes; 0: one per core."""

    source: str
    destination: str
    tokenizer: str
    form: DocumentFormat = field(default_factory=DocumentFormat)
    unit_bytes: int = 64 * 2**20
    append_end: bool = True
    side: Side = "all"
    held_out_share: float = 0.01
    workers: int = 0

    def check(self) -> None:
        self.form.check()
        if self.unit_bytes < 1:
            raise UserError(f"the size of a shard's source is {self.unit_bytes} bytes; it must be at least 1")
        if not 0 < self.held_out_share < 1:
            raise UserError(f"the share of documents held out is {self.held_out_share}; it must be above 0 and below 1")
        if self.workers < 0:
            raise UserError(f"the number of workers is {self.workers}; it must be 0 (one for each core) or more")
        if self.source.rstrip("/") == self.destination.rstrip("/"):
            raise UserError(f"source and destination are both '{self.source}'; name another folder for the shards")


def tokenizer_fingerprint(folder: str | Path) -> str:
    """Returns the BLAKE2b-128 of a tokenizer's ``tokenizer.json``, in hexadecimal; token ids depend on nothing else."""
    return hashlib.blake2b((Path(folder) / "tokenizer.json").read_bytes(), digest_size=16).hexdigest()


def template_fingerprint(folder: str | Path) -> str:
    """Returns the BLAKE2b-128 of a tokenizer's chat templates, in hexadecimal; empty if it has none."""
    try:
        source, for_tools = template_source(Path(folder)), template_source(Path(folder), with_tools=True)
    except UserError:
        return ""
    source += for_tools if for_tools != source else ""
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()


def make_plan(settings: TokenizeSettings, units: Sequence[tuple[Part, ...]]) -> bytes:
    """Returns everything that the shards depend on, as JSON; two runs with the same plan write the same bytes."""
    sources = hashlib.blake2b(json.dumps(units).encode(), digest_size=16).hexdigest()
    form = asdict(settings.form)
    # A key that is not read does not matter.
    unread: tuple[str, ...] = ("examples", "prompt_key", "completion_key", "pairs", "margin_key")
    if settings.form.examples:
        unread = ("pairs", "margin_key")
    elif settings.form.pairs:
        unread = ("examples", "prompt_key", "completion_key", "text_key", *(() if settings.form.margin_key else ("margin_key",)))
    form = {name: value for name, value in form.items() if name not in unread}
    if settings.form.has_masks:
        form["chat_template"] = template_fingerprint(settings.tokenizer)
    facts = {
        "tokenizer": tokenizer_fingerprint(settings.tokenizer), **form, "unit_bytes": settings.unit_bytes,
        "append_end": settings.append_end, "side": settings.side,
        "held_out_share": settings.held_out_share if settings.side != "all" else 0, "units": len(units), "sources": sources,
    }
    return json.dumps(facts, indent=1).encode() + b"\n"


def check_plan(destination: Storage, plan: bytes, names: set[str]) -> None:
    if PLAN not in names:
        if names:
            raise UserError(f"'{destination.url}' contains other files ({min(names)}); name an empty folder for the shards")
        return
    try:
        begun, now = json.loads(read(destination, PLAN)), json.loads(plan)
    except (ValueError, RecursionError):
        begun = None
    if not isinstance(begun, dict):
        raise UserError(f"{PLAN} in '{destination.url}' is damaged; remove the folder and start 'tandem tokenize' again, or name another one")
    different = [name for name in {**now, **begun} if begun.get(name) != now.get(name)]
    if different:
        raise UserError(
            f"'{destination.url}' was started with another {', '.join(different)}; resume with the same source, tokenizer and settings, "
            "or name another folder"
        )
