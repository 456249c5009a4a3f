"""Episodes of several turns: the engine samples a turn, tools run while other episodes are sampled, and their results open the next turn.

Token ids go in and token ids come out: the prompt of a turn is the prompt, every token sampled so far and every observation, by their ids. The random
numbers of a turn depend on the seed, the step, the prompt, the index in the group, the turn and the position alone, so that an episode repeated after a
fault draws the same tokens where its tools return the same results.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tandem.engine.processing.outputs import CompletionOutput, Continuation
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.rl.rollout.dispatch import request_key, sample_id, step_of
from tandem.rl.rollout.episode_tools import Answer, EpisodeTools
from tandem.rl.rollout.groups import sampling_params
from tandem.rl.rollout.sampling_engine import SamplingEngine
from tandem.rl.rollout.tool_worker import ToolAnswer
from tandem.runtime.traces.context import SpanContext, current, enter, leave
from tandem.runtime.traces.spans import OpenSpan, begin
from tandem.text.tool_calls import ToolCall, content_before_calls, parse_tool_calls
from tandem.text.tool_turns import Call
from tandem.types import FinishReason, Prompt, RoutedExperts, Sample, WeightVersion
from tandem.types.routed_experts import extended


def _span_below(parent: SpanContext | None) -> OpenSpan | None:
    return None if parent is None else begin("invoke_agent", parent, {"gen_ai.operation.name": "invoke_agent"})


@dataclass(slots=True, eq=False)
class Episode:
    """One episode: sample ``index`` of the group of ``prompt`` at ``step``, sampled with ``settings``. The per-token lists are those of ``Sample``."""

    step: int
    prompt: Prompt
    settings: Mapping[str, Any]
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    versions: list[WeightVersion | None] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    routing: RoutedExperts | None = None
    """Of the tokens that an engine has computed, if it records them."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    fault: str = ""
    budget_left: int | None = None
    """How many tokens the model may still sample in this round of a partial rollout; ``None``: any number."""
    span: OpenSpan | None = None
    """Of an episode that is traced."""

    @classmethod
    def begin(cls, step: int, prompt: Prompt, settings: Mapping[str, Any], index: int) -> "Episode":
        return cls(step, prompt, settings, index, budget_left=int(settings["budget_tokens"]) or None)

    @classmethod
    def resumed(cls, sample: Sample, prompt: Prompt, settings: Mapping[str, Any]) -> tuple["Episode", Continuation | None]:
        """Returns the unfinished episode ``sample`` without the tokens of a turn that is not ended, and those (``None``: its next turn begins)."""
        episode = cls.begin(step_of(sample.id), prompt, settings, sample.index)
        # Two turns have an observation between them.
        sampled = list(sample.is_sampled)
        end = next((place + 1 for place in range(len(sampled) - 1, -1, -1) if not sampled[place]), 0)
        episode.tokens, episode.mask = list(sample.token_ids[:end]), sampled[:end]
        episode.logprobs, episode.sampling_logprobs = list(sample.logprobs[:end]), list(sample.sampling_logprobs[:end])
        episode.versions = list(sample.weight_versions[:end])
        episode.messages = [dict(message) for message in sample.messages]
        if sample.routed_experts is not None:
            # Up to the last token that was sampled: observations after it, the engine has not computed.
            last = max(place for place, was_sampled in enumerate(sampled) if was_sampled)
            episode.routing = sample.routed_experts.first(len(prompt.token_ids) + last)
        episode.turns = sum(message["role"] == "assistant" for message in episode.messages)
        drawn_by = [version for version in sample.weight_versions[end:] if version is not None]
        begun = Continuation(sample.token_ids[end:], sample.logprobs[end:], sample.sampling_logprobs[end:], drawn_by)
        return episode, begun if drawn_by else None

    def add(self, turn: CompletionOutput) -> None:
        """Adds a turn that the model sampled."""
        self.turns += 1
        self.tokens += turn.token_ids
        self.logprobs += turn.raw_logprobs
        self.sampling_logprobs += turn.sampling_logprobs
        self.versions += turn.weight_versions
        self.mask += [True] * len(turn.token_ids)
        self.routing = extended(self.routing, turn.routed_experts)
        self.text = turn.text

    def observe(self, tokens: Sequence[int]) -> None:
        """Adds tokens that the model did not sample."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.sampling_logprobs += [0.0] * len(tokens)
        self.versions += [None] * len(tokens)
        self.mask += [False] * len(tokens)

    def sample(self) -> Sample:
        """Returns the finished episode, or one that waits for the next round; its text is that of the last turn."""
        assert self.finish_reason is not None
        return Sample(
            id=sample_id(self.step, self.prompt.id, self.index),
            prompt_id=self.prompt.id,
            index=self.index,
            prompt_token_ids=self.prompt.token_ids,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            sampling_logprobs=tuple(self.sampling_logprobs),
            weight_versions=tuple(self.versions),
            finish_reason=self.finish_reason,
            text=self.text,
            response_mask=() if all(self.mask) else tuple(self.mask),
            messages=tuple(self.messages),
            fault=self.fault,
            routed_experts=None if self.routing is None else self.routing.first(len(self.prompt.token_ids) + len(self.tokens) - 1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Calls:
    """The calls of the turn that ``episode`` has ended, and the answers, some of which are still computed. ``last_token``: of the turn."""

    episode: Episode
    calls: Sequence[Call]
    answers: Sequence[Answer]
    last_token: int | None

    def running(self) -> list["Future[ToolAnswer]"]:
        return [answer for answer in self.answers if isinstance(answer, Future) and not answer.done()]


class InFlightEpisodes:
    """The groups of episodes that ``engine`` draws, with the interface of ``InFlightGroups``. Tools run while other episodes are sampled. ``parent``: returns
    the span that an episode which begins now is recorded below."""

    def __init__(self, engine: SamplingEngine, tools: EpisodeTools, parent: Callable[[], SpanContext | None] = current) -> None:
        self._engine, self._tools, self._parent = engine, tools, parent
        self._groups: dict[int, list[Episode]] = {}
        """The unfinished groups, by the order in which they were added."""
        self._requests: dict[str, list[Episode]] = {}
        self._begun: dict[str, int] = {}
        """The tokens of the turn that an earlier round has drawn, by request."""
        self._waiting: list[_Calls] = []
        self._ended: list[Episode] = []
        self._added = 0

    def add(self, step: int, prompts: Sequence[Prompt], settings: Mapping[str, Any], unfinished: Sequence[Sample] = ()) -> None:
        """Queues a group of ``settings["n"]`` episodes for each of ``prompts``; of a prompt that has ``unfinished`` episodes, only those, which are continued.
        With a ``budget_tokens`` above 0 the model samples at most as many tokens of each. Raises ``UserError`` for one that the engine cannot serve, before
        any is queued."""
        params = sampling_params(settings)
        for prompt in prompts:
            self._engine.check_request(prompt.token_ids, params)
        for prompt in prompts:
            rest = [Episode.resumed(sample, prompt, settings) for sample in unfinished if sample.prompt_id == prompt.id]
            # The first turns are one request, which computes the prompt once.
            group = [episode for episode, _ in rest] or [Episode.begin(step, prompt, settings, index) for index in range(settings["n"])]
            self._groups[self._added] = group
            for episode in group:
                episode.span = _span_below(self._parent())
            for episode, begun in rest:
                self._ask_alone(episode, settings["max_tokens"] - len(episode.tokens), begun)
            if not rest:
                self._ask(group, prompt.token_ids, replace(params, max_tokens=_within(settings["max_tokens"], group[0].budget_left)), turn=0)

    def draw(
        self, waits_for: Literal["any", "all"], on_progress: Callable[[int, int], None], on_samples: Callable[[Sequence[Sample]], None] | None = None
    ) -> list[Sample]:
        """Runs the engine and the tools until any group, or all of them, are finished; returns their samples in the order in which the groups were added.
        Calls ``on_progress`` with the numbers of groups finished and asked for, and ``on_samples`` with each sample as soon as it is finished."""
        total, finished, turns = len(self._groups), dict[int, list[Episode]](), list[tuple[str, CompletionOutput]]()
        self._engine.listen(lambda name, completion: turns.append((name, completion)))
        while self._groups and (waits_for == "all" or not finished):
            if self._requests:
                outputs = self._engine.step()
                for name, turn in turns:
                    self._end_turn(self._requests[name][turn.index], turn, self._begun[name])
                turns.clear()
                for output in outputs:
                    del self._requests[output.request_id], self._begun[output.request_id]
            else:
                wait([answer for calls in self._waiting for answer in calls.running()], return_when=FIRST_COMPLETED)
            ready = [calls for calls in self._waiting if not calls.running()]
            self._waiting = [calls for calls in self._waiting if calls not in ready]
            for calls in ready:
                self._next_turn(calls)
            if self._ended and on_samples is not None:
                on_samples([episode.sample() for episode in self._ended])
            self._ended = []
            done = [number for number, group in self._groups.items() if all(episode.finish_reason is not None for episode in group)]
            finished |= {number: self._groups.pop(number) for number in done}
            if done:
                on_progress(len(finished), total)
        self._engine.listen(None)
        return [episode.sample() for number in sorted(finished) for episode in finished[number]]

    def drop(self) -> None:
        """Aborts what is unfinished. Tools that run end by themselves; nobody reads what they return."""
        for name in self._requests:
            self._engine.abort(name)
        self._engine.take_outputs()
        self._groups, self._requests, self._begun, self._waiting, self._ended = {}, {}, {}, [], []

    def _ask_alone(self, episode: Episode, room: int, begun: Continuation | None = None) -> None:
        """Asks for the next turn of ``episode``, of at most ``room`` tokens, or for the rest of the one that was ``begun``."""
        known = len(begun.token_ids) if begun is not None else 0
        budget = None if episode.budget_left is None else episode.budget_left + known
        params = sampling_params({**episode.settings, "n": 1, "max_tokens": _within(room, budget)})
        with _within_span(episode):
            self._ask([episode], [*episode.prompt.token_ids, *episode.tokens], params, episode.turns, begun)

    def _ask(
        self, episodes: list[Episode], tokens: Sequence[int], params: SamplingParams, turn: int, continues: Continuation | None = None
    ) -> None:
        first = episodes[0]
        name = f"episode-{self._added}"
        self._added += 1
        key = request_key(first.step, first.prompt.id, first.settings["purpose"], turn)
        self._engine.add_request(name, tokens, params, key=key, first_index=first.index, continues=continues)
        self._requests[name] = episodes
        self._begun[name] = len(continues.token_ids) if continues is not None else 0

    def _end(self, episode: Episode, reason: FinishReason) -> None:
        episode.finish_reason = reason
        self._ended.append(episode)
        if episode.span is not None:
            name = sample_id(episode.step, episode.prompt.id, episode.index)
            episode.span.update({"tandem.sample": name, "tandem.turns": episode.turns, "gen_ai.response.finish_reason": reason.value})
            episode.span.error = episode.fault
            episode.span.end()

    def _end_turn(self, episode: Episode, turn: CompletionOutput, begun: int) -> None:
        """Adds ``turn`` to ``episode``, which has ended with it, whose calls begin, or whose budget is used up. ``begun``: its tokens of earlier rounds."""
        episode.add(turn)
        tools, parser, reason = self._tools, self._tools.config.tool_call_parser, FinishReason(str(turn.finish_reason))
        if episode.budget_left is not None:
            episode.budget_left -= len(turn.token_ids) - begun
            if reason is FinishReason.LENGTH and len(episode.tokens) < episode.settings["max_tokens"]:
                episode.turns -= 1
                self._end(episode, FinishReason.ABORT)
                return
        last = turn.token_ids[-1] if turn.token_ids else None
        written = turn.token_ids[:-1] if last in tools.turns.ends else turn.token_ids
        tokenizer = tools.turns.tokenizer
        # A model may have more ids than its tokenizer.
        raw = tokenizer.decode([token for token in written if token < tokenizer.vocab_size], skip_special_tokens=False)
        calls = parse_tool_calls(parser, raw) if reason is FinishReason.STOP else []
        if not calls:
            episode.messages.append({"role": "assistant", "content": turn.text})
            self._end(episode, reason)
            return
        names = [call.name if call.name in tools.tools else "unknown" for call in calls]
        known = [Call(name, call.id or f"call{episode.turns % 100:02}{i % 1000:03}") for i, (name, call) in enumerate(zip(names, calls, strict=True))]
        episode.messages.append(_calling_message(content_before_calls(parser, raw), calls, known))
        if episode.turns == tools.config.max_turns:
            self._end(episode, FinishReason.LENGTH)
            return
        with _within_span(episode):
            answers = [tools.begin(call, each.id) for call, each in zip(calls, known, strict=True)]
        self._waiting.append(_Calls(episode, known, answers, last))

    def _next_turn(self, waited: _Calls) -> None:
        """Continues an episode with the results of its calls, or ends it: a broken tool masks it, and an episode without room for a further token is
        truncated before the results."""
        episode, tools = waited.episode, self._tools
        answers = [answer.result() if isinstance(answer, Future) else answer for answer in waited.answers]
        broken = next((number for number, answer in enumerate(answers) if answer.fault), None)
        if broken is not None:
            episode.fault = f"tool '{waited.calls[broken].name}': {answers[broken].fault}"
            self._end(episode, FinishReason.ABORT)
            return
        results = [tools.results.shown(answer.text) for answer in answers]
        observation = tools.turns.between(waited.calls, results, waited.last_token)
        room = episode.settings["max_tokens"] - len(episode.tokens) - len(observation)
        if room <= 0:
            self._end(episode, FinishReason.LENGTH)
            return
        episode.observe(observation)
        for call, result in zip(waited.calls, results, strict=True):
            episode.messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result})
        if episode.budget_left == 0:
            self._end(episode, FinishReason.ABORT)
        else:
            self._ask_alone(episode, room)


@contextlib.contextmanager
def _within_span(episode: Episode) -> Iterator[None]:
    """Inside, what is asked for belongs to the episode's span: nothing where it has none."""
    token = enter(None if episode.span is None else episode.span.context)
    try:
        yield
    finally:
        leave(token)


def _within(room: int, budget: int | None) -> int:
    return room if budget is None else min(room, budget)


def _calling_message(content: str, calls: Sequence[ToolCall], known: Sequence[Call]) -> dict[str, Any]:
    functions = [
        {"type": "function", "id": each.id, "function": {"name": call.name, "arguments": dict(call.arguments)}} for call, each in zip(calls, known, strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": functions}
