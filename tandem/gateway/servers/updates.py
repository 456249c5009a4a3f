"""Begins rolling updates: as an administrator asks, and when the stage of the registry that servers follow has another version."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp

from tandem.gateway.servers.group import Group
from tandem.gateway.servers.update import RollingUpdate, UpdateState
from tandem.gateway.servers.versions import find_version, stage_of, with_own_weights
from tandem.types import UserError


class Updates:
    """The updates of ``groups``, at most one of each at a time. ``registry``: its folder, or empty; ``stages``: the versions in its stages, kept up to date by
    others. ``folder``: for models that are converted."""

    def __init__(
        self, groups: Sequence[Group], registry: str, stages: Mapping[str, str], folder: Path, session: aiohttp.ClientSession, say: Callable[[str], None]
    ) -> None:
        self._groups, self._registry, self._stages, self._folder, self._session, self._say = groups, registry, stages, folder, session, say
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followed = {group.name: group.version.name for group in groups}
        self._used = {group.name: {group.version.weights: group.version.path} for group in groups}
        """The weights that servers of each group had, or were to have: other ones have another number."""

    def follow(self) -> None:
        """Begins the updates to what is in the stages now."""
        for group in self._groups:
            stage = stage_of(group.config.model)
            reference = None if stage is None else self._stages.get(stage)
            if reference is not None and reference != self._followed[group.name] and not self._runs(group):
                self._followed[group.name] = reference
                if reference != group.version.name:
                    self._tasks[group.name] = asyncio.create_task(self._follow(group, f"models/{reference}"), name=f"update {group.name}")

    async def begin(self, name: str, given: str) -> Group:
        """Begins to bring the version ``given`` to the servers of the model ``name``; returns them. Raises ``UserError``."""
        group = next((group for group in self._groups if group.name == name), None)
        if group is None:
            names = ", ".join(group.name for group in self._groups) or "none"
            raise UserError(f"the gateway has started no servers of '{name[:100]}'; there is {names}")
        if self._runs(group):
            raise UserError(f"servers of '{name}' are being updated; wait until that has ended")
        ready = asyncio.get_running_loop().create_future()
        self._tasks[name] = asyncio.create_task(self._update(group, given, ready), name=f"update {name}")
        await ready
        return group

    async def stop(self) -> None:
        """Ends the updates where they are."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _runs(self, group: Group) -> bool:
        task = self._tasks.get(group.name)
        return task is not None and not task.done()

    async def _follow(self, group: Group, given: str) -> None:
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._update(group, given, found)
        error = found.exception()
        if error is not None:
            self._say(f"servers of {group.name} stay at {group.version.name}: {error}")

    async def _update(self, group: Group, given: str, found: "asyncio.Future[None]") -> None:
        """Finds the version ``given``, sets ``found``, and brings it to the servers."""
        try:
            used = self._used[group.name]
            version = with_own_weights(await asyncio.to_thread(find_version, given, self._registry, self._folder, max(used)), used)
            if version.path == group.version.path:
                raise UserError(f"servers of '{group.name}' serve {version.name} already")
        except UserError as error:
            found.set_exception(error)
            return
        used[version.weights] = version.path
        state = group.update = UpdateState(group.version, version, time.time())
        found.set_result(None)
        await RollingUpdate(group, self._session, self._say).run(state)
        group.outcomes[state.outcome] += 1
