"""The formats of an engine's weights: their bytes, what they are multiplied in, and what is published of their quality. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.estimate.model_bytes import held_parameters
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError

Quantization = Literal["bf16", "fp16", "fp8", "int8", "int4", "gptq", "awq"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the matrices of layers are stored. ``bits``: of a weight. ``group``: columns that share a scale (0: a whole output channel). ``group_bytes``: of
    the scale and the zero point of a group; ``column_bytes``: of an index for each column. ``multiplies_in``: the precision of products, which decides
    their rate. ``quality``: what is published; ``source``: where. ``loss``: the place in the order of quality, 0 for none; formats of one place are not told
    apart by what is published."""

    name: str
    bits: int
    multiplies_in: str
    group: int = 0
    group_bytes: float = 0.0
    column_bytes: int = 0
    quality: str = ""
    source: str = ""
    loss: int = 0

    def matrix_bytes(self, numbers: float, columns: int) -> float:
        """Returns the bytes of ``numbers`` weights in rows of ``columns``."""
        rows = numbers / columns
        groups = rows * (-(-columns // self.group) if self.group else 1)
        return numbers * self.bits / 8 + groups * self.group_bytes + self.column_bytes * columns


_AWQ_TABLE = "Lin et al., 2023 (AWQ, arXiv 2306.00978), table 4: WikiText-2 perplexity of Llama 2 7B and 70B, groups of 128"
_BF16_PAPER = "Kurtic et al., 2024 (arXiv 2411.02355), abstract: Llama 3.1 8B, 70B and 405B"
FORMATS: Mapping[str, WeightFormat] = {
    each.name: each
    for each in (
        WeightFormat("bf16", 16, "bf16", quality="the reference"),
        WeightFormat("fp16", 16, "fp16", quality="the reference"),
        WeightFormat("fp8", 8, "fp8", group_bytes=4, quality="lossless in the benchmarks of the source", source=_BF16_PAPER, loss=1),
        WeightFormat("int8", 8, "int8", group_bytes=4, quality="1-3 % lower accuracy, if it is well tuned", source=_BF16_PAPER, loss=2),
        WeightFormat(
            "int4", 4, "fp16", group=128, group_bytes=8, quality="perplexity 5.73 for 5.47 (7B), 3.46 for 3.32 (70B), rounded to nearest", source=_AWQ_TABLE,
            loss=4,
        ),
        WeightFormat(
            "gptq", 4, "fp16", group=128, group_bytes=2.5, column_bytes=4,
            quality="perplexity 5.69 for 5.47 (7B), 3.42 for 3.32 (70B)", source=_AWQ_TABLE, loss=3,
        ),
        WeightFormat("awq", 4, "fp16", group=128, group_bytes=2.5, quality="perplexity 5.60 for 5.47 (7B), 3.41 for 3.32 (70B)", source=_AWQ_TABLE, loss=2),
    )
}  # fmt: skip
"""The scales of ``int4`` are Tandem's: an fp32 scale and an fp32 zero point. GPTQ's and AWQ's files have an fp16 scale and a zero point of 4 bits, and
GPTQ's an index of the group of each column."""
UNQUANTIZED = "bfloat16"
"""The dtype of what no format quantizes: embedding, output head, norms, biases, routers."""


def format_named(name: str) -> WeightFormat:
    """Returns the format. Raises ``UserError`` for an unknown name."""
    if name not in FORMATS:
        raise UserError(f"quantization is '{name}'; it must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def quantized_weight_bytes(shapes: ModelShapes, name: str) -> int:
    """Returns the bytes of the weights of a model in format ``name``, on all ranks together."""
    form, held = format_named(name), held_parameters(shapes)
    matrices = sum(numbers for numbers, is_matrix in held if is_matrix)
    rest = sum(numbers for numbers, is_matrix in held if not is_matrix)
    return int(form.matrix_bytes(matrices, shapes.hidden_size)) + 2 * rest
