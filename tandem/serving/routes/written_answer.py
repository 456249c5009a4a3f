"""One answer to a conversation, in the form that a writer gives it, whole or as a stream of named events."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tandem.engine.processing.outputs import RequestOutput
from tandem.serving.chat_request import ready_chat
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.errors import ApiError
from tandem.serving.forms.answer import Answer, AnswerStream
from tandem.serving.log_lines import USAGE, Usage
from tandem.serving.protocol import ChatCompletionRequest
from tandem.serving.routes.adapters import adapter_meta
from tandem.serving.sessions import answers, begin, each, sse, submitted, while_connected
from tandem.serving.state import ServerState
from tandem.serving.weight_versions import WeightVersions
from tandem.text.answer_events import Event
from tandem.types import UserError


class Writer(Protocol):
    """The form of an answer. ``whole`` is there after ``finish``."""

    whole: dict[str, Any]

    def begin(self, prompt: int) -> Iterator[dict[str, Any]]: ...

    def take(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]: ...

    def finish(self, answer: Answer) -> Iterator[dict[str, Any]]: ...

    def failed(self, error: ApiError) -> dict[str, Any]: ...


@dataclass
class WrittenAnswer:
    """The request ``asked``, its answer so far, and who writes it. ``done`` is called with the whole answer."""

    state: ServerState
    asked: EngineRequest
    writer: Writer
    stream: AnswerStream
    done: Callable[[Answer], None]
    usage: Usage
    answer: Answer = field(default_factory=Answer)
    versions: WeightVersions = field(default_factory=WeightVersions)

    def take(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yields the events for a further ``output`` of the engine."""
        self.versions.take(output, self.state.pool.weights.version)
        for completion in output.outputs:
            events = self.stream.take(completion.text, completion.finish_reason is not None)
            self.answer.add(events)
            self.answer.completion += len(completion.token_ids)
            yield from self.writer.take(events)
            if completion.finish_reason is not None:
                self.answer.finish_reason = self.stream.finish_reason(completion.finish_reason)
                self.answer.stop_text = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        self.usage.completion = self.answer.completion
        if output.finished:
            self.answer.cached = self.usage.cached = output.num_cached_tokens
            if self.answer.reasoning_parts:
                # A character that is cut in two cannot be encoded by every tokenizer.
                with contextlib.suppress(UserError):
                    self.answer.thought = len(self.state.tokenizer.encode(self.answer.reasoning))
            yield from self.writer.finish(self.answer)
            self.done(self.answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the stream. The first event is there when nothing can be refused any more."""
        has_begun = False
        with submitted(self.state.pool, [self.asked]) as (streams, queue):
            try:
                async for _, output in each(queue, len(streams)):
                    opening = () if has_begun else self.writer.begin(self.answer.prompt)
                    parts = [sse(event, event["type"]) for events in (opening, self.take(output)) for event in events]
                    has_begun = True
                    if parts:
                        yield b"".join(parts)
            except ApiError as error:
                if not has_begun:
                    raise
                failed = self.writer.failed(error)
                yield sse(failed, failed["type"])


async def write_answer(
    state: ServerState, chat: ChatCompletionRequest, request: Request, id: str, writer: Writer, *, stream: bool, done: Callable[[Answer], None]
) -> Response:
    """Returns the answer to ``chat``, which ``writer`` writes. Raises ``ApiError``."""
    adapter = state.check_model(chat.model)
    ready = await ready_chat(state, chat, request)
    asked = EngineRequest(
        id=f"{id}-0", prompt_token_ids=ready.prompt, params=ready.params, stream=stream, key=0 if chat.seed is not None else state.pool.next_key(),
        priority=chat.priority or 0, cache_salt=chat.cache_salt or "", adapter=adapter_meta(adapter),
    )  # fmt: skip
    usage = request.scope.get(USAGE, Usage())
    usage.prompt = len(ready.prompt)
    written = WrittenAnswer(state, asked, writer, AnswerStream(ready.plan), done, usage, Answer(prompt=len(ready.prompt)))
    if stream:
        return await begin(request, written.events(), lambda: written.versions.header)
    (output,) = await while_connected(request, answers(state.pool, [asked]))
    for _ in written.take(output):
        pass
    return JSONResponse(writer.whole, headers=written.versions.header)
