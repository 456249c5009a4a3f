"""Counter-based random numbers: functions of key and position only."""

from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers: torch multiplies modulo 2^64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns float64 [R] in [0, 1) for ``keys[R]`` and ``positions[R]`` int64: number ``positions[r]`` of the SplitMix64 stream
    that starts from ``keys[r]``, independently of the other rows."""
    z = keys + (positions + 1) * _GAMMA
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
