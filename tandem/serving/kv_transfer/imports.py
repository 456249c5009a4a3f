"""Fetches the KV blocks of a prompt from the server that has computed it, and gives them to an engine. Whatever goes wrong, the engine computes the prompt."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import CallError
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.engines.pool import Pool
from tandem.serving.engines.slot import Slot
from tandem.serving.kv_transfer.layouts import Layouts
from tandem.serving.kv_transfer.memory import TransferMemory
from tandem.serving.kv_transfer.remote_blocks import RemoteBlocks
from tandem.serving.kv_transfer.settings import KVTransferSettings
from tandem.serving.measured_rate import MeasuredRate
from tandem.serving.metrics import Metrics
from tandem.types import RunError, UserError
from tandem.weight_transfer.shared_memory import Contents, Segment
from tandem.weight_transfer.transport.fetch import read_pieces
from tandem.weight_transfer.transport.pieces import Piece, SourceLost, VersionMoved
from tandem.weight_transfer.transport.tcp_source import TcpSource

_PATIENCE_S = 1.0
"""Without a byte, after which the other server counts as dead: computing the prompt takes about as long."""
_THREADS = 8
"""Transfers at once; further ones wait."""


class AlteredBlocks(RunError):
    """A block arrived twice without its digest."""


class TransferCancelled(RunError):
    """The client has left."""


class Fetch(TcpSource):
    """One transfer, which can be cancelled."""

    def __init__(self, remote: RemoteBlocks, key: str) -> None:
        super().__init__("the server of the KV blocks", remote.host, remote.port, key, silent_s=_PATIENCE_S, what="KV blocks")
        self._remote, self._is_cancelled = remote, False

    def run(self, into: Segment, timeout_s: float) -> None:
        """Receives and verifies all blocks. Raises ``AlteredBlocks``, and what ``read_pieces`` does."""
        remote = self._remote

        def is_repeated(piece: Piece) -> bool:
            if piece.altered_by:
                raise AlteredBlocks(f"{piece.name} was received twice and does not have its digest {piece.expected}")
            return True

        read_pieces(
            self, remote.segment, remote.contents, remote.pieces(), into.memory, is_repeated, peer=self.peer, deadline=Deadline(timeout_s),
            patience_s=_PATIENCE_S,
        )  # fmt: skip

    def read(self, segment: str, contents: Contents, pieces: Sequence[Piece], into: memoryview, deadline: Deadline) -> None:
        if self._is_cancelled:
            raise TransferCancelled("the client has left")
        super().read(segment, contents, pieces, into, deadline)

    def cancel(self) -> None:
        """Ends it soon, from another thread."""
        self._is_cancelled = True
        self.abort()

    def free(self) -> None:
        """Tells the other server that the blocks are needed no longer, if it can be told."""
        try:
            self.release(self._remote.segment, self._remote.contents, Deadline(_PATIENCE_S))
        except (SourceLost, RunError, TimeoutError):
            # It frees them after its deadline.
            return


class Imports:
    """``rate``: tokens a second of the transfers so far, from the request for their blocks until an engine has them. ``say``: writes a line of the log."""

    def __init__(
        self, settings: KVTransferSettings, memory: TransferMemory, layouts: Layouts, pool: Pool, metrics: Metrics, say: Callable[[str], None]
    ) -> None:
        self._settings, self._memory, self._layouts, self._pool, self._metrics, self._say = settings, memory, layouts, pool, metrics, say
        self.rate = MeasuredRate()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-blocks")
        self._running: set[asyncio.Task[Slot | None]] = set()

    async def bring(self, request: EngineRequest, remote: RemoteBlocks) -> Slot | None:
        """Brings the blocks of the prompt of ``request`` to an engine, which is returned; ``None``: it must be computed. If the caller is cancelled, so is the
        transfer."""
        fetch = Fetch(remote, self._settings.key)
        transfer = asyncio.create_task(self._transfer(request, remote, fetch), name="KV blocks")
        self._running.add(transfer)
        transfer.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(transfer)
        except asyncio.CancelledError:
            fetch.cancel()
            raise

    async def _transfer(self, request: EngineRequest, remote: RemoteBlocks, fetch: Fetch) -> Slot | None:
        """Runs to its end even if the caller has left, because a thread may be writing to its memory."""
        began = time.monotonic()
        try:
            slot = await self._bring(request, remote, fetch)
        except (UserError, RunError, CallError, OSError) as error:
            outcome = _outcome(error)
            self._metrics.kv_transfer("received", outcome)
            if outcome != "cancelled":
                self._say(f"the KV blocks of a prompt of {len(request.prompt_token_ids)} tokens could not be used ({outcome}), so it is computed here: {error}")
            slot = None
        else:
            seconds = time.monotonic() - began
            self.rate.note(len(request.prompt_token_ids), seconds)
            self._metrics.kv_transfer("received", "used", remote.size_bytes, seconds)
        self._threads.submit(fetch.free)
        return slot

    async def _bring(self, request: EngineRequest, remote: RemoteBlocks, fetch: Fetch) -> Slot:
        slot = self._pool.least_loaded()
        if slot is None or slot.instance is None:
            raise RunError("no engine is ready")
        layout = await self._layouts.of(slot.instance)
        layout.check(remote.layout, remote.version)
        with self._memory.segment(remote.size_bytes) as segment:
            await asyncio.get_running_loop().run_in_executor(self._threads, fetch.run, segment, self._settings.timeout_s)
            adapter = "" if request.adapter is None else str(request.adapter[0])
            with self._pool.named(request):
                brought = await slot.instance.call(
                    "import_blocks", request_id=request.id, prompt_token_ids=request.prompt_token_ids, adapter=adapter, cache_salt=request.cache_salt,
                    segment=segment.name, blocks=[list(block) for block in remote.blocks],
                )  # fmt: skip
        if not brought["blocks"]:
            raise RunError("the KV cache has no free block")
        return slot

    async def stop(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _outcome(error: Exception) -> str:
    """Returns why blocks were not used, in a word."""
    if isinstance(error, TransferCancelled):
        return "cancelled"
    if isinstance(error, AlteredBlocks):
        return "altered"
    if isinstance(error, VersionMoved):
        return "expired"
    if isinstance(error, TimeoutError):
        return "late"
    if isinstance(error, CallError | SourceLost | OSError):
        return "lost"
    return "failed" if isinstance(error, RunError) else "refused"
