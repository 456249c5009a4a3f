"""The C functions with their types."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "packed_floats": (_N, (_N, _N)),
    "pack": (None, (_P, _N, _N, _P)),
    "linear": (None, (_P, _P, _I, _P, _N, _N, _N, _P)),
    "grouped_linear": (None, (_P, _P, _I, _N, _P, _N, _N, _N, _P)),
    "route": (None, (_P, _N, _N, _N, _I, _P, _P, _P, _P, _P)),
    "linear_grad_x": (None, (_P, _P, _N, _N, _N, _P)),
    "linear_grad_weight": (None, (_P, _P, _N, _N, _N, _I, _P)),
    "linear_grad_bias": (None, (_P, _N, _N, _P)),
    "rms_norm": (None, (_P, _P, _P, _N, _N, _F, _P, _P, _P)),
    "rms_norm_backward": (None, (_P, _P, _P, _P, _P, _N, _N, _P, _P)),
    "silu_mul": (None, (_P, _N, _N, _P)),
    "silu_mul_backward": (None, (_P, _P, _N, _N, _P)),
    "rope": (_I, (_P, _P, _P, _N, _N, _N, _N, _N, _P, _P, _F, _P, _P, _P)),
    "rope_to_cache": (_I, (_P, _P, _P, _N, _N, _N, _N, _N, _P, _P, _F, _P, _P, _P, _N, _P)),
    "rope_backward": (None, (_P, _P, _P, _N, _N, _N, _N, _P, _P, _F, _P, _P, _P, _P, _P)),
    "paged_attention": (_I, (_P, _P, _P, _N, _N, _N, _N, _N, _P, _P, _P, _N, _N, _F, _N, _P)),
    "packed_attention": (_I, (_P, _P, _P, _P, _N, _N, _N, _N, _N, _F, _N, _P, _P)),
    "packed_attention_backward": (None, (_P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _F, _N, _P, _P, _P)),
    "logprobs": (_I, (_P, _P, _N, _N, _F, _P, _P, _P)),
    "logprobs_backward": (None, (_P, _P, _N, _N, _F, _P, _P, _P)),
    "int8_packed_bytes": (_N, (_N, _N)),
    "int8_pack": (None, (_P, _N, _N, _P)),
    "int8_linear": (None, (_P, _P, _P, _P, _N, _N, _N, _P)),
    "coded_bytes": (_N, (_I, _N, _N)),
    "coded_pack": (None, (_I, _P, _N, _N, _P)),
    "coded_linear": (None, (_P, _I, _P, _P, _P, _N, _P, _N, _N, _N, _P)),
    "round_fp8": (None, (_P, _N, _N, _N, _P)),
    "sample": (None, (_P, _N, _N, _P, _P, _P, _P, _P, _P, _P, _P)),
}


class Library:
    """Each C function ``tandem_x`` as the attribute ``x``. A call lets other Python threads run."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"tandem_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...
