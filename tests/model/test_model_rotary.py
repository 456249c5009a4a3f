"""The rotary table has the bits of transformers."""

import json

import pytest
import torch

from tandem.model.huggingface.model_folder import read_shapes
from tandem.model.rotary import rotary_tables

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.7, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, mscale": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
}  # fmt: skip


@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("rope", ROPES)
def test_table_has_the_bits_of_transformers(rope, theta, peer_model, tmp_path) -> None:
    peer = peer_model(
        "llama", head_dim=32, max_position_embeddings=4096, rope_parameters={**ROPES[rope], "rope_theta": theta}
    )
    peer.config.save_pretrained(tmp_path)
    table = rotary_tables(read_shapes(tmp_path), 1)[0]
    cos, sin = peer.model.rotary_emb(torch.zeros(1), torch.arange(4096).unsqueeze(0))
    assert table.shape == (4096, 32) and table.dtype == torch.float32
    assert torch.equal(table[:, :16], cos[0, :, :16])
    assert torch.equal(table[:, 16:], sin[0, :, :16])


def test_table_does_not_depend_on_the_thread_count(tmp_path) -> None:
    config = {
        "model_type": "qwen3", "vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "intermediate_size": 8, "max_position_embeddings": 40960,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = read_shapes(tmp_path)
    one = rotary_tables(shapes, 1)[0]
    torch.set_num_threads(2)
    assert torch.equal(one, rotary_tables(shapes, 1)[0])
