"""The other ranks of a tensor-parallel engine, as rank 0 drives them. Rank 0 schedules, samples and serves the caller.

Every rank holds its shard of the weights and of the KV cache. Rank 0 schedules a step and sends its plain values to the other ranks, and all
ranks compute it together (see ``forward``).
"""

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tandem.config.engine import AttentionBackend
from tandem.config.lora import LoraConfig
from tandem.engine.executor.load import LoadFormat, load_decoder
from tandem.engine.executor.rank_weights import RankWeights, StagedWeights
from tandem.kernels import KernelChoice
from tandem.kernels.mixed import Precision
from tandem.layout.parameters import parameters
from tandem.layout.sharding import ShardSpec
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_config import Heads
from tandem.model.huggingface.model_folder import checked_tensors, load_parts, part_of
from tandem.model.lora import Adapter
from tandem.model.parallel.tensor_parallel import RankGroup
from tandem.model.weight_digests import weight_digests
from tandem.runtime.machine.rank_device import rank_device
from tandem.runtime.process.processes import Threads
from tandem.runtime.process.temporary import UnnamedFile
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import Blobs, CallError, RpcTimeout, WorkerDied, raise_error
from tandem.types import EngineDied, RunError, Updated, UserError, WeightSource, WeightVersion

if TYPE_CHECKING:
    from tandem.weight_transfer.shared_weights import SharedWeights

logger = logging.getLogger(__name__)
_GRACE_S = 5.0
"""Seconds after a failure in which calls may still report which rank died."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of every rank. ``deadline_s``: limit of one step, one exchange, or the start; a rank that takes longer counts as stuck. ``context``: the
    tokens of the longest sequence (0: the model's own)."""

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
    lora: LoraConfig | None = None
    heads: Heads = "language"
    context: int = 0

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "RankSettings":
        """Returns the settings whose ``asdict`` a call brought."""
        lora = values["lora"]
        return cls(**{**values, "lora": lora and LoraConfig(**{**lora, "target_modules": tuple(lora["target_modules"])})})

    def device_of(self, rank: int) -> torch.device:
        """Returns the device of ``rank``: the shared CPU, or a separate GPU, which becomes the current one."""
        return rank_device(self.device.split(":")[0], rank)

    def join(self, rank: int, rendezvous: Path) -> RankGroup:
        """Joins the process group of all ranks."""
        return RankGroup(ShardSpec(rank, self.size, self.deterministic), rendezvous, self.device_of(rank), self.deadline_s)

    def load(self, group: RankGroup) -> Decoder:
        """Loads this rank's shard of the model."""
        # Quantized weights beside an adapter that are not packed for inference are those of a trainer, which cannot be packed any more.
        is_quantized = self.lora is not None and self.lora.quantization != "none"
        decoder = load_decoder(
            self.model, self.kernels, getattr(torch, self.dtype), self.device_of(group.shard_spec.rank), self.load_format, self.seed, group, is_quantized,
            quantization=self.quantization, deterministic=self.deterministic, attention=self.attention, precision=self.precision,
            lora=self.lora, heads=self.heads,
        )  # fmt: skip
        decoder.use_context(self.context or decoder.positions)
        return decoder


class Ranks:
    """Starts ranks 1 to size - 1 as processes that die with this one. ``decoder``: this rank's shard of the model.

    If a rank dies or is stuck, all ranks are stopped: the current call raises ``EngineDied`` naming it, and every later one ``RunError``.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._broken = ""
        self._weights: RankWeights | None = None
        self._rendezvous = UnnamedFile("rendezvous")
        threads = Threads(max(1, torch.get_num_threads() // settings.size) if settings.device == "cpu" else 1)
        others = range(1, settings.size)
        names = [f"tensor-parallel rank {rank}" for rank in others]
        arguments = ["--threads", str(threads.count)]
        self._outputs = {name: UnnamedFile("output") for name in names}
        # In this order: the group ends while its rendezvous is open, whose path is that of another file afterwards.
        self._closing: list[RankGroup | UnnamedFile] = [self._rendezvous, *self._outputs.values()]
        self._close_all = weakref.finalize(self, _close, self._closing)
        self._workers = [
            Worker(name, "tandem.engine.executor.rank_worker", arguments, threads=threads, output=output.path)
            for name, output in self._outputs.items()
        ]
        self._callers = ThreadPoolExecutor(len(others), "rank")
        self._lock, self._stopping = threading.Lock(), threading.Lock()
        self._failures: list[BaseException] | None = None
        try:
            # All ranks finish their imports before any of them waits for another under a deadline.
            self.run("hello", {}, lambda: None)
            where = self._rendezvous.path
            meta = {"settings": asdict(settings), "rendezvous": str(where)}
            group = self.run("join", meta, lambda: settings.join(0, where), per_rank=True)
            self._closing.insert(0, group)
            self.decoder = self.run("load", {}, lambda: settings.load(group))
        except BaseException:
            self.close()
            raise

    def run(
        self, name: str, meta: Mapping[str, Any], own: Callable[[], T], blobs: Blobs | None = None,
        per_rank: bool = False,
    ) -> T:
        """Calls ``name`` on every other rank and meanwhile ``own()`` here; returns its result. ``per_rank``: adds the rank's number to
        ``meta``."""
        return self._together(name, meta, own, blobs, per_rank)[0]

    def _together(
        self, name: str, meta: Mapping[str, Any], own: Callable[[], T], blobs: Blobs | None = None,
        per_rank: bool = False,
    ) -> tuple[T, list[Mapping[str, Any]]]:
        """As ``run``; also returns the replies of the other ranks, in order."""
        with self._lock:
            if self._broken:
                raise RunError(self._broken)
            calls = [
                self._callers.submit(
                    worker.call, name, {**meta, "rank": i} if per_rank else meta, blobs, deadline_s=self._settings.deadline_s
                )
                for i, worker in enumerate(self._workers, 1)
            ]
            for call in calls:
                call.add_done_callback(lambda call: self._stop(calls) if call.exception() is not None else None)
            try:
                result = own()
            except Exception as error:
                raise self._end(name, calls, error) from error
            except BaseException:
                # After an interrupted call the ranks are out of sync for good.
                self._end(name, calls, InterruptedError("it was interrupted"), grace_s=0.0)
                raise
            for call in calls:
                failure = call.exception()
                if failure is not None:
                    raise self._end(name, calls, failure) from failure
            return result, [call.result().meta for call in calls]

    def _end(self, name: str, calls: "list[Future[Any]]", error: BaseException, grace_s: float = _GRACE_S) -> Exception:
        """Kills every rank. Returns the error for the caller: the rank that died or was stuck, else the first failure."""
        failures = self._stop(calls, grace_s)
        self._callers.shutdown(wait=True)
        causes: list[BaseException] = [failure for failure in failures if isinstance(failure, WorkerDied | RpcTimeout)]
        causes += [failure for failure in (error, *failures) if isinstance(failure, UserError)]
        first = causes[0] if causes else error
        if isinstance(first, UserError) and not isinstance(first, RunError):
            raised: UserError = first
        else:
            text = str(first) if isinstance(first, UserError | CallError) else f"tensor-parallel '{name}' failed: {first}"
            text += "; the engine has stopped, create a new one"
            if isinstance(first, CallError) and (output := self._outputs[first.peer].read_text().strip()):
                logger.info("the output of %s:\n%s", first.peer, output)
                text += f" (its output ends: {output.splitlines()[-1].strip()[:200]})"
            raised = EngineDied(text) if isinstance(first, WorkerDied | RpcTimeout) else RunError(text)
        self._broken = str(raised)
        return raised

    def read_weights(self, source: WeightSource, version: WeightVersion) -> StagedWeights:
        """Reads and verifies on every rank its own slices of the published ``version``; ``update_weights`` applies them. Raises the errors of
        ``WeightReader.read`` if any rank fails; the engine keeps its weights."""
        if self._weights is None or self._weights.source != source:
            self._weights = RankWeights(self.decoder, source)
        weights, meta = self._weights, {"source": asdict(source), "version": list(version)}
        own, others = self._together("read_weights", meta, lambda: weights.answer(version))
        answers = [own, *others]
        for rank, answer in enumerate(answers):
            if answer["error"] is not None:
                raise_error(answer["error"], f"tensor-parallel rank {rank}", "read_weights")
        rereads = dict.fromkeys(name for answer in answers for name in answer["rereads"])
        size_bytes, revision = sum(answer["size_bytes"] for answer in answers), min(answer["revision"] for answer in answers)
        return StagedWeights(Updated(version, size_bytes, tuple(rereads), revision))

    def update_weights(self, tensors: Any) -> None:
        """Sends every rank its shard of a whole set of weights, or lets each apply what ``read_weights`` has staged. Raises ``UserError``, and
        changes nothing, if the set does not fit the model."""
        if isinstance(tensors, StagedWeights):
            assert self._weights is not None
            self.run("apply_weights", {}, self._weights.apply)
            return
        decoder, size = self.decoder, self._settings.size
        given = checked_tensors(decoder, tensors)
        names = [name for name, _ in parameters(decoder.shapes) if name in given]
        shard_specs = [ShardSpec(rank, size, self._settings.deterministic) for rank in range(1, size)]

        def send() -> None:
            assert decoder.group is not None
            for name in names:
                for shard_spec in shard_specs:
                    part = part_of(decoder, name, given[name], shard_spec).to(decoder.embed_tokens.device)
                    decoder.group.send([part], shard_spec.rank)
            load_parts(decoder, {name: part_of(decoder, name, given[name]) for name in names}, pack=True)

        dtypes = {name: str(given[name].dtype).removeprefix("torch.") for name in names}
        self.run("update_weights", {"dtypes": dtypes}, send)

    @property
    def shared(self) -> "SharedWeights | None":
        """The published weights that this rank computes with where they are; ``None`` if it holds a copy."""
        return None if self._weights is None else self._weights.shared

    def held_digests(self) -> list[dict[str, str]]:
        """Returns the digests of every rank's weights."""
        own, others = self._together("held_digests", {}, lambda: weight_digests(self.decoder))
        return [own, *({name: str(digest) for name, digest in each.items()} for each in others)]

    def fill_slot(self, slot: int, adapter: Adapter | None, slots: int, max_rank: int, own: Callable[[], None]) -> None:
        """Loads ``adapter`` into ``slot`` of ``slots`` on every other rank (``None``: frees the slot), and calls ``own()`` here."""
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
        """Stops the other ranks."""
        self._broken = self._broken or "the engine was closed; create a new one"
        for worker in self._workers:
            worker.stop()
        self._callers.shutdown(wait=True)
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._close_all()

    def _stop(self, calls: "list[Future[Any]]", grace_s: float = _GRACE_S) -> list[BaseException]:
        """Kills every other rank once it is known which one died or was stuck, or ``grace_s`` seconds have passed. Returns the failures of ``calls``
        before that. It is called as soon as one call fails: rank 0 may wait for a rank that has failed at its connection to the dead one
        and sends nothing any more, and only the end of that connection ends the wait."""
        with self._stopping:
            if self._failures is None:
                self._failures = _failures_of(calls, monotonic() + grace_s)
                for worker in self._workers:
                    worker.stop(grace_s=0.0)
            return self._failures


def _failures_of(calls: "list[Future[Any]]", until: float) -> list[BaseException]:
    """Waits for the first call that failed because its rank died or was stuck, for all calls, or ``until``. Returns the failures."""
    while True:
        failures = [failure for call in calls if call.done() and (failure := call.exception()) is not None]
        pending, left = [call for call in calls if not call.done()], until - monotonic()
        if not pending or left <= 0 or any(isinstance(failure, WorkerDied | RpcTimeout) for failure in failures):
            return failures
        wait(pending, left, FIRST_COMPLETED)


def _close(closing: Sequence[RankGroup | UnnamedFile]) -> None:
    for each in closing:
        each.close()
