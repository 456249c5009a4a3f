"""Where the KV blocks of a prompt can be fetched, as a router carries it from one server to another: ``kv_transfer_params``, with vLLM's names where the
meaning is the same.

A router, like any other holder, can read it but not change it: it is signed with the key of the group. A client that could give a server blocks of its own
choice under the hashes of another client's prompt would change that prompt's answers.
"""

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any

import xxhash

from tandem.types import UserError, WeightVersion
from tandem.weight_transfer.shared_memory import Contents
from tandem.weight_transfer.transport.pieces import Piece

MOST_BLOCKS = 2**20
_FIELDS = ("remote_host", "remote_port", "remote_engine_id", "remote_segment", "remote_block_ids", "block_bytes", "weight_version", "layout")


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """Blocks in shared memory of another server. ``engine_id``: a name of that server; ``blocks``: the hash and the xxh3-128 of each, in order; ``layout``:
    the fields of their ``KVLayout``."""

    host: str
    port: int
    engine_id: str
    segment: str
    blocks: tuple[tuple[str, str], ...]
    block_bytes: int
    version: WeightVersion
    layout: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        return len(self.blocks) * self.block_bytes

    @property
    def contents(self) -> Contents:
        """The label of the segment while it holds these blocks."""
        return Contents(self.version, xxhash.xxh3_128_hexdigest("\n".join(f"{name} {digest}" for name, digest in self.blocks).encode()))

    def pieces(self) -> list[Piece]:
        """Returns each block as a part of the segment."""
        return [Piece(f"block {i}", i * self.block_bytes, self.block_bytes, digest) for i, (_, digest) in enumerate(self.blocks)]

    def to_params(self, key: str) -> dict[str, Any]:
        """Returns the field ``kv_transfer_params`` of the request that is to use the blocks."""
        values = (
            self.host, self.port, self.engine_id, self.segment, [list(block) for block in self.blocks], self.block_bytes, list(self.version), self.layout,
        )  # fmt: skip
        given = dict(zip(_FIELDS, values, strict=True))
        return {"do_remote_prefill": True, "do_remote_decode": False, **given, "signature": _signature(given, key)}

    @classmethod
    def from_params(cls, params: dict[str, Any], key: str) -> "RemoteBlocks":
        """Returns what ``to_params`` has described. Raises ``UserError`` if that was not done with the same ``key``."""
        given: dict[str, Any] = {name: params.get(name) for name in _FIELDS}
        signature = params.get("signature")
        if not isinstance(signature, str) or not hmac.compare_digest(signature.encode("utf-8", "replace"), _signature(given, key).encode()):
            raise UserError("kv_transfer_params was not made by a server with this server's --kv-transfer-key; give all of them the same one")
        # Signed, hence of the form that to_params gives.
        host, port, engine_id, segment, blocks, block_bytes, version, layout = given.values()
        return cls(host, port, engine_id, segment, tuple((name, digest) for name, digest in blocks), block_bytes, WeightVersion(*version), layout)


def _signature(given: dict[str, Any], key: str) -> str:
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return hmac.new(key.encode(), b"tandem kv blocks " + text.encode(), hashlib.sha256).hexdigest()
