"""``AsyncLLM``: an engine in a process of its own, for programs that are asynchronous, with vLLM's interface."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tandem.config.engine import EngineArgs
from tandem.engine.llm_inputs import PromptInput, prompts_of
from tandem.engine.llm_traces import begun, open_exporter
from tandem.engine.lora.request import LoRARequest
from tandem.engine.pooling.params import PoolingParams, PoolingTask
from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
from tandem.model.huggingface.pooling_config import read_pooling
from tandem.runtime.process.processes import available_cores
from tandem.runtime.rpc.traced import receive_spans
from tandem.serving.engines.instance import Instance
from tandem.serving.engines.messages import EngineInfo, EngineRequest, Step
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, UserError
from tandem.types.one_line import describe

if TYPE_CHECKING:
    from tandem.engine.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )

T = TypeVar("T")
Deliver = Callable[[RequestOutput | UserError], None]

HEARTBEAT_S, STEP_S = 30.0, 600.0
SHUT_DOWN = "this AsyncLLM is shut down; create a new one"


class AsyncLLM:
    """An engine whose requests are asynchronous generators::

        engine = AsyncLLM.from_engine_args(EngineArgs(model="runs/sort/model"))
        try:
            async for output in engine.generate("3142=", SamplingParams(max_tokens=16), request_id="0"):
                print(output.outputs[0].text)
        finally:
            engine.shutdown()

    Requests of any number of tasks are computed together. The engine has a process of its own, so a step never blocks the event loop; it may be
    used from several event loops, one after the other or in several threads.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        """Starts the engine and waits until it has loaded the model. With ``otlp_traces_endpoint`` each request is the span ``generate`` of this process, with
        the engine's ``llm_request`` below it. Raises ``UserError`` if the model cannot be loaded."""
        self._engine_args = engine_args
        self._exporter = open_exporter(engine_args.traces)
        self._streams: dict[str, Deliver] = {}
        """By the engine's names of requests, which differ for two requests with one id, of which one was aborted."""
        self._names: dict[str, str] = {}
        """The engine's names of unfinished requests by their ids."""
        self._keys = itertools.count()
        self._numbers = itertools.count()
        self._why_stopped: str | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="AsyncLLM", daemon=True)
        self._thread.start()
        try:
            self._instance, self._info = self._wait(self._start(engine_args))
        except BaseException:
            self._end_thread()
            if self._exporter is not None:
                self._exporter.close()
            raise
        folder = self._info.tokenizer_folder
        self._tokenizer = None if folder is None else Tokenizer.from_folder(folder)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Returns an engine with the options ``engine_args``. Raises ``UserError``."""
        return cls(engine_args)

    async def generate(
        self, prompt: PromptInput, sampling_params: SamplingParams, request_id: str, *, lora_request: LoRARequest | None = None, priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a request; the last is ``finished``. Ending the iteration earlier aborts the request.

        Args:
            prompt: A text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``, optionally with ``cache_salt``.
            sampling_params: ``output_kind`` says what each output holds: all tokens so far (``CUMULATIVE``, the default), the new ones
                (``DELTA``), or nothing before the end (``FINAL_ONLY``). With a ``seed`` the completions are those that
                ``LLM.generate`` returns for this prompt alone.
            request_id: Unique among unfinished requests.
            lora_request: The adapter; loaded if it is not.
            priority: Lower values are scheduled first.
            trace_headers: With a W3C ``traceparent``, the request belongs to that trace, and is recorded if its sender says so; without one it begins a
                trace. Needs ``otlp_traces_endpoint`` of ``EngineArgs``.

        Raises:
            UserError: The request cannot be served.
            RunError: The engine has been shut down, or its process has died.
        """
        limit = self._info.max_model_len if sampling_params.truncate_prompt_tokens is None else None
        ((text, tokens, salt),) = await asyncio.to_thread(prompts_of, [prompt], self._tokenizer, limit)
        request = EngineRequest(
            id="", prompt_token_ids=tokens, params=_plain(sampling_params), stream=True, cache_salt=salt, priority=priority,
            key=0 if sampling_params.seed is not None else next(self._keys), adapter=_adapter(lora_request),
        )  # fmt: skip
        traced = None if self._exporter is None else begun("generate", trace_headers)
        if traced is not None:
            traced.update({"gen_ai.request.id": request_id, "gen_ai.operation.name": "text_completion"})
            request = replace(request, traceparent=traced.context.traceparent)
        try:
            async with contextlib.aclosing(self._outputs(request_id, request)) as outputs:
                async for output in outputs:
                    yield replace(output, prompt=text)
        except Exception as error:
            if traced is not None:
                traced.error = describe(error)
            raise
        finally:
            if traced is not None:
                traced.end()

    async def encode(
        self, prompt: PromptInput, pooling_params: PoolingParams, request_id: str, *, lora_request: LoRARequest | None = None, priority: int = 0,
    ) -> "AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]":
        """Yields what a model that embeds or scores texts makes of ``prompt``, once. The arguments are those of ``generate``, and ``pooling_params`` those of
        ``LLM.encode``, whose bits these are. Raises ``UserError`` too if the model generates text, or the request was aborted."""
        from tandem.engine.pooling import llm_pooling  # It imports torch, which a program that generates text does not need.

        ((_, tokens, salt),) = await asyncio.to_thread(prompts_of, [prompt], self._tokenizer, self._info.max_model_len)
        request = EngineRequest(
            id="", prompt_token_ids=tokens, params={"max_tokens": 0}, stream=False, cache_salt=salt, priority=priority, key=0,
            adapter=_adapter(lora_request), pooling={field.name: getattr(pooling_params, field.name) for field in fields(pooling_params)},
        )  # fmt: skip
        async with contextlib.aclosing(self._outputs(request_id, request)) as outputs:
            async for output in outputs:
                yield llm_pooling.pooled_output(output)

    async def embed(self, prompt: PromptInput, request_id: str, pooling_params: PoolingParams | None = None, **options: Any) -> "EmbeddingRequestOutput":
        """Returns the vector of ``prompt``, in ``outputs.embedding``. ``options``: ``lora_request`` and ``priority`` of ``encode``."""
        from tandem.engine.pooling import llm_pooling

        return llm_pooling.as_embedding(await self._pooled(prompt, request_id, pooling_params, "embed", options))

    async def classify(
        self, prompt: PromptInput, request_id: str, pooling_params: PoolingParams | None = None, **options: Any
    ) -> "ClassificationRequestOutput":
        """Returns the scores of ``prompt``, in ``outputs.probs``. The arguments are those of ``embed``."""
        from tandem.engine.pooling import llm_pooling

        return llm_pooling.as_classification(await self._pooled(prompt, request_id, pooling_params, "classify", options))

    async def score(
        self, data_1: str, data_2: str, request_id: str, pooling_params: PoolingParams | None = None, *, chat_template: str | None = None, **options: Any
    ) -> "ScoringRequestOutput":
        """Returns how well two texts belong together, in ``outputs.score``, as ``LLM.score`` does. The other arguments are those of ``embed``."""
        from tandem.engine.pooling import llm_pooling

        found = await asyncio.to_thread(read_pooling, Path(self._info.model_folder), self._engine_args)
        if found is not None and found.scored_by is None:
            asked = ((data_1, f"{request_id}-1"), (data_2, f"{request_id}-2"))
            return llm_pooling.as_similarity(*await asyncio.gather(*(self._pooled(text, name, pooling_params, "embed", options) for text, name in asked)))
        prompt: PromptInput = data_1
        if found is not None:
            pair, folder = [(data_1, data_2)], Path(self._info.tokenizer_folder or "")
            (prompt,) = await asyncio.to_thread(llm_pooling.prompts_of_pairs, found, folder, await self.get_tokenizer(), pair, chat_template)
        # A model that generates text refuses its prompt.
        return llm_pooling.as_score(await self._pooled(prompt, request_id, pooling_params, "classify", options))

    async def _pooled(
        self, prompt: PromptInput, request_id: str, pooling_params: PoolingParams | None, task: PoolingTask, options: Mapping[str, Any]
    ) -> "PoolingRequestOutput[PoolingOutput]":
        from tandem.engine.pooling import llm_pooling

        (params,) = llm_pooling.params_for(pooling_params, 1, task)
        (output,) = [output async for output in self.encode(prompt, params, request_id, **options)]
        return output

    async def _outputs(self, request_id: str, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of ``request``, which gets a name of its own; aborts it if the iteration ends earlier."""
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | UserError]()

        def deliver(output: RequestOutput | UserError) -> None:
            with contextlib.suppress(RuntimeError):  # The caller's event loop has ended meanwhile.
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        name = f"{request_id}-{next(self._numbers)}"
        is_over = False
        try:
            await self._ask(self._add(request_id, replace(request, id=name), deliver))
            while not is_over:
                output = await outputs.get()
                is_over = isinstance(output, UserError) or output.finished
                if isinstance(output, UserError):
                    raise output
                yield replace(output, request_id=request_id, prompt_token_ids=request.prompt_token_ids)
        finally:
            if not is_over and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._drop, name)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Aborts requests; their generators end with the tokens so far and ``finish_reason`` ``abort``."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._ask(self._abort(ids))

    async def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ``UserError`` if there is none."""
        if self._tokenizer is None:
            raise UserError("this engine has no tokenizer; give one, or token ids")
        return self._tokenizer

    async def reset_prefix_cache(self) -> None:
        """Empties the prefix cache."""
        await self._ask(self._call("reset_prefix_cache"))

    async def sleep(self) -> None:
        """Frees the memory of the KV cache; requests wait until ``wake_up``."""
        await self._ask(self._call("sleep"))

    async def wake_up(self) -> None:
        """Allocates the KV cache again."""
        await self._ask(self._call("wake_up"))

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return self._why_stopped is None

    def shutdown(self) -> None:
        """Ends the engine's process. Unfinished requests raise ``RunError``. May be called twice."""
        if self._loop.is_closed():
            return
        self._wait(self._stop())
        self._end_thread()
        if self._exporter is not None:
            self._exporter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- between the caller's thread and the engine's -------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise RunError(SHUT_DOWN)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    async def _start(self, engine_args: EngineArgs) -> tuple[Instance, EngineInfo]:
        instance = Instance("the engine", engine_args, available_cores(), self._take, HEARTBEAT_S, STEP_S)
        try:
            info = await instance.start()
        except BaseException:
            await instance.stop(grace_s=0)
            raise
        self._watch = asyncio.create_task(self._tell_of_death(instance))
        return instance, info

    async def _tell_of_death(self, instance: Instance) -> None:
        await instance.died.wait()
        self._fail_all(f"{instance.how}; create a new AsyncLLM")

    async def _add(self, request_id: str, request: EngineRequest, deliver: Deliver) -> None:
        if self._why_stopped is not None:
            raise RunError(self._why_stopped)
        if request_id in self._names:
            raise UserError(f"request id {request_id!r} is in use; give every request an id of its own")
        self._names[request_id], self._streams[request.id] = request.id, deliver
        self._instance.add(request)

    async def _abort(self, ids: list[str]) -> None:
        self._instance.abort([self._names[each] for each in ids if each in self._names])

    def _remove(self, name: str) -> Deliver | None:
        """Removes and returns the stream of a request."""
        deliver = self._streams.pop(name, None)
        if deliver is not None:
            del self._names[name.rpartition("-")[0]]
        return deliver

    def _drop(self, name: str) -> None:
        if self._remove(name) is not None:
            self._instance.abort([name])

    async def _call(self, name: str) -> None:
        if self._why_stopped is not None:
            raise RunError(self._why_stopped)
        await self._instance.call(name)

    def _take(self, step: Step) -> None:
        if step.spans:
            receive_spans(step.spans)
        for output in step.outputs:
            deliver = self._remove(output.request_id) if output.finished else self._streams.get(output.request_id)
            if deliver is not None:
                deliver(output)
        failures: dict[str, UserError] = {name: UserError(text) for name, text in step.refused.items()}
        failures |= {name: RunError(text) for name, text in step.failed.items()}
        for name, error in failures.items():
            if (deliver := self._remove(name)) is not None:
                deliver(error)

    def _fail_all(self, why: str) -> None:
        self._why_stopped = self._why_stopped or why
        streams, self._streams, self._names = self._streams, {}, {}
        for deliver in streams.values():
            deliver(RunError(self._why_stopped))

    async def _stop(self) -> None:
        self._watch.cancel()
        self._fail_all(SHUT_DOWN)
        await self._instance.stop()


def _adapter(request: LoRARequest | None) -> list[Any] | None:
    return None if request is None else [request.lora_name, request.lora_int_id, request.lora_path]


def _plain(params: SamplingParams) -> dict[str, Any]:
    """Returns ``params`` as the keyword arguments of an ``EngineRequest``."""
    given: dict[str, Any] = {field.name: value for field in fields(params) if (value := getattr(params, field.name)) != field.default}
    given["output_kind"] = (params.output_kind or RequestOutputKind.CUMULATIVE).name
    if params.structured_outputs is not None:
        given["structured_outputs"] = asdict(params.structured_outputs)
    if params.repetition_detection is not None:
        given["repetition_detection"] = asdict(params.repetition_detection)
    if params.logit_bias is not None:
        given["logit_bias"] = list(params.logit_bias.items())
    return given
