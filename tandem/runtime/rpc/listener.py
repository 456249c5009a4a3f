"""Listening TCP sockets."""

import socket

from tandem.types.errors import UserError


def listen(host: str, port: int, *, backlog: int = 128, is_shared: bool = False) -> socket.socket:
    """Returns a TCP socket that listens on ``host``, an IPv4 or IPv6 address or a name of this machine.

    Args:
        port: 0 takes a free port; ``getsockname()[1]`` is its number.
        backlog: the number of connections that the system keeps until they are accepted.
        is_shared: further sockets of this user may listen at the same address, and the system divides connections among them (``SO_REUSEPORT``).

    Raises:
        UserError: ``host`` is not an address of this machine, or the port cannot be taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UserError(f"host '{host}' is not an address of this machine; 127.0.0.1 and 0.0.0.0 always are") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise UserError(f"port {port} on {host} cannot be taken ({error.strerror}); choose a free port, or 0 for any free one") from None
    return listener
