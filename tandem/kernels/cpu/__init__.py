"""The kernels in C++, for fp32 on CPU."""

from tandem.kernels.api import Kernels
from tandem.types import UserError


def load() -> Kernels:
    raise UserError("kernels cpu: the C++ kernels are not built yet; use kernels reference")


def load_or_none() -> Kernels | None:
    return None
