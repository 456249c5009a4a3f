"""The engines behind one server: who takes a request, what happens when one dies, and control calls to all of them."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.engine.processing.outputs import RequestOutput
from tandem.runtime.process.backoff import Backoff
from tandem.runtime.process.processes import kill
from tandem.runtime.process.tasks import end_tasks
from tandem.runtime.rpc.traced import receive_spans
from tandem.runtime.traces.context import current
from tandem.serving.engines.block_events import CLIENT_REQUEST_ID, ServedBlockEvents
from tandem.serving.engines.instance import Instance, InstanceDied
from tandem.serving.engines.messages import EngineInfo, EngineRequest, Step
from tandem.serving.engines.slot import Slot, Weights
from tandem.serving.engines.stream import Outputs, Stream
from tandem.serving.errors import ApiError, internal, invalid, overloaded, unavailable
from tandem.serving.measured_rate import MeasuredRate
from tandem.serving.metrics import Metrics
from tandem.serving.settings import ServerSettings
from tandem.types import DamagedWeights, RunError, UserError

MAX_ATTEMPTS = 3
"""Engines that a request may outlive: one that kills every engine must end."""

MAX_BACKOFF_S = 30.0

_LOOK_S = 0.01

_EVENTS_S = 5.0
_LEAST_PREFILL_TOKENS = 64
"""Of a prompt whose time says how fast prompts are computed."""

LOAD_ATTEMPTS = 4
"""Processes of one engine that may die while they load the model at the server's start."""


class Pool:
    """Starts the engines, keeps them alive and gives each request to the one with the least outstanding token work."""

    def __init__(self, settings: ServerSettings, metrics: Metrics, say: Callable[[str], None] | None = None) -> None:
        self.settings = settings
        self.metrics = metrics
        self.info: EngineInfo | None = None
        self.weights = Weights(settings.weight_version)
        self.is_paused = False
        self.is_sleeping = False
        self.slots = [Slot(i) for i in range(settings.instances)]
        self.block_events = ServedBlockEvents() if settings.kv_events else None
        self.prefill_rate = MeasuredRate()
        """Tokens of prompts that an engine computes in a second, beside whatever else it computes."""
        self._arriving: dict[str, str] = {}
        self._say = say or (lambda text: print(f"tandem: {text}", file=sys.stderr, flush=True))
        self._unassigned: dict[str, Stream] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._control = asyncio.Lock()
        self._keys = 0

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model in every engine. Raises ``UserError`` where that cannot be done."""
        loads = [asyncio.create_task(self._load_first(slot)) for slot in self.slots]
        try:
            instances = await asyncio.gather(*loads)
        except BaseException:
            await end_tasks(loads)
            raise
        for slot, instance in zip(self.slots, instances, strict=True):
            slot.instance = instance
            self._tasks.append(asyncio.create_task(self._keep(slot, instance), name=f"{slot.name} keeper"))
            self._tasks.append(asyncio.create_task(self._watch(slot, instance.heartbeat.period_s), name=f"{slot.name} watch"))

    async def stop(self) -> None:
        """End every engine. In-flight requests get an error."""
        await end_tasks(self._tasks)
        for stream in self.streams:
            stream.fail(unavailable("the server was stopped"))
        await asyncio.gather(*(slot.instance.stop() for slot in self.slots if slot.instance is not None))

    @property
    def has_engine(self) -> bool:
        """An engine takes requests."""
        return any(slot.is_ready for slot in self.slots)

    @property
    def why_hung(self) -> str | None:
        """Why an engine does not answer; ``None`` if all that are loaded do."""
        return next((slot.hung for slot in self.slots if slot.hung is not None), None)

    def probe(self) -> None:
        """Asks every engine for a sign of life; ``has_engine`` follows within ``heartbeat_s``."""
        for slot in self.slots:
            if slot.instance is not None and slot.is_ready:
                slot.instance.heartbeat.ask()

    @property
    def num_streams(self) -> int:
        return sum(len(slot.streams) for slot in self.slots) + len(self._unassigned)

    @property
    def streams(self) -> list[Stream]:
        return [stream for slot in self.slots for stream in slot.streams.values()] + list(self._unassigned.values())

    async def _load_first(self, slot: Slot) -> Instance:
        """Loads the first engine of ``slot``. One that dies meanwhile is started again. Raises ``InstanceDied`` after ``LOAD_ATTEMPTS``."""
        backoff, attempt = Backoff(), 1
        while True:
            try:
                return await self._load(slot)
            except InstanceDied as death:
                if attempt == LOAD_ATTEMPTS:
                    raise
                self._say(f"{death} while it loaded the model; it is started again (attempt {attempt + 1} of {LOAD_ATTEMPTS})")
                self.metrics.restarted(slot.index)
            await asyncio.sleep(backoff.wait_s(0))
            attempt += 1

    async def _load(self, slot: Slot) -> Instance:
        """An engine for ``slot`` in the state that the others are in."""
        settings = self.settings
        take = partial(self._take, slot)
        instance = Instance(slot.name, settings.engine, settings.threads, take, settings.heartbeat_s, settings.step_s, settings.weight_version)
        try:
            self.info = await instance.start()
            self.metrics.loaded(slot.index, self.info)
            if self.weights.folders:
                await instance.call("start_weight_update")
                for folder in self.weights.folders:
                    await instance.call("update_weights", folder=folder)
            if self.weights.folders or self.weights.source:
                name, arguments = self.weights.call
                await instance.call(name, **arguments)
            if self.block_events is not None:
                await instance.call("record_block_events")
            if self.is_paused:
                await instance.call("pause", mode="recompute")
            if self.is_sleeping:
                await instance.call("sleep")
        except BaseException:
            await instance.stop(grace_s=0)
            raise
        return instance

    async def _keep(self, slot: Slot, instance: Instance) -> None:
        """Replace the slot's engine whenever it dies."""
        while True:
            await instance.died.wait()
            slot.instance = slot.hung = None
            self._say(f"{instance.how}; it is started again")
            if self.block_events is not None:
                self.block_events.lost(slot.index)
            self.metrics.restarted(slot.index)
            self._move(slot, instance.how)
            while slot.instance is None:
                await asyncio.sleep(min(MAX_BACKOFF_S, 2.0**slot.failures - 1))
                slot.failures += 1
                async with self._control:
                    try:
                        instance = slot.instance = await self._load(slot)
                    except (UserError, OSError) as error:
                        self._say(f"{slot.name} could not be started again: {error}")
            self._say(f"{slot.name} is back")
            self._give_unassigned()

    async def _watch(self, slot: Slot, period_s: float) -> None:
        """Notice when the slot's engine does not answer, and when it answers again."""
        while True:
            await asyncio.sleep(period_s)
            instance = slot.instance
            if instance is None:
                continue
            how = instance.heartbeat.tick(bool(slot.streams) or instance.has_calls)
            if how is None:
                continue
            if instance.has_calls:
                # It would run the calls later, when the others are in another state; one that is started again has theirs.
                self._say(f"{slot.name} {how} and a control call waits for it; it is killed")
                kill(instance.process)
                await instance.died.wait()
                continue
            slot.hung = f"{slot.name} {how}"
            self._say(f"{slot.hung}; its requests are ended and it gets none until it answers")
            self._move(slot, slot.hung)
            with contextlib.suppress(RunError):
                # The engine answers this after all that it was given before, whose outputs nobody takes any more.
                await instance.call("abort_requests", ids=None)
                slot.hung = None
                instance.heartbeat.answered(0.0)
                self._say(f"{slot.name} answers again")
                self._give_unassigned()

    def _give_unassigned(self) -> None:
        unassigned, self._unassigned = self._unassigned, {}
        for stream in unassigned.values():
            self._give(stream)

    def _move(self, slot: Slot, how: str) -> None:
        """Give the requests of a dead engine to others, or let them wait for its successor; those of a hung one do not wait."""
        moving, slot.streams, slot.outstanding = slot.streams, {}, 0
        for stream in moving.values():
            if slot.hung is not None and not self.has_engine:
                stream.fail(unavailable(f"{how}; try again", retry_after_s=5))
                self.metrics.failed(slot.index)
            elif stream.attempts >= MAX_ATTEMPTS:
                stream.fail(internal(f"{how}, as did {stream.attempts - 1} engines that had the request before it"))
            elif stream.versions - {self.weights.version}:
                stream.fail(unavailable(f"{how}; the request was begun under weights that were replaced and cannot be repeated"))
            else:
                stream.begin_again()
                self._give(stream)

    # -- requests ------------------------------------------------------------------------------------------------------

    def next_key(self) -> int:
        """The key of a request that brings no seed: their number, so that no two draw the same."""
        self._keys += 1
        return self._keys - 1

    def check_room(self, count: int = 1) -> None:
        """Raise ``ApiError`` where ``count`` more requests cannot be taken."""
        if self.is_sleeping:
            raise unavailable("the engine is asleep")
        if not self.has_engine:
            raise unavailable(self.why_hung or "no engine is ready", retry_after_s=5)
        if self.num_streams + count > self.settings.max_requests:
            raise overloaded(f"the queue is full with {self.settings.max_requests} requests; try again")

    def submit(self, request: EngineRequest, queue: Outputs, preferred: Slot | None = None) -> Stream:
        """Give a request to an engine; what comes of it goes to ``queue``. The caller has checked that there is room. ``preferred``: whose engine has
        the blocks of its prompt."""
        assert self.info is not None
        room = self.info.max_model_len - len(request.prompt_token_ids)
        asked = request.params.get("max_tokens")
        new = max(0, room if asked is None else min(asked, room)) * request.params.get("n", 1)
        context = current()
        if context is not None and context.sampled:
            request = replace(request, traceparent=context.traceparent)
        stream = Stream(request, len(request.prompt_token_ids) + new, queue)
        self._give(stream, preferred)
        return stream

    def least_loaded(self) -> Slot | None:
        """Returns the slot whose engine would get the next request; ``None`` if none is ready."""
        return min((slot for slot in self.slots if slot.takes_requests), key=lambda slot: slot.outstanding, default=None)

    @contextlib.contextmanager
    def named(self, request: EngineRequest) -> Iterator[None]:
        """Knows the client's name of ``request`` before it is submitted, for events of the blocks that are brought for it."""
        self._arriving[request.id] = CLIENT_REQUEST_ID.get()
        try:
            yield
        finally:
            # An engine tells its events behind its answer.
            asyncio.get_running_loop().call_later(_EVENTS_S, self._arriving.pop, request.id, None)

    def check_unused(self, request_id: str) -> None:
        """Raises ``ApiError`` if an in-flight request has that id."""
        if request_id in self._unassigned or any(request_id in slot.streams for slot in self.slots):
            raise invalid(f"request_id {request_id.rpartition('-')[0][:100]!r} is in use; give every request one of its own", "request_id")

    def ids_of(self, names: Sequence[str]) -> list[str]:
        """The ids, within the engines, of what clients know as ``names``: as they gave it, or as they were answered."""
        wanted = {prefix + name for name in names for prefix in ("", "cmpl-", "chatcmpl-")}
        return [stream.request.id for stream in self.streams if stream.request.id.rpartition("-")[0] in wanted]

    def drop(self, stream: Stream) -> None:
        """Aborts the request of ``stream``, whose client has left, and so frees its blocks."""
        self._unassigned.pop(stream.request.id, None)
        for slot in self.slots:
            if slot.remove(stream.request.id) is not None:
                self.metrics.ended(slot.index, stream, None)
                if slot.instance is not None:
                    slot.instance.abort([stream.request.id])

    def _give(self, stream: Stream, preferred: Slot | None = None) -> None:
        slot = preferred if preferred is not None and preferred.takes_requests else self.least_loaded()
        if slot is None:
            self._unassigned[stream.request.id] = stream
            return
        slot.add(stream)
        stream.engine = slot.index
        assert slot.instance is not None
        slot.instance.add(stream.request)

    def _take(self, slot: Slot, step: Step) -> None:
        """Pass on what an engine's step made known."""
        slot.stats = step.stats
        slot.failures = 0
        self.metrics.stepped(slot.index, step.stats)
        if self.block_events is not None and step.block_events:
            self.block_events.take(slot.index, step.block_events, lambda id: self._client_id(slot, id))
        if step.spans:
            receive_spans(step.spans)
        for output in step.outputs:
            stream = slot.streams.get(output.request_id)
            if stream is None:
                continue
            before = stream.outstanding
            tokens = stream.take(output)
            slot.outstanding -= before - stream.outstanding
            self.metrics.produced(slot.index, stream, output, tokens)
            if output.finished:
                slot.remove(output.request_id)
                self.metrics.ended(slot.index, stream, output)
                self._note_prefill(stream, output)
        for request_id, text in step.refused.items():
            self._fail(slot, request_id, invalid(text, _param_of(text)))
        for request_id, text in step.failed.items():
            self._fail(slot, request_id, internal(text))

    def _client_id(self, slot: Slot, request_id: str) -> str:
        """Returns the client's name of a request of an engine, empty if it has none."""
        stream = slot.streams.get(request_id)
        return self._arriving.get(request_id, "") if stream is None else stream.client_id

    def _note_prefill(self, stream: Stream, output: RequestOutput) -> None:
        times, computed = output.times, len(stream.request.prompt_token_ids) - output.num_cached_tokens
        if times is not None and times.scheduled_s and times.first_token_s and computed >= _LEAST_PREFILL_TOKENS:
            self.prefill_rate.note(computed, times.first_token_s - times.scheduled_s)

    def _fail(self, slot: Slot, request_id: str, error: ApiError) -> None:
        stream = slot.remove(request_id)
        if stream is not None:
            stream.fail(error)
            self.metrics.failed(slot.index)

    # -- control -------------------------------------------------------------------------------------------------------

    async def call(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        """A control call to every engine, one such call at a time; their answers in order. An engine that died is left out:
        it comes back in the state of the others."""
        async with self._control:
            return await self._broadcast(name, **arguments)

    def _check_answering(self) -> None:
        """Raise ``ApiError`` for a control call while an engine hangs, which would miss it."""
        if self.why_hung is not None:
            raise unavailable(self.why_hung, retry_after_s=5)

    async def _broadcast(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        self._check_answering()
        alive = [slot.instance for slot in self.slots if slot.instance is not None]
        if not alive:
            raise unavailable("no engine is ready", retry_after_s=5)
        answers = await asyncio.gather(*(instance.call(name, **arguments) for instance in alive), return_exceptions=True)
        results = []
        for answer in answers:
            if isinstance(answer, InstanceDied):
                continue
            if isinstance(answer, BaseException):
                raise answer
            results.append(answer)
        if not results:
            raise unavailable("every engine died before it answered", retry_after_s=5)
        return results

    async def pause(self, mode: str) -> None:
        self._check_answering()
        self.is_paused = True
        if mode == "wait":
            # It may take as long as its longest request, and must not keep anybody from resuming.
            await self._broadcast("pause", mode=mode)
        else:
            await self.call("pause", mode=mode)

    async def resume(self) -> None:
        self._check_answering()
        self.is_paused = False
        with contextlib.suppress(RunError):
            await self._broadcast("resume")

    async def sleep(self) -> None:
        self._check_answering()
        # First, so that nothing new is taken meanwhile.
        self.is_sleeping = True
        try:
            await self.call("sleep")
        except UserError:
            self.is_sleeping = False
            raise

    async def wake_up(self) -> None:
        await self.call("wake_up")
        self.is_sleeping = False

    async def stage(self, weights: Weights) -> bool:
        """Lets every engine stage published ``weights`` beside its steps, so that ``update`` takes little time; returns whether all have. Raises
        ``DamagedWeights`` where they are; the weights in use are not touched. An engine that fails otherwise has nothing staged, and ``update`` says why."""
        if weights.staging is None:
            return False
        name, arguments = weights.staging
        # Requests are computed meanwhile, so other control calls need not wait.
        calls = [slot.instance.call(name, **arguments) for slot in self.slots if slot.instance is not None]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, DamagedWeights):
                raise answer
        return all(isinstance(answer, dict) and answer["is_staged"] for answer in answers)

    async def update(self, weights: Weights) -> list[dict[str, Any]]:
        """Takes ``weights``, which are staged or published, everywhere. Where no engine can take them none does. One that cannot where others could, as
        after a restart in the middle of the update, is replaced by one that starts with them."""
        self._check_answering()
        async with self._control:
            before, self.weights = self.weights, weights
            alive = [slot.instance for slot in self.slots if slot.instance is not None]
            if not alive and weights.source:
                # The next engine begins with them; those before may be gone.
                return []
            name, arguments = weights.call
            calls = [instance.call(name, **arguments) for instance in alive]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            taken = [answer for answer in answers if isinstance(answer, dict)]
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            if not taken:
                self.weights = before
                raise errors[0] if errors else unavailable("no engine is ready", retry_after_s=5)
            for instance, answer in zip(alive, answers, strict=True):
                if isinstance(answer, BaseException):
                    kill(instance.process)
            return taken

    async def update_rolling(self, weights: Weights) -> list[dict[str, Any]]:
        """Takes ``weights``, which are staged, by one engine after the other: each gets nothing new, finishes what it has, takes them and goes on, so that no
        request fails and every request has one version. Requests that no engine takes meanwhile wait. If the first one cannot take them none does; one that
        cannot where others could is replaced by one that starts with them. Raises ``ApiError`` while the engines are paused or asleep."""
        self._check_answering()
        if self.is_paused or self.is_sleeping:
            raise invalid("mode=rolling waits for requests, and the engines are paused or asleep; call /resume or /wake_up first, or take mode=at_once", "mode")
        taken: list[dict[str, Any]] = []
        async with self._control:
            for slot in self.slots:
                slot.is_held = True
                try:
                    while slot.streams and slot.instance is not None:
                        await asyncio.sleep(_LOOK_S)
                    if slot.instance is not None:
                        name, arguments = weights.call
                        taken.append(await slot.instance.call(name, **arguments))
                        # What is started again from now on begins with them.
                        self.weights = weights
                except InstanceDied:
                    continue
                except (UserError, RunError):
                    if not taken:
                        raise
                    if slot.instance is not None:
                        kill(slot.instance.process)
                finally:
                    slot.is_held = False
                    self._give_unassigned()
        if not taken:
            raise unavailable("no engine is ready", retry_after_s=5)
        return taken


def _param_of(text: str) -> str | None:
    """The field that a refusal of the sampling parameters names."""
    words = text.split()
    return words[1] if len(words) > 2 and words[0] == "sampling" else None
