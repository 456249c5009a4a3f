"""Tests on a CUDA device, which need torch, triton, transformers and pytest: ``python -m pytest tests/gpu -m gpu``."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Creates tensors on the device by default. Skips the test if there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
