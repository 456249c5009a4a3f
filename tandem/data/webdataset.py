"""Samples of WebDataset shards: tar files in which neighbouring members with the same name before the first dot form a sample.

Names are split as in https://github.com/webdataset/webdataset: ``a/b.c.txt`` is the member ``.c.txt`` of the sample ``a/b``, in lower case;
names without a dot, directories, links and metadata (``__name__``) belong to no sample.
"""

import re
import tarfile
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, Self, cast

TARS = (".tar", ".tar.gz", ".tgz")

_MEMBER = re.compile(r"((?:.*/|)[^.]+)([.][^/]*)", re.DOTALL)
_METADATA = re.compile(r"__[^/]*__($|/)")

Sample = dict[str, tuple[str, bytes]]
"""Name and content of each member of a sample, by the part of the name that begins with the first dot."""


class _Header(tarfile.TarInfo):
    """A header that raises if the archive ends without its end-of-archive marker, which ``tarfile`` would accept as the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) < tarfile.BLOCKSIZE:
                raise tarfile.ReadError("unexpected end of data") from None
            if any(buf):
                raise tarfile.ReadError(str(error)) from None
            raise


def samples(file: BinaryIO, kinds: Collection[str], most_bytes: int) -> Iterator[Sample]:
    """Returns the samples of the uncompressed tar ``file`` that have a member of ``kinds``, in order, with those members only.

    Holds one sample in memory, of each member at most ``most_bytes`` + 1 bytes, and does not read members of other kinds. Raises
    ``tarfile.TarError`` or ``ValueError`` for a damaged archive; the sample that it interrupts is not returned.
    """
    current = ""
    sample: Sample = {}
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as archive:
        while (member := archive.next()) is not None:
            # tarfile keeps every header it has read.
            cast(Any, archive).members.clear()
            parts = _MEMBER.fullmatch(member.name)
            if parts is None or not member.isreg() or _METADATA.match(member.name):
                continue
            key, kind = parts[1], parts[2].lower()
            if key != current:
                if sample:
                    yield sample
                current, sample = key, {}
            if kind not in kinds:
                continue
            if kind in sample:
                raise ValueError(f"the member '{member.name}' occurs twice")
            content = archive.extractfile(member)
            assert content is not None
            sample[kind] = (member.name, content.read(min(member.size, most_bytes + 1)))
    if sample:
        yield sample
