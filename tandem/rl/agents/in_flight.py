"""Episodes of an agent: it runs in a process of its own and calls the model over HTTP, and the engine answers the calls of all episodes together.

The random numbers of a call depend on the seed, the step, the prompt, the index in the group and what the model reads, so that an episode repeated after a
fault draws the same tokens where the agent makes the same requests.
"""

import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tandem.config.agent import AgentConfig
from tandem.engine.processing.outputs import CompletionOutput
from tandem.rl.agents.agent_pool import AgentPool
from tandem.rl.agents.agent_server import AgentServer
from tandem.rl.agents.conversations import Conversations
from tandem.rl.agents.session import Asked, Session
from tandem.rl.rollout.sampling_engine import SamplingEngine
from tandem.runtime.traces.context import SpanContext, current, enter, leave
from tandem.types import Prompt, Sample, UserError


@dataclass(frozen=True, slots=True, eq=False)
class _Ended:
    """The episode of ``owner`` with the ``place`` (group, index) has ended."""

    owner: "InFlightAgents"
    place: tuple[int, int]
    sample: "Future[Sample]"


class Agents:
    """The agent's processes and the server that they call, which are kept from rollout to rollout. ``events``: the requests, and the episodes that have
    ended, as they come."""

    def __init__(self, config: AgentConfig, folder: Path, log_dir: Path | None = None) -> None:
        """``folder``: of the tokenizer and its chat template. Raises ``UserError``."""
        self.conversations = Conversations.open(folder, config.tool_call_parser)
        self.events: queue.SimpleQueue[Asked | _Ended] = queue.SimpleQueue()
        self._server = AgentServer(self.events.put)
        try:
            self.pool = AgentPool(config, self._server, log_dir)
        except BaseException:
            self._server.close()
            raise
        self.close = weakref.finalize(self, _close, self.pool, self._server)


def _close(pool: AgentPool, server: AgentServer) -> None:
    pool.close()
    server.close()


class InFlightAgents:
    """The groups of episodes that ``engine`` draws, with the interface of ``InFlightGroups``. ``context``: tokens that a request and its answer may have.
    ``parent``: returns the span that an episode which begins now is recorded below."""

    def __init__(self, engine: SamplingEngine, agents: Agents, context: int, parent: Callable[[], SpanContext | None] = current) -> None:
        self._engine, self._agents, self._context, self._parent = engine, agents, context, parent
        self._groups: dict[int, dict[int, Sample | None]] = {}
        """The unfinished groups, by the order in which they were added, with the sample of each index."""
        self._sessions: dict[tuple[int, int], Session] = {}
        self._requests: dict[str, Asked] = {}
        self._added = self._asked = 0

    def add(self, step: int, prompts: Sequence[Prompt], settings: Mapping[str, Any], unfinished: Sequence[Sample] = ()) -> None:
        """Queues a group of ``settings["n"]`` episodes for each of ``prompts``."""
        assert not unfinished, "a recipe of agents has no partial rollouts"
        for prompt in prompts:
            group, self._added = self._added, self._added + 1
            self._groups[group] = dict.fromkeys(range(settings["n"]))
            for index in range(settings["n"]):
                place = (group, index)
                token = enter(self._parent())
                try:
                    ended = self._agents.pool.run(partial(self._begin, place, step, prompt, settings))
                finally:
                    leave(token)
                ended.add_done_callback(partial(self._end, place))

    def _end(self, place: tuple[int, int], sample: "Future[Sample]") -> None:
        self._agents.events.put(_Ended(self, place, sample))

    def _begin(self, place: tuple[int, int], step: int, prompt: Prompt, settings: Mapping[str, Any]) -> Session:
        session = Session(self._agents.conversations, step, prompt, place[1], settings, self._context)
        self._sessions[place] = session
        if place[0] not in self._groups:
            session.close()
        return session

    def draw(
        self, waits_for: Literal["any", "all"], on_progress: Callable[[int, int], None], on_samples: Callable[[Sequence[Sample]], None] | None = None
    ) -> list[Sample]:
        """Runs the engine until any group, or all of them, are finished; returns their samples in the order in which the groups were added. Calls
        ``on_progress`` with the numbers of groups finished and asked for, and ``on_samples`` with each sample as soon as it is finished."""
        total, finished = len(self._groups), dict[int, list[Sample]]()
        self._engine.listen(self._answer)
        while self._groups and (waits_for == "all" or not finished):
            ended = self._take_events()
            # Those of episodes that have ended without their answers.
            for name in [name for name, asked in self._requests.items() if asked.completion.done()]:
                del self._requests[name]
                self._engine.abort(name)
            if ended and on_samples is not None:
                on_samples(ended)
            for number in [number for number, group in self._groups.items() if None not in group.values()]:
                finished[number] = [sample for sample in self._groups.pop(number).values() if sample is not None]
                on_progress(len(finished), total)
            if self._requests:
                self._engine.step()
        self._engine.listen(None)
        return [sample for number in sorted(finished) for sample in finished[number]]

    def drop(self) -> None:
        """Ends the sessions of what is unfinished; nobody reads what these episodes return."""
        self._groups.clear()
        for session in list(self._sessions.values()):
            session.close()
        self._sessions.clear()
        for name in self._requests:
            self._engine.abort(name)
        self._engine.take_outputs()
        self._requests.clear()

    def _take_events(self) -> list[Sample]:
        """Gives the engine the requests that have come, waiting for an event where it has nothing to do; returns the samples of the episodes that have
        ended."""
        ended = list[Sample]()
        events = self._agents.events
        while self._groups and (not self._requests or not events.empty()):
            if not self._requests and ended and events.empty():
                break
            event = events.get()
            if isinstance(event, Asked):
                self._ask(event)
            elif event.owner is self and event.place[0] in self._groups and not event.sample.cancelled():
                sample = event.sample.result()
                self._groups[event.place[0]][event.place[1]] = sample
                self._sessions.pop(event.place, None)
                ended.append(sample)
        return ended

    def _ask(self, asked: Asked) -> None:
        if asked.completion.done():
            return
        name, self._asked = f"agent-{self._asked}", self._asked + 1
        token = enter(asked.session.trace)
        try:
            self._engine.add_request(name, asked.prompt, asked.params, key=asked.key, first_index=asked.session.index)
        except UserError as error:
            asked.completion.set_exception(error)
            return
        finally:
            leave(token)
        self._requests[name] = asked

    def _answer(self, name: str, completion: CompletionOutput) -> None:
        asked = self._requests.pop(name, None)
        if asked is not None and not asked.completion.done():
            asked.completion.set_result(completion)
