"""What a server does in a group of servers that compute prompts and answers apart."""

import ipaddress
from dataclasses import dataclass

from tandem.config.roles import ROLES, Role
from tandem.types import UserError

MOST_GIB = 2**20


@dataclass(frozen=True, slots=True)
class KVTransferSettings:
    """Settings of the exchange of KV blocks with other servers.

    Args:
        role: what the server does.
        key: shown by both sides of a transfer, and never sent. Empty: no blocks are exchanged.
        host: the address at which others fetch blocks; also the one that is listened on. ``port``: 0 takes a free one.
        memory_bytes: shared memory for blocks that wait to be fetched, and for those that arrive.
        timeout_s: how long blocks wait to be fetched, and how long a fetch may take.
    """

    role: Role = "both"
    key: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    memory_bytes: int = 2**30
    timeout_s: float = 30.0

    @property
    def sends(self) -> bool:
        return bool(self.key) and self.role in ("both", "prefill")

    @property
    def receives(self) -> bool:
        return bool(self.key) and self.role in ("both", "decode")

    def check(self) -> None:
        """Raises ``UserError`` for a value that cannot work."""
        if self.role not in ROLES:
            raise UserError(f"--role is {self.role!r}; it must be one of {', '.join(ROLES)}")
        if self.role != "both" and not self.key:
            raise UserError(f"--role {self.role} needs --kv-transfer-key; give all servers of the group the same key, for example @FILE")
        if self.key and (not self.key.isprintable() or len(self.key) < 16):
            raise UserError("--kv-transfer-key has fewer than 16 characters, or one that cannot be printed; give a longer random text: openssl rand -hex 32")
        if not 0 <= self.port <= 65535:
            raise UserError(f"--kv-transfer-port is {self.port}; it must be from 0 to 65535")
        if not 0 < self.memory_bytes <= MOST_GIB * 2**30:
            raise UserError(f"--kv-transfer-memory is {self.memory_bytes / 2**30:g} GiB; it must be above 0 and at most {MOST_GIB}")
        if not 0 < self.timeout_s <= 86_400:
            raise UserError(f"--kv-transfer-timeout is {self.timeout_s:g}; it must be above 0 seconds and at most 86400")
        if self.sends and _is_wildcard(self.host):
            raise UserError(f"no other server can connect to '{self.host}' for KV blocks; name this machine's address with --kv-transfer-host")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host
