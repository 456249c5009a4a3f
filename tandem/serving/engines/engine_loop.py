"""The thread that owns an engine: takes what comes in, steps while there is work, sleeps without using the CPU while not."""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from tandem.config.repetition_detection import RepetitionDetectionParams
from tandem.engine.core.staging import Staging
from tandem.engine.kv_cache.block_events import BlockEvents
from tandem.engine.kv_cache.block_exchange import BlockDigest
from tandem.engine.llm import LLM
from tandem.engine.lora.request import LoRARequest
from tandem.engine.pooling.params import PoolingParams
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
from tandem.engine.structured_output.params import StructuredOutputsParams
from tandem.model.huggingface.model_folder import read_tensors
from tandem.runtime.rpc.calls import PeerDied, error_meta, message_from
from tandem.runtime.rpc.channel import Channel
from tandem.runtime.traces.spans import SPANS
from tandem.serving.engines.messages import Abort, EngineRequest, Step, step_meta
from tandem.serving.engines.traced import TracedRequests
from tandem.types import RunError, UserError, WeightSource, WeightVersion
from tandem.types.wire import Frame
from tandem.weight_transfer.shared_memory import Segment

logger = logging.getLogger(__name__)

PART_BYTES = 16 * 2**20
"""Of KV blocks that are copied between two steps: a few milliseconds."""
_STAGED = "staged"
"""The event of a thread that has staged weights, or failed to."""
_LATER: dict[str, Any] = {}
"""The result of a call that is answered later."""
Copy = Generator[None, None, dict[str, Any]]
"""A call that copies one part between two steps, and returns its result at the end."""


class EngineLoop:
    """Serves one engine. ``inbox`` gets the frames of ``tandem.serving.engines.messages`` from another thread, and ``None`` at the
    end; answers go to ``server``.

    Paused, it takes requests and holds them. Weights change between two steps, whether it is paused or not.
    """

    def __init__(self, llm: LLM, server: Channel) -> None:
        self.inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._llm = llm
        self._engine = llm.engine
        self._server = server
        self._held: dict[str, tuple[EngineRequest, SamplingParams | PoolingParams]] = {}
        self._paused = False
        self._waiting_pause: int | None = None
        self._staged: list[tuple[str, Tensor]] | None = None
        self._refused: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._working_since: float | None = None
        self._block_events: BlockEvents | None = None
        self._calls: dict[str, Callable[..., dict[str, Any] | Copy]] = {
            "pause": self._pause, "resume": self._resume, "abort_requests": self._abort_requests, "sleep": self._sleep,
            "wake_up": self._wake_up, "reset_prefix_cache": self._reset_prefix_cache, "start_weight_update": self._start_weight_update,
            "update_weights": self._update_weights, "finish_weight_update": self._finish_weight_update, "read_published": self._read_published,
            "weight_info": self._weight_info, "weight_checker": self._weight_checker, "add_lora": self._add_lora, "remove_lora": self._remove_lora,
            "record_block_events": self._record_block_events, "kv_layout": self._kv_layout, "export_blocks": self._export_blocks,
            "import_blocks": self._import_blocks, _STAGED: self._end_staging,
        }  # fmt: skip
        self._copies: deque[tuple[int, Copy]] = deque()
        self._stagings: dict[int, Staging] = {}
        self._traced = TracedRequests()
        SPANS.identify("engine")

    def run(self) -> None:
        """Serve until ``None`` comes in."""
        while True:
            while not (self._copies or self._may_step()) or not self.inbox.empty():
                self._working_since = None
                frame = self.inbox.get()
                if frame is None:
                    return
                self._working_since = time.monotonic()
                self._handle(frame)
                self._flush()
            self._working_since = time.monotonic()
            if self._copies:
                self._copy_part()
            if self._may_step():
                self._step()

    @property
    def working_s(self) -> float:
        """Seconds for which it has worked on the present step or frame; 0 while it waits. Any thread may ask."""
        since = self._working_since
        return 0.0 if since is None else time.monotonic() - since

    def _may_step(self) -> bool:
        is_idle = not self._engine.has_unfinished_requests
        return not (is_idle or self._engine.is_sleeping or (self._paused and self._waiting_pause is None))

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            # The running requests would fail again in every later step.
            logger.exception("a step failed")
            self._fail_all(str(error) if isinstance(error, UserError) else f"the engine failed: {type(error).__name__}")
            outputs = []
        self._send_outputs(outputs)
        if self._waiting_pause is not None and not self._engine.has_unfinished_requests:
            number, self._waiting_pause = self._waiting_pause, None
            self._answer(number, {"paused": True})

    def _fail_all(self, text: str) -> None:
        for request_id in self._engine.request_ids:
            self._engine.abort(request_id)
            self._failed[request_id] = text
        self._engine.take_outputs()

    def _flush(self) -> None:
        """Hand out what needs no step; the figures too, where no step would bring them."""
        if self._refused or self._failed or self._engine.has_outputs or not self._may_step():
            self._send_outputs(self._engine.take_outputs())

    def _send_outputs(self, outputs: list[Any]) -> None:
        stats = self._engine.stats()
        stats = replace(stats, num_requests_waiting=stats.num_requests_waiting + len(self._held))
        refused, self._refused = self._refused, {}
        failed, self._failed = self._failed, {}
        self._traced.forget([*refused, *failed])
        events = [] if self._block_events is None else self._block_events.take()
        self._traced.take(outputs)
        spans = SPANS.take_json() if len(SPANS) else []
        self._server.send(step_meta(Step(outputs, stats, refused, failed, events, spans)), kind="event", method="step")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _handle(self, frame: Frame) -> None:
        if frame.kind == "call":
            self._call(frame.call, frame.method, frame.meta)
        elif frame.method == _STAGED:
            self._call(frame.call, _STAGED, {"number": frame.call})
        elif frame.method == "add":
            self._take_request(message_from(EngineRequest, frame.meta))
        else:
            for request_id in message_from(Abort, frame.meta).ids:
                self._abort(request_id)

    def _take_request(self, request: EngineRequest) -> None:
        self._traced.add(request)
        try:
            params = _sampling_params(request) if request.pooling is None else PoolingParams(**request.pooling)
            if self._paused:
                self._engine.check_request(request.prompt_token_ids, params)
                self._held[request.id] = (request, params)
            else:
                self._add(request, params)
        except UserError as error:
            self._refused[request.id] = str(error)
        except (TypeError, ValueError, OverflowError) as error:
            self._refused[request.id] = f"the request's parameters do not make sense: {error}"

    def _add(self, request: EngineRequest, params: SamplingParams | PoolingParams) -> None:
        self._engine.add_request(
            request.id, request.prompt_token_ids, params, key=request.key, first_index=request.first_index,
            priority=request.priority, cache_salt=request.cache_salt, num_draft_tokens=request.num_draft_tokens,
            lora_request=None if request.adapter is None else LoRARequest(*request.adapter),
        )  # fmt: skip

    def _abort(self, request_id: str) -> bool:
        held = self._held.pop(request_id, None)
        if held is not None:
            # The engine makes the answer of a request that never began.
            self._add(*held)
        return self._engine.abort(request_id)

    # -- control calls -------------------------------------------------------------------------------------------------

    def _call(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            result = self._stage_published(number, **arguments) if name == "stage_published" else self._calls[name](**arguments)
        except Exception as error:
            if not isinstance(error, UserError):
                logger.exception("'%s' failed", name)
            self._server.send(error_meta(error), kind="error", method=name, call=number)
            return
        if isinstance(result, Generator):
            self._copies.append((number, result))
        elif result.get("waits"):
            self._waiting_pause = number
        elif result is not _LATER:
            self._answer(number, result)

    def _answer(self, number: int, result: dict[str, Any]) -> None:
        self._server.send(result, kind="result", call=number)

    def _pause(self, mode: str) -> dict[str, Any]:
        if self._waiting_pause is not None:
            raise UserError("a pause with mode=wait is in progress; wait for its answer")
        self._paused = True
        if mode == "abort":
            self._abort_requests(None)
        # Without work no step would come that answers the call.
        return {"waits": True} if mode == "wait" and self._engine.has_unfinished_requests else {"paused": True}

    def _resume(self) -> dict[str, Any]:
        if self._waiting_pause is not None:
            number, self._waiting_pause = self._waiting_pause, None
            self._answer(number, {"paused": False})
        self._paused = False
        held, self._held = self._held, {}
        for request, params in held.values():
            self._add(request, params)
        return {}

    def _abort_requests(self, ids: list[str] | None) -> dict[str, Any]:
        chosen = [*self._engine.request_ids, *self._held] if ids is None else ids
        return {"aborted": sum(self._abort(request_id) for request_id in chosen)}

    def _sleep(self) -> dict[str, Any]:
        self._engine.sleep()
        return {}

    def _wake_up(self) -> dict[str, Any]:
        self._engine.wake_up()
        return {}

    def _reset_prefix_cache(self) -> dict[str, Any]:
        self._engine.reset_prefix_cache()
        return {}

    def _record_block_events(self) -> dict[str, Any]:
        self._block_events = self._engine.record_block_events()
        return {}

    # -- KV blocks of other engines ------------------------------------------------------------------------------------

    def _copy_part(self) -> None:
        """Copies the next part of the blocks that are on their way, so that no step waits for all of them."""
        number, copy = self._copies[0]
        try:
            next(copy)
            return
        except StopIteration as ended:
            self._answer(number, ended.value)
        except Exception as error:
            if not isinstance(error, UserError):
                logger.exception("KV blocks could not be copied")
            self._server.send(error_meta(error), kind="error", call=number)
        self._copies.popleft()
        self._flush()

    def _kv_layout(self) -> dict[str, Any]:
        exchange = self._engine.block_exchange()
        return {"layout": asdict(exchange.layout), "version": list(exchange.weight_version), "block_bytes": exchange.block_bytes}

    def _export_blocks(self, prompt_token_ids: list[int], adapter: str, cache_salt: str, segment: str) -> Copy:
        """Copies the blocks of a prompt that the prefix cache has to shared memory."""
        exchange = self._engine.block_exchange()
        size, blocks = exchange.block_bytes, list[BlockDigest]()
        with Segment.open(segment, writable=True) as shared:
            while part := exchange.export_blocks(
                prompt_token_ids, shared.memory[len(blocks) * size :][: max(size, PART_BYTES)], first=len(blocks), adapter=adapter, cache_salt=cache_salt
            ):  # fmt: skip
                blocks += part
                yield
            return {"blocks": blocks, **self._kv_layout()}

    def _import_blocks(self, request_id: str, prompt_token_ids: list[int], adapter: str, cache_salt: str, segment: str, blocks: list[list[str]]) -> Copy:
        """Brings the blocks of a prompt, which are in shared memory, into the prefix cache."""
        exchange = self._engine.block_exchange()
        size, done = exchange.block_bytes, 0
        count = max(1, PART_BYTES // size)
        with Segment.open(segment) as shared:
            while part := [BlockDigest(*block) for block in blocks[done : done + count]]:
                taken = exchange.import_blocks(
                    prompt_token_ids, part, shared.memory[done * size : (done + len(part)) * size], first=done, adapter=adapter, cache_salt=cache_salt,
                    request_id=request_id,
                )  # fmt: skip
                done += taken
                if taken < len(part):
                    break
                yield
        return {"blocks": done}

    # -- adapters ------------------------------------------------------------------------------------------------------

    def _add_lora(self, adapter: list[Any]) -> dict[str, Any]:
        return {"digest": self._engine.add_lora(LoRARequest(*adapter))}

    def _remove_lora(self, adapter: str) -> dict[str, Any]:
        if any(held.adapter is not None and held.adapter[0] == adapter for held, _ in self._held.values()):
            raise UserError(f"adapter '{adapter}' is used by requests that wait for /resume; abort them first")
        # An engine that was started again has not read it.
        if adapter in self._engine.list_loras():
            self._engine.remove_lora(adapter)
        return {}

    # -- weights -------------------------------------------------------------------------------------------------------

    def _start_weight_update(self) -> dict[str, Any]:
        self._staged = []
        return {}

    def _update_weights(self, folder: str) -> dict[str, Any]:
        """Read a folder's tensors beside the weights in use."""
        if self._staged is None:
            raise RunError("no weight update was started")
        self._staged += [(name, tensor.clone()) for name, tensor in read_tensors(folder)]
        return {"tensors": len(self._staged)}

    def _finish_weight_update(self, version: list[int]) -> dict[str, Any]:
        """Take all staged tensors or, where they do not make a whole set, none."""
        if self._staged is None:
            raise RunError("no weight update was started")
        staged, self._staged = self._staged, None
        self._engine.update_weights(staged, WeightVersion(*version))
        return self._weight_info()

    def _stage_published(self, number: int, version: list[int], source: dict[str, Any]) -> dict[str, Any]:
        """Begins to read, verify and pack what a run has published as ``version``, while requests are computed; answered when that has ended."""
        ended = Frame({}, {}, "event", _STAGED, number)
        self._stagings[number] = self._engine.stage_weights_from(WeightSource(**source), WeightVersion(*version), lambda: self.inbox.put(ended))
        return _LATER

    def _end_staging(self, number: int) -> dict[str, Any]:
        try:
            return {"is_staged": self._stagings.pop(number).result()}
        except PeerDied as death:
            raise RunError(str(death)) from None

    def _read_published(self, version: list[int], source: dict[str, Any]) -> dict[str, Any]:
        """Reads, verifies and takes what a run has published as ``version``, or leaves the weights as they are."""
        try:
            self._engine.update_weights_from(WeightSource(**source), WeightVersion(*version))
        except PeerDied as death:
            raise RunError(str(death)) from None
        return self._weight_info()

    def _weight_info(self) -> dict[str, Any]:
        return {"version": list(self._engine.weight_version)}

    def _weight_checker(self) -> dict[str, Any]:
        if not self._engine.weight_digests:
            raise UserError("a tensor-parallel engine keeps no digests of its weights")
        return {"version": list(self._engine.weight_version), "digests": self._engine.weight_digests}


def _sampling_params(request: EngineRequest) -> SamplingParams:
    given = dict(request.params)
    if given.get("repetition_detection") is not None:
        given["repetition_detection"] = RepetitionDetectionParams(**given["repetition_detection"])
    if given.get("structured_outputs") is not None:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if given.get("logit_bias") is not None:
        # JSON has no numbers as names.
        given["logit_bias"] = dict(given["logit_bias"])
    streamed = RequestOutputKind[given.pop("output_kind", "DELTA")]
    return SamplingParams(**given, output_kind=streamed if request.stream else RequestOutputKind.FINAL_ONLY)
