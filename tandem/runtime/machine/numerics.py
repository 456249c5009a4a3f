"""What the bits of a run depend on besides its recipe. A run records it, and an exact resume is refused where it differs."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tandem.types.errors import UserError

# The extensions by which math libraries choose kernels; other processor flags do not change results.
_EXTENSIONS = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip

_FIXES = {
    "threads": "set machine.threads to {saved}",
    "instruction_set": "resume it on a machine with the same instruction set",
    "torch": "install torch=={saved}",
    "kernels": "set machine.kernels to {saved}",
}


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the machine type and its vector extensions, such as ``x86_64 avx avx2 fma``."""
    flags: set[str] = set()
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags = set(rest.split())
                break
    except OSError:
        pass
    return " ".join([platform.machine(), *(name for name in _EXTENSIONS if name in flags)])


def numerics_record(threads: int, kernels: str) -> dict[str, str | int]:
    """Returns the record of this machine: ``threads`` of a worker, the name of its ``kernels``, the instruction set and the torch build."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"threads": threads, "instruction_set": instruction_set(), "torch": torch, "kernels": kernels}


def check_numerics(saved: Mapping[str, str | int], now: Mapping[str, str | int]) -> None:
    """Raises ``UserError`` with every difference where a resume cannot give the same bits."""
    differences = [
        f"{name.replace('_', ' ')} was '{saved.get(name)}', now '{now.get(name)}' ({fix.format(saved=saved.get(name))})"
        for name, fix in _FIXES.items()
        if saved.get(name) != now.get(name)
    ]
    if differences:
        raise UserError(f"this run cannot be resumed bit for bit: {'; '.join(differences)}")
