"""Both sets of CPU kernels, on one thread."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.kernels import Kernels, select

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select(request.param)


@pytest.fixture
def cpu_kernels() -> Kernels:
    return select("cpu")
