"""A process that tokenizes one unit after another: ``python -m tandem.data.tokenize_worker --options JSON --channel FD``.

Imports no torch. The tokenizer's own batch call does the work, on one thread: the processes are the parallelism.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tandem.data.documents import DocumentFormat, Part, documents
from tandem.data.shards import ShardWriter
from tandem.data.split import Side, is_of_side
from tandem.runtime.calls import Blobs, Meta, Progress, Reply
from tandem.runtime.worker_pipe import serve
from tandem.storage.files import open_storage
from tandem.text.tokenizer import Tokenizer

BATCH_BYTES = 2**20


class TokenizeWorker:
    """``options``: source, destination, tokenizer, dtype, form, end, side, held_out_share (see ``tandem.data.tokenize``)."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.source, self.destination = open_storage(options["source"]), open_storage(options["destination"], create=True)
        self.backend = Tokenizer.from_folder(options["tokenizer"]).backend
        self.form = DocumentFormat(**{**options["form"], "suffixes": tuple(options["form"]["suffixes"])})
        self.dtype, self.end = str(options["dtype"]), options["end"]
        self.side: Side = options["side"]
        self.held_out_share = float(options["held_out_share"])

    def unit(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Write the shard of ``parts`` and then the record that commits it."""
        done = tokens = 0
        end = [] if self.end is None else [int(self.end)]
        with TemporaryDirectory(dir=meta["scratch"]) as scratch:
            writer = ShardWriter(Path(scratch), meta["shard"], self.dtype)
            for texts, size in self._batches([Part(*part) for part in meta["parts"]], writer):
                for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False):
                    ids = encoding.ids
                    writer.add(ids + end)
                    tokens += len(ids)
                done += size
                progress({"bytes": done, "tokens": tokens})
            shard = writer.close()
            record = Path(scratch) / "record.json"
            record.write_text(json.dumps(shard.to_json()) + "\n", encoding="utf-8")
            for name in (f"{shard.name}.tar", f"{shard.name}.lengths"):
                self.destination.put(name, Path(scratch) / name)
            self.destination.put(meta["record"], record)
        return {}, {}

    def _batches(self, parts: list[Part], writer: ShardWriter) -> Iterator[tuple[list[str], int]]:
        """Texts of about ``BATCH_BYTES`` together, with the bytes of their source. Broken ones are counted."""
        texts: list[str] = []
        size = 0
        for part in parts:
            for document in documents(self.source, part, self.form):
                size += document.size
                if document.text is None:
                    writer.skipped += 1
                elif is_of_side(document.text, self.side, self.held_out_share):
                    texts.append(document.text)
                if size >= BATCH_BYTES:
                    yield texts, size
                    texts, size = [], 0
        yield texts, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--options", required=True)
    parser.add_argument("--channel", type=int, required=True)
    options = parser.parse_args()
    serve({"unit": TokenizeWorker(json.loads(options.options)).unit}, options.channel)


if __name__ == "__main__":
    main()
