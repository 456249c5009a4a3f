"""The addresses at which the machines of a run reach each other."""

import socket

from tandem.types import RunError


def own_address(peer: str) -> str:
    """Returns the address of this machine from which connections to ``peer`` leave. Nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError as error:
            raise RunError(f"there is no way from here to {peer}: {error.strerror}") from None
        return str(probe.getsockname()[0])
