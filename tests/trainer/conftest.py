"""A tiny model and a random batch of samples for the tests of the trainer."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.types import Batch, TrainSequence

sys.path.insert(0, str(Path(__file__).parent))
SHAPES = ModelShapes(
    architecture="qwen3", vocab_size=41, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=48, max_position_embeddings=128, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model():
    """``make_model(dtype, seed)`` returns the tiny model with random weights, including norms; its shapes ``changed``."""

    def make(dtype=torch.float64, seed=0, kernels="reference", **changed):
        model = Decoder(replace(SHAPES, **changed), select(kernels, dtype), dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)
        return model

    return make


@pytest.fixture
def make_batch():
    """``make_batch(seed, count)`` returns sequences of random lengths, some of them masked completely and others in part."""

    def make(seed=0, count=12, step=0):
        draw = random.Random(seed)
        sequences = []
        for index in range(count):
            prompt, length = draw.randint(1, 9), draw.randint(1, 14)
            before = (0.0,) * prompt
            mask = tuple(float(draw.random() > 0.15) for _ in range(length))
            masked = index % 5 == 4

            def logprobs(length=length, before=before):
                return before + tuple(-draw.uniform(2.5, 5.0) for _ in range(length))

            sequences.append(
                TrainSequence(
                    id=f"{step}/p{index // 4}/{index % 4}",
                    token_ids=tuple(draw.randrange(41) for _ in range(prompt + length)),
                    prompt_length=prompt,
                    loss_mask=before + ((0.0,) * length if masked else mask),
                    advantages=before + (draw.uniform(-2, 2),) * length,
                    rollout_logprobs=logprobs(),
                    sampling_logprobs=logprobs(),
                    reference_logprobs=logprobs(),
                    weight_step=step,
                )
            )
        return Batch(step, tuple(sequences), length_constant=14)

    return make
