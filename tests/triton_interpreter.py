"""Tandem's Triton kernels in Triton's interpreter, which computes with numpy on the CPU. Importing this skips the tests of a module that cannot have them."""

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tandem.kernels.triton.kernels import TritonKernels

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off; set TRITON_INTERPRET=1 and run these tests alone", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle, _patch_lang


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Computes ``d + a @ b`` with sums over k in order, as every row and column of a GPU's tile has them. The interpreter's own takes BLAS, with some of whose
    kernels the bits of a row depend on its place."""
    kind = d.data.dtype
    products = a.data[..., :, :, None].astype(kind, copy=False) * b.data[..., None, :, :].astype(kind, copy=False)
    return TensorHandle(np.add.reduce(products, axis=-2) + d.data, d.dtype.scalar)


InterpreterBuilder.create_dot = _dot
_PATCHED: set[int] = set()
_launch = GridExecutor.__call__


def _launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
    _PATCHED.clear()
    _launch(executor, *args, **kwargs)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of a program. The interpreter's own prepares triton.language anew for each call, which takes longer than most of them; here once for
    each module and launch."""
    module = id(function.fn.__globals__)
    if module not in _PATCHED:
        _patch_lang(function.fn)
        _PATCHED.add(module)
    return function.rewrite()(*args, **kwargs)


GridExecutor.__call__ = _launch_anew
InterpretedFunction.__call__ = _call


def interpreted(splits: bool | None = None, deterministic: bool = True) -> "TritonKernels":
    """Returns a new set of kernels."""
    from tandem.kernels.triton.kernels import TritonKernels

    return TritonKernels(deterministic=deterministic, splits=splits)
