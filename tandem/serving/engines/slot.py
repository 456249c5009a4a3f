"""A place for one engine in the pool: the engine, its last stats and the requests that it computes."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.engine.metrics.stats import EngineStats
from tandem.serving.engines.instance import Instance
from tandem.serving.engines.stream import Stream
from tandem.types import WeightSource, WeightVersion


@dataclass(eq=False)
class Slot:
    """A place for one engine and its requests. ``instance``: ``None`` while none is loaded. ``hung``: why its engine takes no requests, ``None`` if
    it answers. ``outstanding``: tokens that its requests may still ask for. ``failures``: unsuccessful starts since its last step."""

    index: int
    instance: Instance | None = None
    stats: EngineStats | None = None
    streams: dict[str, Stream] = field(default_factory=dict)
    outstanding: int = 0
    failures: int = 0
    hung: str | None = None
    is_held: bool = False
    """It gets no new request, and finishes what it has."""

    @property
    def is_ready(self) -> bool:
        return self.instance is not None and self.hung is None

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.is_held

    @property
    def name(self) -> str:
        return f"instance {self.index}"

    def add(self, stream: Stream) -> None:
        """Adds a request."""
        self.streams[stream.request.id] = stream
        self.outstanding += stream.outstanding

    def remove(self, request_id: str) -> Stream | None:
        """Removes and returns a request; ``None`` if the slot does not have it."""
        stream = self.streams.pop(request_id, None)
        if stream is not None:
            self.outstanding -= stream.outstanding
        return stream


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of every engine: ``folders`` together hold all tensors, or a run publishes them at ``source``; without either they are the model's own."""

    version: WeightVersion
    folders: tuple[str, ...] = ()
    source: WeightSource | None = None

    @property
    def call(self) -> tuple[str, dict[str, Any]]:
        """The call, with its arguments, that makes an engine take them between two steps."""
        return ("read_published", self._published) if self.source else ("finish_weight_update", {"version": list(self.version)})

    @property
    def staging(self) -> tuple[str, dict[str, Any]] | None:
        """The call that makes an engine stage them beside its steps; ``None`` where they are not published."""
        return ("stage_published", self._published) if self.source else None

    @property
    def _published(self) -> dict[str, Any]:
        assert self.source is not None
        return {"version": list(self.version), "source": asdict(self.source)}
