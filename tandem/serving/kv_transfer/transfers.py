"""Prompts and answers of one server that are computed apart from each other, in two servers."""

from collections.abc import Callable
from typing import Any

from tandem.engine.processing.outputs import RequestOutput
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.engines.pool import Pool
from tandem.serving.engines.slot import Slot
from tandem.serving.errors import invalid
from tandem.serving.kv_transfer.exports import Exports
from tandem.serving.kv_transfer.imports import Imports
from tandem.serving.kv_transfer.layouts import Layouts
from tandem.serving.kv_transfer.memory import TransferMemory
from tandem.serving.kv_transfer.remote_blocks import RemoteBlocks
from tandem.serving.kv_transfer.settings import KVTransferSettings
from tandem.serving.metrics import Metrics
from tandem.serving.sessions import each, submitted
from tandem.types import RunError, UserError
from tandem.weight_transfer.shared_memory import check_free

_PARAM = "kv_transfer_params"


class KVTransfers:
    """The transfers of one server. Raises ``UserError`` if the port of its blocks cannot be taken, or the machine has less shared memory than they may need."""

    def __init__(self, settings: KVTransferSettings, pool: Pool, metrics: Metrics, say: Callable[[str], None]) -> None:
        self.settings, self._pool, self._say, self._metrics = settings, pool, say, metrics
        self.memory = TransferMemory(settings.memory_bytes)
        metrics.kv_memory(lambda: (self.memory.held_bytes, self.memory.segments))
        if settings.key:
            try:
                check_free(settings.memory_bytes)
            except RunError as error:
                raise UserError(f"--kv-transfer-memory is {settings.memory_bytes / 2**30:g} GiB: {error}") from None
        layouts = Layouts(pool)
        self._layouts = layouts
        self.exports = Exports(settings, self.memory, layouts, metrics, say) if settings.sends else None
        self.imports = Imports(settings, self.memory, layouts, pool, metrics, say) if settings.receives else None

    async def start(self) -> None:
        """Serves blocks from now on. Raises ``UserError`` if those of the engine are of no use to others."""
        if not self.settings.key:
            return
        for slot in self._pool.slots:
            if slot.instance is not None:
                await self._layouts.of(slot.instance)
        if self.exports is not None:
            self.exports.start()
            self._say(f"KV blocks of prompts are served at {self.settings.host}:{self.exports.port} (role {self.settings.role})")

    async def stop(self) -> None:
        if self.exports is not None:
            await self.exports.stop()
        if self.imports is not None:
            await self.imports.stop()

    def is_prefill(self, params: dict[str, Any] | None) -> bool:
        """Returns whether a request asks for its prompt's blocks instead of an answer. Raises ``ApiError`` where that cannot be."""
        if params is None or not params.get("do_remote_decode"):
            return False
        if self.exports is None:
            raise invalid("'kv_transfer_params' asks for the prompt's KV blocks, and this server gives none; start it with --role prefill", _PARAM)
        return True

    async def prefill(self, request: EngineRequest) -> tuple[RequestOutput, dict[str, Any] | None]:
        """Computes a prompt. Returns the output, and ``kv_transfer_params`` for the server that is to answer; ``None`` if it must compute the prompt."""
        assert self.exports is not None
        with submitted(self._pool, [request]) as (streams, queue):
            async for _, output in each(queue, 1):
                last = output
        instance = self._pool.slots[streams[0].engine].instance
        remote = None if instance is None else await self.exports.offer(instance, request)
        return last, None if remote is None else remote.to_params(self.settings.key)

    async def receive(self, request: EngineRequest, params: dict[str, Any] | None) -> Slot | None:
        """Brings the blocks that ``params`` of a request describe to an engine, which is returned; ``None``: any engine computes the prompt. Raises
        ``ApiError`` if this server takes none, or has no room for the request."""
        if params is None or not params.get("do_remote_prefill"):
            return None
        if self.imports is None:
            raise invalid("'kv_transfer_params' has KV blocks for the prompt, and this server takes none; start it with --role decode", _PARAM)
        self._pool.check_room()
        try:
            remote = RemoteBlocks.from_params(params, self.settings.key)
        except UserError as error:
            self._metrics.kv_transfer("received", "refused")
            self._say(f"KV blocks of a prompt could not be used (refused), so it is computed here: {error}")
            return None
        return await self.imports.bring(request, remote)
