"""All servers that a gateway has started."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tandem.config.gateway import GatewayConfig
from tandem.config.servers import flag_name
from tandem.config.servers_apart import TRANSFER_KEY, models_apart
from tandem.gateway.servers.group import Group, Members
from tandem.gateway.servers.places import Place, check_gpus, find_machine, too_few_cores
from tandem.gateway.servers.server import write_key
from tandem.gateway.servers.updates import Updates
from tandem.gateway.servers.versions import ModelVersion, find_version
from tandem.runtime.process.processes import available_cores
from tandem.runtime.process.temporary import temporary_folder
from tandem.types import UserError

_PERIOD_S = 0.05


@dataclass
class Servers:
    """The groups of a gateway: one for each model, or one for each role of its servers."""

    groups: list[Group] = field(default_factory=list)
    updates: Updates | None = None
    gpus: tuple[str, ...] = ()
    """Those that they may use where their settings name none."""

    @property
    def places(self) -> list[Place]:
        return [server.place for group in self.groups for server in group.servers]

    def check(self, config: GatewayConfig) -> None:
        """Raises ``UserError`` if there are too few GPUs for the servers of ``config``."""
        check_gpus(config.servers, self.gpus)

    def follow(self, config: GatewayConfig) -> None:
        """Takes other settings of the groups that there are."""
        for group in self.groups:
            group.follow(config)

    async def keep(self, ready: Callable[[], None] | None = None) -> None:
        """Looks after all servers for ever. ``ready`` is called once every group has had all its servers ready. Raises ``UserError`` if one cannot be
        started."""
        waiting = set(self.groups)
        while True:
            for group in self.groups:
                group.step()
            if self.updates is not None:
                self.updates.follow()
            waiting = {group for group in waiting if len(group.ready) < group.desired}
            if not waiting and ready is not None:
                ready()
                ready = None
            await asyncio.sleep(_PERIOD_S)

    async def update(self, model: str, version: str) -> list[Group]:
        """Begins an update of the servers of ``model``; returns their groups. Raises ``UserError``."""
        if self.updates is None:
            raise UserError("the gateway has started no servers")
        return await self.updates.begin(model, version)

    async def stop(self) -> None:
        """Ends all servers."""
        if self.updates is not None:
            await self.updates.stop()
        try:
            await asyncio.gather(*(group.stop() for group in self.groups))
        finally:
            for group in self.groups:
                group.kill()


@contextlib.asynccontextmanager
async def running_servers(
    config: GatewayConfig, members: Members, waits: Callable[[str], tuple[int, float]], stages: Mapping[str, str], session: aiohttp.ClientSession,
    say: Callable[[str], None],
) -> AsyncIterator[Servers]:  # fmt: skip
    """Yields the servers of ``config``, of which none was started yet, and ends them afterwards. ``waits``: as in ``Group``; ``stages``: as in ``Updates``.
    Raises ``UserError`` if there are too few GPUs for them, the registry does not have a version of theirs, or a folder for logs cannot be made."""
    _make_log_folders(config)
    machine = find_machine(config.servers)
    warning = too_few_cores(config.servers, available_cores())
    if warning is not None:
        say(warning)
    with temporary_folder() as folder:
        servers = Servers(gpus=machine.gpus)
        versions: dict[str, ModelVersion] = {}
        transfer_keys = {model: write_key(folder / f"{secrets.token_hex(8)}.kv", secrets.token_urlsafe(32)) for model in models_apart(config.servers)}
        for name, each in config.servers.items():
            model = each.model_name(name)
            # Servers of one model have one version, and a checkpoint is converted once.
            if model not in versions:
                versions[model] = await asyncio.to_thread(find_version, each.model, config.registry, folder, None)
            has_key = any(flag_name(flag) == TRANSFER_KEY for flag in each.flags)
            key = None if has_key else transfer_keys.get(model)
            servers.groups.append(Group(name, config, machine, members, folder, say, lambda: servers.places, waits, versions[model], key))
        servers.updates = Updates(servers.groups, config.registry, stages, folder, session, say)
        try:
            yield servers
        finally:
            await servers.stop()


def _make_log_folders(config: GatewayConfig) -> None:
    """Makes the folders of logs. Raises ``UserError`` for one that cannot be made."""
    for name, group in config.servers.items():
        try:
            if group.log_folder:
                Path(group.log_folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"'servers.{name}.log_folder' is '{group.log_folder}', which cannot be made: {error.strerror}; name another folder") from None
