"""The groups that a rollout's worker draws, whichever engine it has: completions, episodes with tools or an agent's, as the recipe says."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.config.recipe import Recipe
from tandem.rl.agents.in_flight import Agents, InFlightAgents
from tandem.rl.rollout.episode_tools import EpisodeTools
from tandem.rl.rollout.episodes import InFlightEpisodes
from tandem.rl.rollout.groups import InFlightGroups
from tandem.rl.rollout.sampling_engine import SamplingEngine
from tandem.rl.rollout.traced_engine import TracedEngine
from tandem.runtime.rpc.calls import Blobs, Meta, Progress
from tandem.runtime.traces.context import current
from tandem.runtime.traces.parts import Parts, share_of_parts
from tandem.types import Sample
from tandem.types.wire import Buffer
from tandem.types.wire_records import decode_prompts, decode_samples, encode_samples, samples_to_text


class RolloutGroups:
    """Keeps the processes of tools or of the agent from rollout to rollout, and unfinished groups from call to call. ``directory``: of the run."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self._recipe, self._logs = recipe, directory / "logs"
        self._tools: EpisodeTools | None = None
        self._agents: Agents | None = None
        self._groups: InFlightGroups | InFlightEpisodes | InFlightAgents | None = None
        self._requests, self._episodes = Parts(), Parts()
        self._streamed: dict[str, Sample] = {}
        """By id, the samples that were streamed and not returned yet."""

    def open(self, folder: Path) -> None:
        """Starts the processes that the recipe needs, if they do not run. ``folder``: of the tokenizer and its chat template. Raises ``UserError``."""
        recipe = self._recipe
        if recipe.rollout.multi_turn is not None and self._tools is None:
            self._tools = EpisodeTools.open(recipe.rollout.multi_turn, recipe.task.tools, folder, self._logs)
            weakref.finalize(self, self._tools.pool.close)
        if recipe.rollout.agent is not None and self._agents is None:
            self._agents = Agents(recipe.rollout.agent, folder, self._logs)

    def draw(self, engine: SamplingEngine, context: int, meta: Meta, blobs: Blobs, progress: Progress) -> tuple[dict[str, Any], dict[str, Buffer]]:
        """Draws the samples that a call of ``rollout`` asks ``engine`` for; the reply has the ids of the ``finished`` prompts, and of their ``samples`` those
        that were not streamed. ``context``: tokens that a prompt and its completion may have.

        Where the call ``adds`` its prompts, the groups that earlier calls left unfinished go on beside them; else they are dropped. With ``wait: any`` it
        returns when a group is finished, else when all are; of prompts that have ``unfinished`` samples, only these, continued. With ``stream`` each sample is
        sent as soon as it is finished, in ``samples`` of a progress."""
        if self._groups is None or not meta.get("adds"):
            self.drop()
            self._groups = self._none(engine, context)
        unfinished = decode_samples(blobs["unfinished"]) if "unfinished" in blobs else []
        step = int(meta["step"])
        # There are thousands of requests in a large step.
        ratio = share_of_parts(self._recipe.traces, is_whole=step in self._recipe.run.trace_steps)
        for parts in (self._requests, self._episodes):
            parts.begin(current(), ratio)
        self._groups.add(step, decode_prompts(blobs["prompts"]), meta["settings"], unfinished)

        def stream(finished: Sequence[Sample]) -> None:
            progress({"samples": samples_to_text(finished)})
            self._streamed.update((sample.id, sample) for sample in finished)

        on_samples = stream if meta.get("stream") else None
        drawn = self._groups.draw(meta.get("wait", "all"), lambda done, total: progress({"done": done, "total": total}), on_samples)
        # A sample that has changed since it was streamed is another object.
        rest = [sample for sample in drawn if self._streamed.pop(sample.id, None) is not sample]
        return {"finished": list(dict.fromkeys(sample.prompt_id for sample in drawn))}, {"samples": encode_samples(rest)}

    def _none(self, given: SamplingEngine, context: int) -> InFlightGroups | InFlightEpisodes | InFlightAgents:
        engine, parent = TracedEngine(given, self._requests.parent), self._episodes.parent
        if self._agents is not None:
            return InFlightAgents(engine, self._agents, context, parent)
        return InFlightGroups(engine) if self._tools is None else InFlightEpisodes(engine, self._tools, parent)

    def drop(self) -> None:
        """Aborts what is unfinished."""
        if self._groups is not None:
            self._groups.drop()
        self.forget()

    def forget(self) -> None:
        """Forgets what is unfinished, whose engine has ended or sleeps."""
        self._groups = None
        self._streamed.clear()
