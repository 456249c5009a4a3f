"""Tandem's Triton kernels in Triton's interpreter, which computes with numpy on the CPU."""

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tandem.kernels.triton.kernels import TritonKernels

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off; set TRITON_INTERPRET=1 and run these tests alone", allow_module_level=True)


def interpreted(splits: bool | None = None, deterministic: bool = True) -> "TritonKernels":
    """Returns a new set of kernels."""
    from tandem.kernels.triton.kernels import TritonKernels

    return TritonKernels(deterministic=deterministic, splits=splits)
