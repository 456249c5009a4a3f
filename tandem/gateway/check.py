"""``tandem gateway --check``: what the gateway would find if it were started."""

import asyncio

import aiohttp

from tandem.config.gateway import GatewayConfig
from tandem.gateway.backend import Health
from tandem.gateway.probes import Probes
from tandem.gateway.server import check_files, make_backends
from tandem.gateway.servers.places import find_machine
from tandem.runtime.rpc.listener import listen


def check_gateway(config: GatewayConfig) -> int:
    """Asks every backend once and prints a line for each. Returns 0 if all are ready, else 1. Raises ``UserError`` if ``host`` is not an address of this
    machine, or a file cannot be read."""
    # On any port: a gateway with these settings may be running on its own.
    listen(config.host, 0).close()
    check_files(config)
    find_machine(config.servers)
    for name, servers in config.servers.items():
        print(f"{name}: {servers.count} server{'s' * (servers.count != 1)} of '{servers.model}' at the start")
    backends = make_backends(config)
    told: list[str] = []

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            probes = Probes(config.probes, backends, session, told.append)
            await asyncio.gather(*map(probes.probe, backends))

    asyncio.run(ask())
    for backend in backends:
        if backend.health is Health.READY:
            print(f"{backend.name}: ready, serves {', '.join(backend.models) or 'no model'}{' (Tandem)' if backend.is_tandem else ''}")
    for line in told:
        print(line)
    return 0 if all(backend.is_ready for backend in backends) else 1
