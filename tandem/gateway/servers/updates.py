"""Begins rolling updates of models: as an administrator asks, and when the stage of the registry that servers follow has another version."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp

from tandem.gateway.servers.group import Group
from tandem.gateway.servers.update import RollingUpdate, UpdateState
from tandem.gateway.servers.versions import find_version, stage_of, with_own_weights
from tandem.runtime.process.tasks import end_tasks
from tandem.types import UserError


class Updates:
    """The updates of the models of ``groups``, at most one of each at a time, which all servers of the model take, whatever their role. ``registry``: its
    folder, or empty; ``stages``: the versions in its stages, kept up to date by others. ``folder``: for models that are converted."""

    def __init__(
        self, groups: Sequence[Group], registry: str, stages: Mapping[str, str], folder: Path, session: aiohttp.ClientSession, say: Callable[[str], None]
    ) -> None:
        self._registry, self._stages, self._folder, self._session, self._say = registry, stages, folder, session, say
        self._models: dict[str, list[Group]] = {}
        for group in groups:
            self._models.setdefault(group.model, []).append(group)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followed = {model: groups[0].version.name for model, groups in self._models.items()}
        self._used = {model: {groups[0].version.weights: groups[0].version.path} for model, groups in self._models.items()}
        """The weights that servers of each model had, or were to have: other ones have another number."""

    def follow(self) -> None:
        """Begins the updates to what is in the stages now."""
        for model, groups in self._models.items():
            stage = stage_of(groups[0].config.model)
            reference = None if stage is None else self._stages.get(stage)
            if reference is not None and reference != self._followed[model] and not self._runs(model):
                self._followed[model] = reference
                if reference != groups[0].version.name:
                    self._tasks[model] = asyncio.create_task(self._follow(model, f"models/{reference}"), name=f"update {model}")

    async def begin(self, model: str, given: str) -> list[Group]:
        """Begins to bring the version ``given`` to the servers of ``model``; returns their groups. Raises ``UserError``."""
        if model not in self._models:
            names = ", ".join(self._models) or "none"
            raise UserError(f"the gateway has started no servers of '{model[:100]}'; there is {names}")
        if self._runs(model):
            raise UserError(f"servers of '{model}' are being updated; wait until that has ended")
        ready = asyncio.get_running_loop().create_future()
        self._tasks[model] = asyncio.create_task(self._update(model, given, ready), name=f"update {model}")
        await ready
        return self._models[model]

    async def stop(self) -> None:
        """Ends the updates where they are."""
        await end_tasks(self._tasks.values())

    def _runs(self, model: str) -> bool:
        task = self._tasks.get(model)
        return task is not None and not task.done()

    async def _follow(self, model: str, given: str) -> None:
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._update(model, given, found)
        error = found.exception()
        if error is not None:
            self._say(f"servers of {model} stay at {self._models[model][0].version.name}: {error}")

    async def _update(self, model: str, given: str, found: "asyncio.Future[None]") -> None:
        """Finds the version ``given``, sets ``found``, and brings it to the servers."""
        groups = self._models[model]
        before = groups[0].version
        try:
            used = self._used[model]
            version = with_own_weights(await asyncio.to_thread(find_version, given, self._registry, self._folder, max(used)), used)
            if version.path == before.path:
                raise UserError(f"servers of '{model}' serve {version.name} already")
        except UserError as error:
            found.set_exception(error)
            return
        used[version.weights] = version.path
        state = UpdateState(before, version, time.time())
        for group in groups:
            group.update = state
        found.set_result(None)
        await RollingUpdate(groups, self._session, self._say).run(state)
        for group in groups:
            group.outcomes[state.outcome] += 1
