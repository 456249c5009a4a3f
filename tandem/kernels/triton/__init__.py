"""The kernels in Triton, for CUDA devices; in Triton's interpreter (``TRITON_INTERPRET=1``) also for tensors on a CPU, for tests."""

import importlib.util
import logging
import os
from functools import cache
from typing import TYPE_CHECKING

import torch

from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.kernels.triton.kernels import TritonKernels

_LOG = logging.getLogger(__name__)


def load(deterministic: bool = True) -> "TritonKernels":
    """Returns the kernels. ``deterministic``: guarantees the invariance law of ``tandem.kernels.api``. Raises ``UserError``, one line, if
    they cannot run."""
    why = missing()
    if why:
        raise UserError(f"kernels triton: {why}, or use kernels reference")
    return _load(deterministic)


def load_or_none(deterministic: bool = True) -> "TritonKernels | None":
    """Does ``load``, but logs once why the kernels are unavailable."""
    why = missing()
    if why:
        _warn(why)
        return None
    return _load(deterministic)


def missing() -> str:
    """Returns what these kernels need that this machine lacks, and the fix; empty if they can run."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; install 'tandem-rl[gpu]'"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no CUDA device; use a machine that has one"
    return ""


@cache
def _load(deterministic: bool) -> "TritonKernels":
    from tandem.kernels.triton.kernels import TritonKernels

    return TritonKernels(deterministic=deterministic)


@cache
def _warn(why: str) -> None:
    _LOG.warning("kernels triton: %s; using kernels reference, which are slower", why)
