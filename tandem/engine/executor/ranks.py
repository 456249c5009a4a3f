"""The other ranks of a tensor-parallel engine, seen from the first, which schedules, samples and talks to the caller.

Every rank holds its part of the weights and of the key-value cache. A step is decided once; its plain values go to the
other ranks, and all compute it together (see ``forward``).
"""

import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import torch

from tandem.config.engine import AttentionBackend
from tandem.engine.executor.load import LoadFormat, load_decoder
from tandem.engine.executor.rank_weights import RankWeights, StagedWeights
from tandem.kernels import KernelChoice
from tandem.kernels.mixed import Precision
from tandem.layout.shapes import parameters
from tandem.layout.sharding import ShardSpec
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import checked_tensors, load_parts, part_of
from tandem.model.lora import Adapter
from tandem.model.parallel.tensor_parallel import RankGroup
from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import Blobs, CallError, RpcTimeout, WorkerDied, raise_error
from tandem.types import RunError, Updated, UserError, WeightSource, WeightVersion

_GRACE_S = 5.0
"""After a failure: how long the ranks have to say, or to show, which of them is dead."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What every rank must know. ``deadline_s``: of one step, one exchange, or the start; a rank that takes longer is stuck."""

    model: str
    kernels: KernelChoice
    dtype: str
    device: str
    load_format: LoadFormat
    seed: int
    size: int
    deterministic: bool
    deadline_s: float
    quantization: str | None = None
    attention: AttentionBackend = "auto"
    precision: Precision = "fp32"

    def device_of(self, rank: int) -> torch.device:
        """CPUs are shared; each rank has a GPU of its own."""
        return torch.device(self.device if self.device == "cpu" else f"{self.device.split(':')[0]}:{rank}")

    def join(self, rank: int, rendezvous: Path) -> RankGroup:
        """Meet the other ranks."""
        return RankGroup(ShardSpec(rank, self.size, self.deterministic), rendezvous, self.device_of(rank), self.deadline_s)

    def load(self, group: RankGroup) -> Decoder:
        """This rank's part of the model."""
        return load_decoder(
            self.model, self.kernels, getattr(torch, self.dtype), self.device_of(group.shard_spec.rank), self.load_format, self.seed, group,
            quantization=self.quantization, deterministic=self.deterministic, attention=self.attention, precision=self.precision,
        )


class Ranks:
    """Starts ranks 1 to size - 1 as processes that die with this one. ``decoder``: this rank's part of the model.

    A rank that dies or is stuck ends them all: the call under way and every later one raise ``RunError`` naming it.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._broken = ""
        self._weights: RankWeights | None = None
        self._folder = Path(mkdtemp(prefix="tandem-ranks-"))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        threads = Threads(max(1, torch.get_num_threads() // settings.size) if settings.device == "cpu" else 1)
        others = range(1, settings.size)
        names = [f"tensor-parallel rank {rank}" for rank in others]
        arguments = ["--threads", str(threads.count)]
        self._workers = [Worker(name, "tandem.engine.executor.rank_worker", arguments, threads=threads, output=self._log_of(name)) for name in names]
        self._callers = ThreadPoolExecutor(len(others), "rank")
        self._lock = threading.Lock()
        try:
            # Every rank has imported what it needs before any of them waits for another.
            self.run("hello", {}, lambda: None)
            where = self._folder / "rendezvous"
            meta = {"settings": asdict(settings), "rendezvous": str(where)}
            group = self.run("join", meta, lambda: settings.join(0, where), per_rank=True)
            self.decoder = self.run("load", {}, lambda: settings.load(group))
        except BaseException:
            self.close()
            raise

    def run(
        self, name: str, meta: Mapping[str, Any], own: Callable[[], T], blobs: Blobs | None = None,
        per_rank: bool = False,
    ) -> T:
        """Make the call ``name`` on every other rank and meanwhile ``own()`` here; returns its result. ``per_rank``: the
        rank's number goes with the call."""
        return self._together(name, meta, own, blobs, per_rank)[0]

    def _together(
        self, name: str, meta: Mapping[str, Any], own: Callable[[], T], blobs: Blobs | None = None,
        per_rank: bool = False,
    ) -> tuple[T, list[Mapping[str, Any]]]:
        """``run``; returns what the other ranks answered too, by rank."""
        with self._lock:
            if self._broken:
                raise RunError(self._broken)
            calls = [
                self._callers.submit(
                    worker.call, name, {**meta, "rank": i} if per_rank else meta, blobs, deadline_s=self._settings.deadline_s
                )
                for i, worker in enumerate(self._workers, 1)
            ]
            try:
                result = own()
            except Exception as error:
                raise self._end(name, calls, error) from error
            except BaseException:
                # Interrupted in the middle: the ranks are out of step for good.
                self._end(name, calls, InterruptedError("it was interrupted"), grace_s=0.0)
                raise
            for call in calls:
                failure = call.exception()
                if failure is not None:
                    raise self._end(name, calls, failure) from failure
            return result, [call.result().meta for call in calls]

    def _end(self, name: str, calls: "list[Future[Any]]", error: BaseException, grace_s: float = _GRACE_S) -> Exception:
        """Kill every rank; returns what the caller is told: who died or was stuck, else the first thing that went wrong."""
        wait(calls, grace_s)
        failures = [call.exception() for call in calls if call.done()]
        self._kill()
        found: list[BaseException] = [failure for failure in failures if isinstance(failure, WorkerDied | RpcTimeout)]
        found += [failure for failure in (error, *failures) if isinstance(failure, UserError)]
        first = found[0] if found else error
        if isinstance(first, UserError) and not isinstance(first, RunError):
            told: UserError = first
        else:
            text = str(first) if isinstance(first, UserError | CallError) else f"tensor-parallel '{name}' failed: {first}"
            told = RunError(f"{text}; the engine has ended, make it again")
        if isinstance(first, CallError) and self._log_of(first.peer).stat().st_size:
            self._remove_folder.detach()
            told = RunError(f"{told} (log: {self._log_of(first.peer)})")
        self._broken = str(told)
        return told

    def read_weights(self, source: WeightSource, version: WeightVersion) -> StagedWeights:
        """Have every rank read its own slices of the published ``version`` and verify them; ``update_weights`` applies them. Raises what
        ``WeightReader.read`` raises where any rank cannot; the engine keeps its weights then."""
        if self._weights is None or self._weights.source != source:
            self._weights = RankWeights(self.decoder, source)
        weights, meta = self._weights, {"source": asdict(source), "version": list(version)}
        own, others = self._together("read_weights", meta, lambda: weights.answer(version))
        answers = [own, *others]
        for rank, answer in enumerate(answers):
            if answer["error"] is not None:
                raise_error(answer["error"], f"tensor-parallel rank {rank}", "read_weights")
        rereads = dict.fromkeys(name for answer in answers for name in answer["rereads"])
        return StagedWeights(Updated(version, sum(answer["size_bytes"] for answer in answers), tuple(rereads)))

    def update_weights(self, tensors: Any) -> None:
        """Give every rank its part of a whole set of weights, or have each apply what ``read_weights`` has staged. Raises ``UserError``
        where the set does not fit the model, and nothing has changed then."""
        if isinstance(tensors, StagedWeights):
            assert self._weights is not None
            self.run("apply_weights", {}, self._weights.apply)
            return
        decoder, size = self.decoder, self._settings.size
        given = checked_tensors(decoder, tensors)
        names = [name for name, _ in parameters(decoder.shapes)]
        cuts = [ShardSpec(rank, size, self._settings.deterministic) for rank in range(1, size)]

        def send() -> None:
            assert decoder.group is not None
            for name in names:
                for cut in cuts:
                    part = part_of(decoder, name, given[name], cut).to(decoder.embed_tokens.device)
                    decoder.group.send([part], cut.rank)
            load_parts(decoder, {name: part_of(decoder, name, given[name]) for name in names}, pack=True)

        dtypes = [str(given[name].dtype).removeprefix("torch.") for name in names]
        self.run("update_weights", {"dtypes": dtypes}, send)

    def fill_slot(self, slot: int, adapter: Adapter | None, slots: int, max_rank: int, own: Callable[[], None]) -> None:
        """Put ``adapter`` into one of the ``slots`` on every other rank (``None``: free it), and call ``own()`` here."""
        pairs = {} if adapter is None else adapter.matrices
        matrices = [[*at, list(a.shape), list(b.shape)] for at, (a, b) in pairs.items()]
        meta = {"slot": slot, "slots": slots, "max_rank": max_rank, "matrices": matrices, "r": 0 if adapter is None else adapter.rank}
        device, group = self.decoder.embed_tokens.device, self.decoder.group
        assert group is not None

        def send() -> None:
            for rank in range(1, self._settings.size):
                group.send([matrix.to(device, torch.float32) for pair in pairs.values() for matrix in pair], rank)
            own()

        self.run("fill_slot", meta, send)

    def close(self) -> None:
        """End the other ranks."""
        self._broken = self._broken or "the engine was closed; make another"
        for worker in self._workers:
            worker.stop()
        self._callers.shutdown(wait=True)
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._remove_folder()

    def _log_of(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-')}.log"

    def _kill(self) -> None:
        for worker in self._workers:
            worker.stop(grace_s=0.0)
        self._callers.shutdown(wait=True)


