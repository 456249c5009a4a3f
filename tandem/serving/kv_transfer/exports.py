"""KV blocks of prompts that this server has computed, copied to shared memory, where other servers fetch them: until they have, or until a deadline.

A copy, because a block of the engine's own cache that waited for a reader that never comes would be missing there, and one that was given to another prompt
while it is read would be wrong numbers.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable

from tandem.serving.engines.instance import Instance
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.kv_transfer.layouts import Layouts
from tandem.serving.kv_transfer.memory import TransferMemory
from tandem.serving.kv_transfer.remote_blocks import RemoteBlocks
from tandem.serving.kv_transfer.settings import KVTransferSettings
from tandem.serving.metrics import Metrics
from tandem.types import RunError, UserError, WeightVersion
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.transport.tcp_server import WeightServer


class Exports:
    """Serves blocks at an address of its own, in threads. Raises ``UserError`` if its port cannot be taken. ``say``: writes a line of the log."""

    def __init__(self, settings: KVTransferSettings, memory: TransferMemory, layouts: Layouts, metrics: Metrics, say: Callable[[str], None]) -> None:
        self._settings, self._memory, self._layouts, self._metrics, self._say = settings, memory, layouts, metrics, say
        self._server = WeightServer(
            [], settings.key, name="KV blocks", host=settings.host, port=settings.port, silent_s=settings.timeout_s, released=self._released, what="KV blocks"
        )
        self._engine_id = uuid.uuid4().hex
        self._held: dict[str, tuple[Segment, asyncio.TimerHandle]] = {}
        self._freeing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def port(self) -> int:
        return self._server.port

    def start(self) -> None:
        """Serves from now on, for this event loop."""
        self._loop = asyncio.get_running_loop()
        self._server.start()

    async def offer(self, instance: Instance, request: EngineRequest) -> RemoteBlocks | None:
        """Copies the blocks of the prompt of ``request``, which ``instance`` has computed; returns where they can be fetched, ``None`` if there are none."""
        adapter = "" if request.adapter is None else str(request.adapter[0])
        try:
            blocks = (len(request.prompt_token_ids) - 1) // (await self._layouts.of(instance)).block_tokens
            if not blocks:
                return None
            segment = self._memory.create(blocks * (await self._layouts.of(instance)).block_bytes)
        except (UserError, RunError) as error:
            self._failed(error)
            return None
        try:
            copied = await instance.call(
                "export_blocks", prompt_token_ids=request.prompt_token_ids, adapter=adapter, cache_salt=request.cache_salt, segment=segment.name
            )
            if not copied["blocks"]:
                self._memory.close(segment)
                self._failed(RunError("the prefix cache no longer has the prompt's blocks"))
                return None
            remote = RemoteBlocks(
                self._settings.host, self.port, self._engine_id, segment.name, tuple((name, digest) for name, digest in copied["blocks"]),
                copied["block_bytes"], WeightVersion(*copied["version"]), copied["layout"],
            )  # fmt: skip
        except BaseException as error:
            self._memory.close(segment)
            if not isinstance(error, UserError | RunError):
                raise
            self._failed(error)
            return None
        segment.contents = remote.contents
        self._server.serve_too(segment)
        late = asyncio.get_running_loop().call_later(self._settings.timeout_s, self._free, segment.name, "expired")
        self._held[segment.name] = (segment, late)
        return remote

    def _failed(self, error: Exception) -> None:
        self._metrics.kv_transfer("sent", "failed")
        self._say(f"KV blocks of a prompt are not offered: {error}")

    def _released(self, name: str) -> None:
        # Called in a thread of the server.
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop has ended, and the segment with it.
            self._loop.call_soon_threadsafe(self._free, name, "fetched")

    def _free(self, name: str, outcome: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            held[1].cancel()
            self._metrics.kv_transfer("sent", outcome)
            task = asyncio.create_task(self._close(held[0]))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    async def _close(self, segment: Segment) -> None:
        # A reader may need a moment to notice.
        await asyncio.to_thread(self._server.withdraw, segment)
        self._memory.close(segment)

    async def stop(self) -> None:
        """Frees everything."""
        for name in list(self._held):
            self._free(name, "stopped")
        await asyncio.gather(*self._freeing, return_exceptions=True)
        await asyncio.to_thread(self._server.close)
