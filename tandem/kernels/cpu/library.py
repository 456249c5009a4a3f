"""The C functions with their types."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.types import RunError

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "packed_floats": (_N, (_N, _N)),
    "pack": (None, (_P, _N, _N, _P)),
    "pack_part": (None, (_P, _N, _N, _N, _N, _N, _P)),
    "packed_rows": (_I, (_P, _N, _N, _P, _N, _P)),
    "write_panels": (None, (_P, _N, _N, _P, _P)),
    "copy_and_digest": (None, (_P, _P, _N, _P)),
    "linear": (_I, (_P, _P, _I, _P, _N, _N, _N, _P)),
    "grouped_linear": (_I, (_P, _P, _I, _N, _P, _N, _N, _N, _P)),
    "route": (_I, (_P, _N, _N, _N, _I, _P, _P, _P, _P, _P)),
    "gated_mlp": (_I, (_P, _P, _P, _P, _P, _N, _N, _N, _I, _P)),
    "linear_grad_x": (_I, (_P, _P, _N, _N, _N, _I, _P)),
    "linear_grad_weight": (_I, (_P, _P, _N, _N, _N, _I, _P)),
    "repeated_grad_weight": (_I, (_P, _P, _P, _P, _N, _N, _N, _P)),
    "linear_grad_bias": (None, (_P, _N, _N, _P)),
    "gated_delta": (_I, (_P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _P, _P, _P, _P, _P)),
    "gated_delta_backward": (_I, (_P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _P, _P, _P, _P, _P)),
    "rms_norm": (None, (_P, _P, _P, _N, _N, _N, _F, _I, _P, _P, _P)),
    "rms_norm_backward": (_I, (_P, _P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _I, _P, _P)),
    "gate_mul": (None, (_P, _N, _N, _I, _P)),
    "gate_mul_backward": (None, (_P, _P, _P, _N, _N, _I, _P)),
    "soft_cap": (None, (_P, _N, _N, _F, _P)),
    "soft_cap_backward": (None, (_P, _P, _N, _N, _F, _P)),
    "rope": (_I, (_P, _P, _P, _N, _N, _N, _N, _N, _P, _P, _F, _P, _P, _P)),
    "rope_to_cache": (_I, (_P, _P, _P, _N, _N, _N, _N, _N, _P, _P, _F, _P, _I, _P, _P, _P, _P, _N, _P)),
    "round_kv": (None, (_P, _I, _N, _N, _P)),
    "rope_backward": (_I, (_P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _P, _P, _F, _P, _P, _P, _P, _P)),
    "paged_attention": (_I, (_P, _I, _P, _P, _P, _P, _N, _N, _N, _N, _N, _P, _P, _P, _N, _N, _F, _N, _F, _P, _P)),
    "packed_attention": (_I, (_P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N, _F, _N, _F, _P, _P, _P)),
    "packed_attention_backward": (_I, (_P, _P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _F, _N, _F, _P, _P, _P)),
    "sinks_backward": (None, (_P, _P, _P, _P, _N, _N, _N, _P)),
    "dense_layers": (_I, (_P, _N, _P, _I, _N, _P, _P, _P, _P, _P, _N, _N, _P, _N, _P, _P, _P, _P, _N, _P)),
    "decode_step": (_I, (_P, _N, _P, _I, _P, _P, _P, _P, _N, _P, _P, _P, _P, _N, _P)),
    "record": (_I, (_P, _P, _N, _P, _N, _P, _P, _P, _P)),
    "logprobs": (_I, (_P, _P, _N, _N, _F, _P, _P, _P, _P)),
    "logprobs_backward": (None, (_P, _N, _P, _N, _N, _N, _F, _F, _P, _N, _P, _P, _P)),
    "int8_packed_bytes": (_N, (_N, _N)),
    "int8_pack": (None, (_P, _N, _N, _P)),
    "int8_linear": (_I, (_P, _P, _P, _P, _N, _N, _N, _P)),
    "int8_grouped_linear": (_I, (_P, _P, _N, _P, _P, _N, _N, _N, _P)),
    "int4_packed_bytes": (_N, (_N, _N)),
    "int4_pack": (None, (_P, _N, _N, _P)),
    "int4_linear": (_I, (_P, _P, _P, _P, _N, _P, _N, _N, _N, _P)),
    "int4_grouped_linear": (_I, (_P, _P, _N, _P, _N, _P, _N, _N, _P, _N, _N, _N, _P)),
    "coded_bytes": (_N, (_I, _N, _N)),
    "coded_pack": (None, (_I, _P, _N, _N, _P)),
    "coded_linear": (_I, (_P, _I, _P, _P, _P, _N, _P, _N, _N, _N, _P)),
    "coded_grouped_linear": (_I, (_P, _I, _P, _N, _P, _N, _P, _N, _N, _P, _N, _N, _N, _P)),
    "bf16_has_instruction": (_I, ()),
    "bf16_packed_pairs": (_N, (_N, _N)),
    "bf16_pack": (_I, (_P, _N, _N, _P)),
    "bf16_linear": (_I, (_P, _P, _I, _P, _I, _N, _N, _N, _P)),
    "bf16_gated_mlp": (_I, (_P, _P, _P, _P, _P, _I, _N, _N, _N, _I, _P)),
    "bf16_grouped_linear": (_I, (_P, _P, _I, _N, _P, _N, _I, _N, _N, _P)),
    "bf16_linear_grad_x": (_I, (_P, _P, _N, _N, _N, _I, _I, _P)),
    "bf16_linear_grad_weight": (_I, (_P, _P, _N, _N, _N, _I, _P)),
    "round_fp8": (None, (_P, _N, _N, _N, _P)),
    "sample": (_I, (_P, _N, _N, _P, _P, _P, _P, _P, _P, _P, _P)),
}


_OUT_OF_MEMORY = -1


_NO_MEMORY = (
    b"a kernel could not allocate its working memory; free memory, or make the batch smaller (trainer.micro_batch_tokens, "
    b"rollout.engine.max_num_batched_tokens)"
)
"""A constant, because the library keeps the pointer."""


def _check(code: int, function: Any, arguments: Any) -> int:
    if code == _OUT_OF_MEMORY:
        raise RunError(_NO_MEMORY.decode())
    return code


class Library:
    """Each C function ``tandem_x`` as the attribute ``x``. A call releases the GIL, and raises ``RunError`` if the function could not
    allocate its working memory; its outputs are undefined then. Frequently called functions are builtins of the library itself
    (``direct.h``); the rest are called through ctypes."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        builtins = ctypes.PyDLL(str(path))
        direct = builtins.tandem_direct
        direct.restype, direct.argtypes = ctypes.py_object, (ctypes.c_char_p,)
        builtins.tandem_raise_as.argtypes = (ctypes.py_object, ctypes.c_char_p)
        builtins.tandem_raise_as(RunError, _NO_MEMORY)
        for name, (result, arguments) in _SIGNATURES.items():
            function = direct(name.encode())
            if not function:
                function = getattr(loaded, f"tandem_{name}")
                function.restype, function.argtypes = result, arguments
                if result is _I:
                    function.errcheck = _check
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...
