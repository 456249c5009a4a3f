"""The check of ``test_model_bits`` over random shapes, lengths and schedules."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.kernels import Kernels
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors, to_huggingface

Run = Callable[..., list[Tensor]]


def random_shapes(draw: random.Random) -> ModelShapes:
    architecture = draw.choice(("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "mistral"))
    kv_heads, layers = draw.choice((1, 2, 3)), draw.randint(1, 3)
    biased = architecture == "qwen2" or (draw.random() < 0.4 and architecture != "mistral")
    inner, experts = draw.randint(1, 300), draw.randint(1, 70)
    mixture = ExpertShapes(experts, draw.randint(1, min(8, experts)), inner)
    windows = tuple(draw.choice((None, 1, 5, 16, 33, 100)) for _ in range(layers))
    return ModelShapes(
        architecture=architecture,
        vocab_size=draw.randint(3, 300),
        hidden_size=draw.randint(1, 160),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * draw.choice((1, 2, 3, 4)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw.randint(1, 64),
        intermediate_size=inner,
        max_position_embeddings=256,
        tie_word_embeddings=draw.random() < 0.5,
        rope_scaling=draw.choice((RopeScaling(), RopeScaling("yarn", 4.0, original_max_position_embeddings=64))),
        attention_bias=biased,
        output_bias=biased and architecture != "qwen2",
        mlp_bias=architecture == "llama" and biased,
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        layer_windows=() if architecture == "llama" else windows,
        experts=mixture if architecture in ("qwen3_moe", "mixtral") else None,
    )


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_engine_and_trainer_agree_bit_for_bit_at_random_shapes(
    seed: int, kernels: Kernels, packed_logits: Run, paged_logits: Run
) -> None:
    draw = random.Random(seed)
    shapes = random_shapes(draw)
    generator = torch.Generator().manual_seed(seed)
    trainer, engine = Decoder(shapes, kernels), Decoder(shapes, kernels)
    with torch.no_grad():
        for _, tensor in to_huggingface(trainer):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator) + (tensor.dim() == 1))
    load_tensors(engine, to_huggingface(trainer))
    engine.pack()
    lengths = [draw.choice((1, 2, 15, 16, 17, 63, 64, 65, 129, 200)) for _ in range(draw.randint(1, 7))]
    sequences = [torch.randint(0, shapes.vocab_size, (n,), generator=generator) for n in lengths]
    everyone = range(len(lengths))
    steps = [
        [(s, draw.choice((1, 1, 2, 9, 40))) for s in draw.sample(everyone, draw.randint(1, len(lengths)))]
        for _ in range(50)
    ]
    trained = packed_logits(trainer, sequences)
    decoded = paged_logits(engine, sequences, [[(s, 1) for s in everyone]] * max(lengths), seed)
    mixed = paged_logits(engine, sequences, [*steps, [(s, 1000) for s in everyone]], seed)
    for ours, one_by_one, in_chunks in zip(trained, decoded, mixed, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, one_by_one), shapes
        assert torch.equal(ours, in_chunks), shapes
