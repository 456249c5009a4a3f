"""TensorBoard: event files, written by the package ``tensorboard`` alone.

Scalars are tensors of float64, so that they have the bits of ``metrics.jsonl``. To go back, the events that stay are copied to a new file and the
others are removed with the old ones: not every reader of event files drops what a later session has replaced.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_STRING
from tensorboard.plugins.scalar.metadata import create_summary_metadata as scalar_metadata
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tandem.trackers.record_file import read_records
from tandem.trackers.tracker import RunFacts, SampleRow, Status, Value


class TensorBoard:
    """The event files in ``folder``, which are those of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._step = folder, 0
        self._writer: EventFileWriter | None = None

    def begin(self, facts: RunFacts, first_step: int) -> None:
        if self._writer is not None:
            self._writer.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        before = sorted(self._folder.glob("events.out.tfevents.*"))
        self._writer, self._step = EventFileWriter(str(self._folder), filename_suffix=f".{time.time_ns()}"), first_step
        copied = set[tuple[int, str]]()
        for event in (each for path in before for each in _events(path)):
            # An earlier copy that was ended before the old files were removed has left both.
            key = event.step, event.summary.value[0].tag if event.summary.value else ""
            if event.step < first_step and key[1] and key not in copied:
                copied.add(key)
                self._writer.add_event(event)
        self._text("config", [["config.yaml"], [yaml.safe_dump(dict(facts.config), sort_keys=False, allow_unicode=True)]], first_step)
        self.flush()
        for path in before:
            path.unlink()

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = [["prompt", "completion", "reward", "functions"]]
        for row in rows:
            parts = ", ".join(f"{name} {value:g}" for name, value in row.parts.items())
            table.append([row.prompt, row.completion, "" if row.reward is None else repr(row.reward), parts])
        self._text("samples", table, step)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        numbers = {name: float(value) for name, value in metrics.items() if name != "step" and isinstance(value, int | float)}
        scalar = scalar_metadata("", "")
        self._add(step, [Summary.Value(tag=name, metadata=scalar, tensor=TensorProto(dtype=DT_DOUBLE, double_val=[x])) for name, x in numbers.items()])

    def flush(self) -> None:
        assert self._writer is not None
        self._writer.flush()

    def artefact(self, path: Path) -> None:
        self._text(f"artefacts/{path.name}", [["path"], [str(path.resolve())]], self._step)

    def finish(self, status: Status) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _text(self, tag: str, table: Sequence[Sequence[str]], step: int) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(table)), TensorShapeProto.Dim(size=len(table[0]))])
        cells = [cell.encode() for row in table for cell in row]
        metadata: SummaryMetadata = text_metadata("", "")
        self._add(step, [Summary.Value(tag=tag, metadata=metadata, tensor=TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=cells))])

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        assert self._writer is not None
        self._step = max(self._step, step)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def _events(path: Path) -> Iterator[Event]:
    """Yields the whole events of a file."""
    for record in read_records(path):
        yield Event.FromString(record)
