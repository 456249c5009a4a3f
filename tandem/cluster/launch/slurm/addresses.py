"""The address of a node of a job. Its name may lead to its loopback on the node itself."""

import socket

from tandem.types import RunError


def address_of(name: str) -> str:
    """Returns the address of a host, IPv4 where it has one. Raises ``RunError`` for an unknown one."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RunError(f"the address of node '{name}' is not known here ({error}); set its NodeAddr in slurm.conf") from None
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
