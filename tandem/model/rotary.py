"""Rotary position embedding (Su et al., 2021): the table of cosines and sines that trainer and engine share.

The steps and their fp32 roundings are transformers', so that the table has the bits a checkpoint was trained with.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.layout.rotary import RopeScaling, Rotary
from tandem.layout.shapes import ModelShapes


def rotary_tables(shapes: ModelShapes, context: int) -> tuple[Tensor, ...]:
    """Returns ``cos_sin[P, D]`` fp32 on CPU of each of ``shapes.rotaries``, for all P positions of a run with this ``context``
    (``ModelShapes.positions_in``): cosines in the first D / 2 columns, sines in the rest; [1, D] of the rotation by nothing, for layers without rotary
    embedding. An attention factor is folded in. Computed on the CPU also where torch's default device is another, whose cosines have other last bits."""
    positions = shapes.positions_in(context)
    with torch.device("cpu"):
        return tuple(_identity(shapes) if rotary is None else _table(shapes, rotary, positions) for rotary in shapes.rotaries)


def _identity(shapes: ModelShapes) -> Tensor:
    half = torch.zeros(1, shapes.rotary_dim // 2)
    return torch.cat((half + 1, half), dim=1)


def _table(shapes: ModelShapes, rotary: Rotary, positions: int) -> Tensor:
    frequencies, attention_factor = inverse_frequencies(rotary.scaling, rotary.theta, shapes.rotated_size, positions)
    angles = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos.mul_(attention_factor), sin.mul_(attention_factor)
    # What is not rotated is rotated by nothing.
    rest = shapes.rotary_dim // 2 - len(frequencies)
    return torch.cat((F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))) if rest else (cos, sin), dim=1)


def rotary_order(shapes: ModelShapes) -> Tensor | None:
    """Returns the order of the columns [(Hq + 2 Hkv) D] int64 of queries, keys and values in which the components of a head that are rotated together are half
    a head apart, as the kernels rotate them, and those that are not rotated fill both halves; ``None`` where they are. Queries and keys in the same order have
    the same products."""
    size, rotated = shapes.rotary_dim, shapes.rotated_size
    if rotated == size and not shapes.rotary_interleaved:
        return None
    of_rotated = torch.arange(rotated).view(-1, 2).t() if shapes.rotary_interleaved else torch.arange(rotated).view(2, -1)
    one = torch.cat((of_rotated, torch.arange(rotated, size).view(2, -1)), dim=1).flatten()
    # Latent attention rotates one part of a key, which all heads share, and no part of its values.
    keys, width = (shapes.num_key_value_heads, shapes.qkv_size) if shapes.latent is None else (1, (shapes.num_attention_heads + 1) * size)
    query_and_keys = shapes.num_attention_heads + keys
    rows = torch.arange(query_and_keys).unsqueeze(1) * size + one
    values = torch.arange(query_and_keys * size, width)
    return torch.cat((rows.flatten(), values))


def inverse_frequencies(scaling: RopeScaling, theta: float, head_dim: int, positions: int = 0) -> tuple[Tensor, float]:
    """Returns the radians per position of each pair, [D / 2] fp32, and the factor on cos and sin, in a run of up to ``positions`` tokens."""
    wavelengths = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / wavelengths
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(wavelengths, scaling, theta, head_dim), _yarn_attention_factor(scaling)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if positions > scaling.original_max_position_embeddings else scaling.short_factors
        return 1.0 / (torch.tensor(factors) * wavelengths), _longrope_attention_factor(scaling)
    return plain, 1.0


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    """Returns the factor of LongRoPE (Ding et al., 2024, as in Phi-3's code), or the checkpoint's own."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings)) if scaling.factor > 1 else 1.0


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Returns the frequencies of Llama 3.1: long wavelengths are stretched by ``factor``, short ones are kept, those between are
    interpolated."""
    context, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    is_long, is_short = wavelength > context / low, wavelength < context / high
    stretched = torch.where(is_long, plain / scaling.factor, plain)
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    return torch.where(is_long | is_short, stretched, blended)


def _yarn(wavelengths: Tensor, scaling: RopeScaling, theta: float, head_dim: int) -> Tensor:
    """Returns the frequencies of YaRN (Peng et al., 2023, section 3.2): a ramp over the dimensions from extrapolation to interpolation."""

    def dimension_of(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    extrapolated = 1.0 / wavelengths
    interpolated = 1.0 / (scaling.factor * wavelengths)
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return interpolated * (1 - kept) + extrapolated * kept


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """Returns the square root of YaRN's temperature (Peng et al., 2023, equation 22), or the checkpoint's own factor."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)
