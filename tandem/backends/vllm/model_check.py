"""What models vLLM draws samples of here. Imports neither it nor torch."""

from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those that vLLM 0.32 has an attention kernel for on a CPU."""


def check_model(shapes: ModelShapes, device: str) -> None:
    """Raises ``UserError`` for a model whose weights are not read back from vLLM, or that it has no kernel for on ``device``: it would end in its first
    step."""
    if shapes.experts is not None:
        raise UserError("the model has a mixture of experts, whose weights are not read back from vLLM in this version; set rollout.backend to tandem")
    if device == "cpu" and shapes.head_dim not in CPU_HEAD_SIZES:
        raise UserError(
            f"the model has heads of {shapes.head_dim} values, for which vLLM has no attention on a CPU (it has {', '.join(map(str, CPU_HEAD_SIZES))}); set "
            "rollout.backend to tandem"
        )
