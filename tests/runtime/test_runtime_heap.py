"""Freed memory is used again inside, and given back at the end."""

import resource
import sys

import pytest
import torch

from tandem.runtime.heap import freed_memory_kept


def faults_of(size: int) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc on Linux, which gives memory back as it is told")
def test_large_tensors_are_touched_once_inside_and_anew_outside() -> None:
    size = 16 << 20  # 64 MiB: beyond what glibc ever keeps by itself
    outside = faults_of(size)
    with freed_memory_kept():
        faults_of(size)  # the heap grows to what these tensors need
        inside = faults_of(size)
    after = faults_of(size)
    assert inside < 0.1 * outside and after > 0.5 * outside
