"""A session: what the model was asked and answered in one run of an agent on one prompt."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.engine.processing.outputs import CompletionOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.rl.agents.conversations import Conversations
from tandem.rl.agents.model_calls import ModelCall, trajectories
from tandem.rl.rollout.dispatch import model_call_key, request_key, sample_id
from tandem.rl.rollout.groups import sampling_params
from tandem.runtime.traces.context import current
from tandem.text.messages import Message, plain_message
from tandem.types import FinishReason, Prompt, RoutedExperts, Sample, UserError, WeightVersion
from tandem.types.routed_experts import extended


class TooLong(UserError):
    """Raised for a request that has no room for a further token."""


class SessionEnded(Exception):
    """Raised for a request of an episode that has ended, and set in those that were unanswered then."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request that the model is to answer. ``key``: of its random numbers. ``completion`` is set by the engine's loop."""

    session: "Session"
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    prompt: list[int]
    parent: ModelCall | None
    params: SamplingParams
    key: int
    is_text: bool = False
    completion: "Future[CompletionOutput]" = field(default_factory=Future)


class Session:
    """Episode ``index`` of the group of ``prompt`` at ``step``, sampled with ``settings``. ``context``: tokens that a request and its answer may have.
    Thread-safe."""

    def __init__(self, conversations: Conversations, step: int, prompt: Prompt, index: int, settings: Mapping[str, Any], context: int) -> None:
        self.step, self.prompt, self.index = step, prompt, index
        self._conversations, self._settings, self._context = conversations, settings, context
        self._lock = threading.Lock()
        self._calls: list[ModelCall] = []
        self._asked: dict[Asked, None] = {}
        self._repeats: Counter[tuple[int, ...]] = Counter()
        self._responses: dict[str, Sequence[Message]] = {}
        self._is_cut = False
        """Whether a request found no room."""
        self.is_closed = False
        self.trace = current()
        """The span of the episode, ``None`` where it is not traced."""

    @property
    def name(self) -> str:
        """The id of the sample."""
        return sample_id(self.step, self.prompt.id, self.index)

    @property
    def seed(self) -> int:
        """The seed of the agent's own random numbers."""
        return request_key(self.step, self.prompt.id, f"{self._settings['purpose']} agent", self.index) ^ int(self._settings["seed"])

    def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Asked:
        """Returns the request for the model's turn after ``messages``. It is drawn with the settings of the run, so that it can be learned from, and ends
        after ``max_tokens`` or at one of the texts ``stop`` too. Raises ``UserError``, ``TooLong`` and ``SessionEnded``."""
        plain = [plain_message(message, number) for number, message in enumerate(messages)]
        with self._lock:
            prompt, parent = self._conversations.prompt(plain, tools, self._calls)
            return self._asked_for(plain, tools, prompt, parent, max_tokens, stop)

    def ask_text(self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()) -> Asked:
        """Returns the request for what the model writes after the plain ``prompt``, as ``ask`` does for messages."""
        with self._lock:
            tokens, parent = self._conversations.text_prompt(prompt, self._calls)
            begun = len(parent.read) if parent is not None else 0
            earlier = [*parent.messages, parent.answer] if parent is not None else []
            size = self._conversations.tokenizer.vocab_size
            text = self._conversations.tokenizer.decode([token for token in tokens[begun:] if token < size], skip_special_tokens=False)
            messages = [*earlier, {"role": "user", "content": text}]
            return self._asked_for(messages, [], tokens, parent, max_tokens, stop, is_text=True)

    def count(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        """Returns the number of tokens that the model would read for ``messages``. Raises ``UserError``."""
        with self._lock:
            return len(self._conversations.prompt([plain_message(message, number) for number, message in enumerate(messages)], tools, self._calls)[0])

    def name_response(self, id: str, conversation: Sequence[Message]) -> None:
        """Gives ``conversation``, which an answer ends, the name ``id``, by which a later request may continue it."""
        with self._lock:
            self._responses[id] = conversation

    def response(self, id: str) -> Sequence[Message] | None:
        """Returns the conversation that ends with the answer ``id``."""
        with self._lock:
            return self._responses.get(id)

    def _asked_for(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt: list[int], parent: ModelCall | None, max_tokens: int | None,
        stop: Sequence[str], *, is_text: bool = False,
    ) -> Asked:
        """Returns the request for ``prompt``, which continues ``parent``. Called under the lock."""
        if self.is_closed:
            raise SessionEnded
        begun = len(prompt) - len(_first(parent).prompt) if parent is not None else 0
        room = min(self._settings["max_tokens"] - begun, self._context - len(prompt))
        if room <= 0:
            self._is_cut = True
            raise TooLong(
                f"this request has {len(prompt)} tokens, {begun} of them after the first request of its conversation; the context has {self._context} and "
                f"rollout.max_tokens is {self._settings['max_tokens']}"
            )
        stops = [*self._settings["stop"], *(text for text in stop if text not in self._settings["stop"])]
        limit = room if max_tokens is None else min(max_tokens, room)
        params = sampling_params({**self._settings, "n": 1, "max_tokens": limit, "stop": stops})
        place = tuple(prompt)
        key = model_call_key(self.step, self.prompt.id, self._settings["purpose"], prompt, self._repeats[place])
        self._repeats[place] += 1
        asked = Asked(self, messages, tools, prompt, parent, params, key, is_text)
        self._asked[asked] = None
        return asked

    def record(self, asked: Asked, completion: CompletionOutput) -> ModelCall:
        """Returns the call that ``completion`` answers, after it was added to the episode. Raises ``SessionEnded``."""
        turn, parent = 0, asked.parent
        while parent is not None:
            turn, parent = turn + 1, parent.parent
        reason = str(completion.finish_reason)
        answer, tool_calls = self._conversations.answer(completion.token_ids, completion.text, reason, asked.tools, turn)
        stop_text = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        with self._lock:
            if self.is_closed:
                raise SessionEnded
            del self._asked[asked]
            call = ModelCall(
                asked.messages, asked.tools, answer, tool_calls, asked.prompt, completion.token_ids, completion.raw_logprobs, completion.sampling_logprobs,
                completion.weight_versions, reason, completion.text, asked.parent, len(self._calls),
                stop_text, asked.is_text, completion.routed_experts,
            )  # fmt: skip
            self._calls.append(call)
            return call

    def forget(self, asked: Asked) -> None:
        """Drops a request whose client has left before its answer, which it asks for again."""
        with self._lock:
            if asked in self._asked:
                del self._asked[asked]
                self._repeats[tuple(asked.prompt)] -= 1

    def close(self) -> None:
        """Ends the episode: later requests are refused, and unanswered ones are dropped."""
        with self._lock:
            self.is_closed = True
            asked, self._asked = list(self._asked), {}
        for each in asked:
            if not each.completion.done():
                each.completion.set_exception(SessionEnded())

    def sample(self, text: str | None, fault: str, outcome: Mapping[str, float] | None = None) -> Sample:
        """Returns the episode, which has ended: its text is the agent's answer ``text``, or without one that of its last call. ``fault``: why the agent did
        not return; after a request that found no room the episode is truncated instead. ``outcome``: the numbers that the agent returned."""
        name, is_cut = self.name, self._is_cut and bool(fault)
        if not self._calls:
            fault = fault or "the agent returned without a request to the model"
            return Sample(name, self.prompt.id, self.index, self.prompt.token_ids, (), (), (), (), FinishReason.ABORT, "", fault=fault)
        formed = trajectories(self._calls)
        last = formed[0].calls[-1]
        reason = FinishReason.LENGTH if is_cut else FinishReason.ABORT if fault else FinishReason(last.finish_reason)
        fault = "" if is_cut else fault
        sequences = []
        for number, trajectory in enumerate(formed):
            tokens, logprobs, sampling, versions, mask = _tokens(trajectory.calls)
            sequences.append(
                Sample(
                    id=name if number == 0 else f"{name}/{number}",
                    prompt_id=self.prompt.id,
                    index=self.index,
                    prompt_token_ids=tuple(trajectory.prompt),
                    token_ids=tokens,
                    logprobs=logprobs,
                    sampling_logprobs=sampling,
                    weight_versions=versions,
                    finish_reason=reason,
                    text=last.text if text is None else text,
                    response_mask=() if all(mask) else mask,
                    messages=tuple(trajectory.new_messages),
                    fault=fault,
                    routed_experts=_routing(trajectory.calls),
                )
            )
        return replace(sequences[0], outcome=outcome or {}, branches=tuple(sequences[1:]))


def _first(call: ModelCall) -> ModelCall:
    while call.parent is not None:
        call = call.parent
    return call


def _routing(calls: Sequence[ModelCall]) -> RoutedExperts | None:
    """Returns the routing of a trajectory, in which each token has the experts of the call that computed it first; ``None``: none was recorded."""
    routing: RoutedExperts | None = None
    for call in calls:
        routing = extended(routing, call.routed_experts)
    return routing


_Tokens = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], tuple[WeightVersion | None, ...], tuple[bool, ...]]


def _tokens(calls: Sequence[ModelCall]) -> _Tokens:
    """Returns the tokens of a trajectory after its prompt: ids, log-probabilities, those in the sampling distribution, versions, and which were sampled."""
    tokens: list[int] = []
    logprobs: list[float] = []
    sampling: list[float] = []
    versions: list[WeightVersion | None] = []
    mask: list[bool] = []
    for number, call in enumerate(calls):
        between = call.prompt[len(calls[number - 1].read) :] if number else []
        tokens += [*between, *call.token_ids]
        logprobs += [*[0.0] * len(between), *call.logprobs]
        sampling += [*[0.0] * len(between), *call.sampling_logprobs]
        versions += [*[None] * len(between), *call.weight_versions]
        mask += [*[False] * len(between), *[True] * len(call.token_ids)]
    return tuple(tokens), tuple(logprobs), tuple(sampling), tuple(versions), tuple(mask)
