"""The ``Dense`` modules of Sentence Transformers, in fp32."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.kernels.mixed import whole_precision
from tandem.model.huggingface.dense_module import WEIGHTS, DenseModule
from tandem.model.huggingface.safetensors_file import read_file
from tandem.types import UserError

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x, "Tanh": torch.tanh, "ReLU": torch.relu, "Sigmoid": torch.sigmoid, "GELU": torch.nn.functional.gelu,
    "SiLU": torch.nn.functional.silu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dense:
    """One layer: ``weight[out, in]`` and ``bias[out]``."""

    module: DenseModule
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def load(cls, module: DenseModule, width: int, device: torch.device) -> "Dense":
        """Returns the layer with its weights, for vectors of ``width`` components. Raises ``UserError`` for weights of other shapes."""
        if module.in_features != width:
            raise UserError(f"'{module.folder}' has in_features {module.in_features} and the vectors before it have {width}")
        path = module.folder / WEIGHTS
        tensors = dict(read_file(path))
        wanted = {"linear.weight": (module.out_features, module.in_features)} | ({"linear.bias": (module.out_features,)} if module.has_bias else {})
        if set(tensors) != set(wanted):
            raise UserError(f"'{path}' has the tensors {', '.join(sorted(tensors))[:200]}; a Dense module has {', '.join(wanted)}")
        for name, shape in wanted.items():
            if tuple(tensors[name].shape) != shape:
                raise UserError(f"'{path}': tensor '{name}' is {list(tensors[name].shape)} and config.json says {list(shape)}; download the folder again")
        placed = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        return cls(module, placed["linear.weight"], placed.get("linear.bias"))

    def __call__(self, kernels: Kernels, vectors: Tensor) -> Tensor:
        """Returns ``vectors[N, in]`` through the layer, [N, out]; the bits of each depend on it alone."""
        product = whole_precision(kernels).linear(vectors.to(torch.float32), self.weight, self.bias)
        return _ACTIVATIONS[self.module.activation](product)
