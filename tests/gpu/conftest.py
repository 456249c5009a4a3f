"""Tests on a CUDA device. They need torch, triton, transformers and pytest: ``python -m pytest tests/gpu -m gpu``."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Tensors are made on the device; without one every test here is skipped by name."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is found")
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
