"""All servers that a gateway has started."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config.gateway import GatewayConfig
from tandem.gateway.servers.group import Group, Members
from tandem.gateway.servers.places import Place, find_machine, too_few_cores
from tandem.runtime.process.processes import available_cores
from tandem.runtime.process.temporary import temporary_folder
from tandem.types import UserError

_PERIOD_S = 0.05


@dataclass
class Servers:
    """The groups of a gateway, one for each model."""

    groups: list[Group] = field(default_factory=list)

    @property
    def places(self) -> list[Place]:
        return [server.place for group in self.groups for server in group.servers]

    async def keep(self, ready: Callable[[], None] | None = None) -> None:
        """Looks after all servers for ever. ``ready`` is called once every group has had all its servers ready. Raises ``UserError`` if one cannot be
        started."""
        waiting = set(self.groups)
        while True:
            for group in self.groups:
                group.step()
            waiting = {group for group in waiting if len(group.ready) < group.desired}
            if not waiting and ready is not None:
                ready()
                ready = None
            await asyncio.sleep(_PERIOD_S)

    async def stop(self) -> None:
        """Ends all servers."""
        try:
            await asyncio.gather(*(group.stop() for group in self.groups))
        finally:
            for group in self.groups:
                group.kill()


@contextlib.asynccontextmanager
async def running_servers(
    config: GatewayConfig, members: Members, waits: Callable[[str], tuple[int, float]], say: Callable[[str], None]
) -> AsyncIterator[Servers]:
    """Yields the servers of ``config``, of which none was started yet, and ends them afterwards. ``waits``: as in ``Group``. Raises ``UserError`` if there are
    too few GPUs for them, or a folder for logs cannot be made."""
    _make_log_folders(config)
    machine = find_machine(config.servers)
    warning = too_few_cores(config.servers, available_cores())
    if warning is not None:
        say(warning)
    with temporary_folder() as folder:
        servers = Servers()
        servers.groups += [Group(name, config, machine, members, folder, say, lambda: servers.places, waits) for name in config.servers]
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
