"""LoRA adapters with random weights in the format of PEFT, models with a merged adapter, and PEFT's linear layer in float64."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SCALE = 2.0


def write_adapter(folder: Path, sizes: Mapping[str, tuple[int, int]], seed: int, rank: int) -> Path:
    """Writes an adapter of ``rank`` for two layers; ``sizes``: the (rows, columns) of each adapted matrix by its module's name."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(2):
        for module, (rows, columns) in sizes.items():
            part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            tensors[f"{name}.lora_A.weight"] = 0.3 * torch.randn(rank, columns, generator=generator)
            tensors[f"{name}.lora_B.weight"] = 0.3 * torch.randn(rows, rank, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_merged(base: Path, adapter: Path, to: Path) -> Path:
    """Writes the model in ``base`` with the products of ``adapter`` added to its weights, in float64."""
    weights, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in factors if ".lora_A." in name]:
        change = SCALE * factors[name.replace("lora_A", "lora_B")].double() @ factors[name].double()
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[target] = (weights[target].double() + change).float()
    to.mkdir()
    for file in base.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


class PeftLinear(nn.Module):
    """``result = base_layer(x) + lora_B(lora_A(x)) * scaling`` in float64, as PEFT's ``lora.Linear`` without dropout."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        self.lora_A, self.lora_B = nn.Parameter(a.double()), nn.Parameter(b.double())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling
        return result


def adapt(model: nn.Module, adapter: Mapping[str, Tensor], scaling: float) -> nn.Module:
    """Freezes ``model`` and puts a ``PeftLinear`` around every linear layer that ``adapter``, by names of transformers, has matrices for."""
    model.requires_grad_(False)
    for module in sorted({name.partition(".lora_")[0] for name in adapter}):
        parent, _, leaf = module.rpartition(".")
        a, b = (adapter[f"{module}.lora_{side}.weight"].clone() for side in "AB")
        setattr(model.get_submodule(parent), leaf, PeftLinear(model.get_submodule(module), a, b, scaling))
    return model
