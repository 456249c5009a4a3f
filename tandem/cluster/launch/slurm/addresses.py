"""The addresses at which the nodes of a job reach each other. The name of a node may lead to its loopback on the node itself."""

import socket

from tandem.types import RunError


def address_of(name: str) -> str:
    """Returns the address of a host, IPv4 where it has one. Raises ``RunError`` for an unknown one."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RunError(f"the address of node '{name}' is not known here ({error}); set its NodeAddr in slurm.conf") from None
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def own_address(peer: str) -> str:
    """Returns the address of this machine from which connections to ``peer`` leave. Nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError as error:
            raise RunError(f"there is no way from here to {peer}: {error.strerror}") from None
        return str(probe.getsockname()[0])
