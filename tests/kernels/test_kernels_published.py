"""Weights that are written for other processes: in panels and in rows, each with the digest of the bytes, as the library of xxHash computes it."""

import ctypes
from pathlib import Path

import pytest
import torch
import xxhash

from tandem.kernels import select
from tandem.kernels.cpu import build
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.kernels.cpu.library import Library
from tandem.weight_transfer.panels import DIGESTED_BYTES, write_panels

here = select("cpu")
assert isinstance(here, CpuKernels)

# Whole and narrow last panels; blocks and tiles that end with a panel, and such that do not; the fewest bytes that kernels digest, and fewer.
SHAPES = [(64, 16), (64, 40), (128, 37), (80, 33), (16, 4), (16, 3), (16, 1), (48, 5), (112, 64), (192, 257), (16, 1024), (64, 1), (32, 1030)]


def bytes_at(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


def check_panels(kernels: CpuKernels, rows: int, columns: int, shift: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    into = torch.full((weight.nbytes + 256,), 7, dtype=torch.uint8)
    start = -into.data_ptr() % 64 + shift
    expected = into.clone()
    # By the definition of the layout: 64 rows at a time, each transposed.
    plain = torch.cat([panel.t().reshape(-1) for panel in weight.split(64)]).view(torch.uint8)
    expected[start : start + weight.nbytes] = plain
    digest = write_panels(kernels, weight, into.data_ptr() + start)
    assert digest == xxhash.xxh3_128_hexdigest(plain.numpy().tobytes()) == write_panels(kernels, weight, None)
    assert torch.equal(into, expected), "the panels, and nothing around them"


def check_copy(kernels: CpuKernels, size: int, shift: int) -> None:
    source = torch.randint(0, 256, (size + 7,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    into = torch.full((size + 200,), 7, dtype=torch.uint8)
    start = -into.data_ptr() % 64 + shift
    expected = into.clone()
    expected[start : start + size] = source[3 : 3 + size]
    digest = kernels.copy_and_digest(into.data_ptr() + start, source.data_ptr() + 3, size)
    assert torch.equal(into, expected) and digest == xxhash.xxh3_128_hexdigest(source[3 : 3 + size].numpy().tobytes())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_panels_are_written_with_the_digest_of_their_bytes(rows: int, columns: int) -> None:
    check_panels(here, rows, columns, 0)
    check_panels(here, rows, columns, 4)


@pytest.mark.parametrize("shift", [0, 1, 17, 63])
def test_a_copy_past_the_cache_is_the_bytes_and_no_others_with_their_digest(shift: int) -> None:
    for size in (*range(DIGESTED_BYTES, DIGESTED_BYTES + 130), *range(1000, 1100), *range(2040, 2060), 4096, 300_001):
        check_copy(here, size, shift)


@pytest.mark.full
@pytest.mark.parametrize("target", ["-march=haswell", "-march=x86-64-v2 -mtune=generic"])
def test_every_instruction_set_writes_the_same_panels_and_digests(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [flag for flag in build.FLAGS if flag != "-march=native"] + target.split()
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    other = CpuKernels(Library(build.built_library("g++", tmp_path)))
    for rows, columns in SHAPES:
        check_panels(other, rows, columns, 0)
    for size in (DIGESTED_BYTES, 1023, 1024, 1025, 300_001):
        check_copy(other, size, 0)
        check_copy(other, size, 5)
