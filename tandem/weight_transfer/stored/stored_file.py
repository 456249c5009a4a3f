"""The file of a version of the weights in object storage: it says what it is, what it begins with, and every digest. No torch.

    a fixed part: the magic, the layout's number, the bytes of the header and its xxh3-128
    header, in JSON: the manifest of the version; the version that it begins with (none for an anchor); its parts, as of a delta
    payload: the parts, one behind the other

An *anchor* has every part whole. A *delta* has the parts that differ from the version before: encoded element-wise where that is smaller, else whole (an
empty ``base``). Parts that have not changed are in earlier files, down to the anchor. Parts are known by their digests, as everywhere, so a file that is
missing, damaged or of another chain is noticed by what comes of it.
"""

import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.delta import EncodedPart
from tandem.weight_transfer.manifest import from_json, to_json
from tandem.weight_transfer.shared_memory import Contents

_FIXED = struct.Struct("<8sIQ16s")
_MAGIC, _LAYOUT = b"TDMSTORE", 1
_MOST_HEADER_BYTES = 2**30
FIXED_BYTES = _FIXED.size
SEGMENT = "stored"
"""The segment of tensors that are in no memory."""
WANTED = "anchor-wanted"
"""The file with which a reader asks for an anchor, because it cannot use what is there."""
_NAME = re.compile(r"weights-(\d+)-(\d+)\.(anchor|delta)")


class StoredDamage(RunError):
    """A file in the storage is missing or damaged."""


def name_of(version: WeightVersion, *, is_anchor: bool) -> str:
    """Returns the name of a version's file. Names are in the order of versions."""
    return f"weights-{version.incarnation:06d}-{version.step:010d}.{'anchor' if is_anchor else 'delta'}"


def parse_name(name: str) -> tuple[WeightVersion, bool] | None:
    """Returns the version of a file and whether it is an anchor; ``None`` for other files."""
    match = _NAME.fullmatch(name)
    return None if match is None else (WeightVersion(int(match[1]), int(match[2])), match[3] == "anchor")


def anchors(names: Iterable[str]) -> list[WeightVersion]:
    """Returns the versions of the anchors among ``names``, ascending."""
    return sorted(parsed[0] for name in names if (parsed := parse_name(name)) is not None and parsed[1])


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A file, as its header says. ``base``: the version that it begins with; ``None``: it is an anchor. ``parts``: by digest and bytes; their offsets are
    those behind ``payload_at``."""

    name: str
    manifest: WeightManifest
    base: Contents | None
    parts: dict[tuple[str, int], EncodedPart]
    payload_at: int


def encode_header(manifest: WeightManifest, base: Contents | None, parts: Sequence[EncodedPart]) -> bytes:
    """Returns what a file begins with."""
    base_plain = None if base is None else [*base.version, base.digest]
    plain = {"manifest": to_json(manifest).decode("ascii"), "base": base_plain, "parts": parts}
    header = json.dumps(plain, separators=(",", ":")).encode("ascii")
    return _FIXED.pack(_MAGIC, _LAYOUT, len(header), xxhash.xxh3_128_digest(header)) + header


def header_bytes(fixed: bytes, name: str) -> int:
    """Returns how many bytes follow the ``fixed`` part of the file ``name`` as its header. Raises ``StoredDamage``."""
    if len(fixed) == FIXED_BYTES:
        magic, layout, size_bytes, _ = _FIXED.unpack(fixed)
        if (magic, layout) == (_MAGIC, _LAYOUT) and size_bytes <= _MOST_HEADER_BYTES:
            return int(size_bytes)
    raise StoredDamage(f"the file '{name}' does not begin as weights in a storage do")


def decode_header(fixed: bytes, header: bytes, name: str) -> StoredVersion:
    """Raises ``StoredDamage`` if the header does not have its digest, or is not that of the file ``name``."""
    if xxhash.xxh3_128_digest(header) != _FIXED.unpack(fixed)[3]:
        raise StoredDamage(f"the header of the file '{name}' does not have its digest")
    try:
        plain = json.loads(header)
        manifest = from_json(plain["manifest"].encode("ascii"))
        base = None if plain["base"] is None else Contents(WeightVersion(*map(int, plain["base"][:2])), str(plain["base"][2]))
        parts = [EncodedPart(*part) for part in plain["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StoredDamage(f"the header of the file '{name}' is not of weights: {error}") from None
    if parse_name(name) != (manifest.version, base is None):
        raise StoredDamage(f"the file '{name}' is of other weights than its name says")
    return StoredVersion(name, manifest, base, {(part.target, part.part_bytes): part for part in parts}, FIXED_BYTES + len(header))
