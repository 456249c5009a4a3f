"""A process that tokenizes one unit after another: ``python -m tandem.data.tokenizing.tokenize_worker --options JSON --channel FD``.

Imports no torch. The tokenizer's own batch call does the work, on one thread: the processes are the parallelism.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers

from tandem.data.examples import BrokenExample
from tandem.data.shards import ShardWriter
from tandem.data.split import Side, is_of_side
from tandem.data.tokenizing.documents import Document, DocumentFormat, Part, documents, refused
from tandem.data.tokenizing.encode_examples import ExampleEncoder, Rendered
from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, message_from, message_meta
from tandem.storage.files import open_storage
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, UserError

BATCH_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Unit:
    """The call ``unit``: the ``parts`` of files that become the shard named ``shard``, the name of the ``record`` that commits it, and a
    local folder for files in progress."""

    parts: list[Any]
    shard: str
    record: str
    scratch: str


@dataclass(frozen=True, slots=True)
class UnitProgress:
    """Progress of one unit: bytes of the source processed, and tokens written."""

    bytes: int
    tokens: int


class TokenizeWorker:
    """``options``: source, destination, tokenizer, dtype, form, end, side, held_out_share (see ``tandem.data.tokenizing.tokenize``)."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.source, self.destination = open_storage(options["source"]), open_storage(options["destination"], create=True)
        self.tokenizer = Tokenizer.from_folder(options["tokenizer"])
        self.form = DocumentFormat(**{**options["form"], "suffixes": tuple(options["form"]["suffixes"])})
        self.dtype = str(options["dtype"])
        self.end = [] if options["end"] is None else [int(options["end"])]
        self.encoder = ExampleEncoder(options["tokenizer"], self.tokenizer.backend, options["end"])
        self.side: Side = options["side"]
        self.held_out_share = float(options["held_out_share"])

    def unit(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Writes the shard of ``parts`` and then the record that commits it. Raises ``RunError`` if a disk fails."""
        try:
            return self._unit(message_from(Unit, meta), progress)
        except OSError as error:
            where = error.filename or self.destination.url
            raise RunError(f"'{where}': {error.strerror or error}; correct that or make room, then run the command again; finished units are kept") from None

    def _unit(self, unit: Unit, progress: Progress) -> Reply:
        done = tokens = 0
        add = self._add_examples if self.form.has_masks else self._add_texts
        with TemporaryDirectory(dir=unit.scratch) as scratch:
            writer = ShardWriter(Path(scratch), unit.shard, self.dtype, self.form.has_masks, bool(self.form.margin_key))
            for batch, size in self._batches([Part(*part) for part in unit.parts], writer):
                tokens += add(batch, writer)
                done += size
                progress(message_meta(UnitProgress(done, tokens)))
            shard = writer.close()
            record = Path(scratch) / "record.json"
            record.write_text(json.dumps(shard.to_json()) + "\n", encoding="utf-8")
            for name in (f"{shard.name}.tar", f"{shard.name}.lengths"):
                self.destination.put(name, Path(scratch) / name)
            self.destination.put(unit.record, record)
        return {}, {}

    def _batches(self, parts: list[Part], writer: ShardWriter) -> Iterator[tuple[list[Document], int]]:
        """Returns batches of documents of about ``BATCH_BYTES``, with the bytes of their source. Counts broken ones."""
        batch: list[Document] = []
        size = 0
        for part in parts:
            for document in documents(self.source, part, self.form):
                size += document.size
                if document.text is None:
                    writer.skipped += 1
                else:
                    batch += [document] * is_of_side(_judged(document), self.side, self.held_out_share)
                if size >= BATCH_BYTES:
                    yield batch, size
                    batch, size = [], 0
        yield batch, size

    def _add_texts(self, batch: list[Document], writer: ShardWriter) -> int:
        """Adds each text and its end token; returns the number of tokens."""
        tokens = 0
        try:
            encodings = self._encode(batch)
        except Exception:  # The library raises the bare class without naming the text.
            encodings = self._encode([document for document in batch if self._can_encode(document.place, [document.text or ""], writer)])
        for encoding in encodings:
            ids = encoding.ids
            writer.add(ids + self.end)
            tokens += len(ids)
        return tokens

    def _encode(self, batch: list[Document]) -> list[tokenizers.Encoding]:
        return self.tokenizer.backend.encode_batch_fast([document.text or "" for document in batch], add_special_tokens=False)

    def _add_examples(self, batch: list[Document], writer: ShardWriter) -> int:
        """Adds each example and its mask, of a pair the chosen one and then the rejected one; returns the number of tokens."""
        rendered: list[tuple[str, list[Rendered]]] = []
        margins = {document.place: document.examples[0].margin for document in batch}
        tokens = 0
        for document in batch:
            try:
                rendered.append((document.place, [self.encoder.render(example) for example in document.examples]))
            except BrokenExample as error:
                self._broken(document.place, str(error), writer)
            except UserError as error:
                raise UserError(f"{document.place}: {error}") from None
        try:
            encoded = self.encoder.encode([one for _, each in rendered for one in each])
        except Exception:  # As above.
            rendered = [(place, each) for place, each in rendered if self._can_encode(place, [t for one in each for t in (one.prompt or "", one.text)], writer)]
            encoded = self.encoder.encode([one for _, each in rendered for one in each])
        following = iter(encoded)
        for place, each in rendered:
            examples = [next(following) for _ in each]
            if not all(any(learned) for _, learned in examples):
                self._broken(place, "none of its tokens is to be learned", writer)
            elif len(examples) > 1 and examples[0] == examples[1]:
                self._broken(place, "'chosen' and 'rejected' have the same tokens, so there is no preference", writer)
            else:
                for ids, learned in examples:
                    writer.add(ids, learned, margins[place])
                    tokens += len(ids)
        return tokens

    def _can_encode(self, place: str, texts: list[str], writer: ShardWriter) -> bool:
        """Returns whether the tokenizer can encode every character; a document that it cannot encode is broken."""
        try:
            for text in texts:
                self.tokenizer.encode(text)
        except UserError as error:
            self._broken(place, str(error), writer)
            return False
        return True

    def _broken(self, place: str, problem: str, writer: ShardWriter) -> None:
        if not self.form.skip_broken:
            raise refused(place, problem)
        writer.skipped += 1


def _judged(document: Document) -> str:
    """Returns the text that decides whether a document is held out."""
    return document.examples[0].asked if document.examples else document.text or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--options", required=True)
    parser.add_argument("--channel", type=int, required=True)
    options = parser.parse_args()
    # The command reports user errors, once; this process logs only the tracebacks of defects.
    assert logging.lastResort is not None
    logging.lastResort.addFilter(lambda record: record.exc_info is not None)
    serve({"unit": TokenizeWorker(json.loads(options.options)).unit}, options.channel)


if __name__ == "__main__":
    main()
