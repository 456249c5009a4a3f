"""The matrices of the program of dense layers: the formats that ``dense_matrix.cpp`` computes, and their description for it."""

from ctypes import Structure, c_int64, c_void_p

from torch import Tensor

from tandem.kernels.api import PackedWeight
from tandem.kernels.cpu.quantized import KINDS
from tandem.kernels.dense_layers import DenseProduct
from tandem.kernels.quantized import PackedQuantized

_PACKED, _INT8_INTEGERS, _INT4_INTEGERS, _CODED = range(4)
"""The formats of dense_matrix.h."""


class Matrix(Structure):
    """The structure of dense_matrix.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("data", "bias", "scales", "zeros", "order")),
        *((name, c_int64) for name in ("rows", "columns", "format", "group", "fp8_group")),
    )


def has_format(weight: PackedWeight | PackedQuantized) -> bool:
    """Returns whether ``dense_matrix.cpp`` computes products with ``weight``: all that the kernels pack, but codes that are decoded and multiplied with
    inputs in int8."""
    return isinstance(weight, PackedWeight) or weight.is_integer_product or weight.inputs != "int8"


def described(product: DenseProduct) -> Matrix:
    """Describes ``product``, whose tensors must live as long."""
    weight, bias = product
    if isinstance(weight, PackedWeight):
        return Matrix(weight.data.data_ptr(), _at(bias), None, None, None, weight.rows, weight.columns, _PACKED, 0, 0)
    if weight.is_integer_product:
        form = _INT4_INTEGERS if weight.kind == "int4" else _INT8_INTEGERS
    else:
        form = _CODED + KINDS[weight.kind]
    fp8_group = (weight.input_group or weight.columns) if weight.inputs == "float8_e4m3" else 0
    tensors = weight.data, bias, weight.scales, weight.zeros, weight.order
    return Matrix(*map(_at, tensors), weight.rows, weight.columns, form, weight.group_size, fp8_group)


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
