"""The kernels in C++, for fp32 on CPU: built on first use, called through a plain C interface."""

import logging
from functools import cache
from pathlib import Path

from tandem.kernels.api import Kernels
from tandem.kernels.cpu.build import built_library, default_directory
from tandem.types import RunError, UserError

_LOG = logging.getLogger(__name__)


def load(compiler: str = "g++", directory: Path | None = None) -> Kernels:
    """Returns the kernels, built in ``directory`` (default ``~/.cache/tandem/kernels``) if necessary. Raises ``UserError``, one line, if
    they are unavailable."""
    return _load(compiler, directory or default_directory())


def load_or_none(compiler: str = "g++", directory: Path | None = None) -> Kernels | None:
    """Does ``load``, but returns ``None`` where this machine cannot have the kernels, and logs once why. Raises ``RunError`` where that is not
    certain, because the processes of a run must not compute with different kernels."""
    return _load_or_none(compiler, directory or default_directory())[0]


def why_unavailable() -> str:
    """Returns why ``load_or_none`` returns ``None``; empty if it does not."""
    return _load_or_none("g++", default_directory())[1]


@cache
def _load(compiler: str, directory: Path) -> Kernels:
    from tandem.kernels.cpu.kernels import CpuKernels
    from tandem.kernels.cpu.library import Library

    path = built_library(compiler, directory)
    try:
        return CpuKernels(Library(path))
    except OSError as error:
        raise UserError(f"kernels cpu: cannot load {path} ({error}); remove it or use kernels reference") from error


@cache
def _load_or_none(compiler: str, directory: Path) -> tuple[Kernels | None, str]:
    try:
        return _load(compiler, directory), ""
    except RunError:
        raise
    except UserError as error:
        _LOG.warning("%s; using kernels reference, which are slower", error)
        return None, str(error)
