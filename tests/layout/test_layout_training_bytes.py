"""The predicted bytes of optimizer states and checkpoints against what is really held and written."""

from pathlib import Path

import pytest
import torch

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.bytes import optimizer_bytes, weight_bytes
from tandem.layout.shapes import ExpertShapes, ModelShapes
from tandem.layout.training_bytes import checkpoint_bytes, state_bytes, training_bytes
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.trainer.optimizers import make_optimizer
from tandem.trainer.save import save_checkpoint

MODELS = {
    "llama": ModelShapes("llama", 97, 64, 2, 4, 2, 16, 96, 128, tie_embeddings=False, attention_bias=True),
    "qwen3": ModelShapes("qwen3", 97, 64, 2, 4, 2, 16, 96, 128, tie_embeddings=True, qk_norm=True),
    "moe": ModelShapes("qwen3_moe", 97, 64, 2, 4, 2, 16, 96, 128, tie_embeddings=False, qk_norm=True, experts=ExpertShapes(4, 2, 32)),
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
@pytest.mark.parametrize("name", MODELS)
def test_state_and_checkpoint_have_the_predicted_bytes(name: str, optimizer: str, tmp_path: Path) -> None:
    shapes, config = MODELS[name], TrainerConfig(optimizer=optimizer)  # type: ignore[arg-type]
    model = Decoder(shapes, select("reference"))
    initialise(model, seed=0)
    made = make_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step(1e-3)
    assert sum(t.nbytes for t in made.state().moments.values()) == optimizer_bytes(shapes, optimizer)
    saved = save_checkpoint(tmp_path, 1, model, made, {})
    written = sum(path.stat().st_size for path in saved.folder.glob("*.safetensors"))
    assert 0 <= written - checkpoint_bytes(shapes, config) < 20_000, "the headers"


def test_each_choice_is_counted() -> None:
    shapes = MODELS["qwen3"]
    plain = training_bytes(shapes, TrainerConfig(), 100)
    assert training_bytes(shapes, TrainerConfig(precision="bf16"), 100) - plain > weight_bytes(shapes, "float32")
    assert state_bytes(shapes, TrainerConfig(offload="nvme")) == 16 << 20
    assert optimizer_bytes(shapes, "adamw8bit") < optimizer_bytes(shapes, "muon") < optimizer_bytes(shapes)
