"""Logits equal those of transformers within 1e-4 in fp32 for every architecture, and folders can be exchanged in both directions."""

import pytest
import torch

from tandem.kernels import select
from tandem.model.huggingface.model_folder import load_model, read_shapes, save_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 24}

QWEN_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without grouping": ("llama", {"num_key_value_heads": 4}),
    "llama one key head": ("llama", {"num_key_value_heads": 1}),
    "llama head size of its own": ("llama", {"head_dim": 32}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows from layer 1": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen2 yarn without truncation": ("qwen2", {"rope_parameters": {**YARN, "truncate": False}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied, default head size": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3 window in every layer": ("qwen3", {"head_dim": 16, **WINDOW, "max_window_layers": 0}),
    "qwen3 mixed layers": (
        "qwen3",
        {
            "head_dim": 16, "num_hidden_layers": 3, **WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 yarn with mscale": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
}  # fmt: skip
CASES |= {
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window, tied": ("mistral", {"sliding_window": 24, "tie_word_embeddings": True}),
    "mistral head size and theta of its own": (
        "mistral", {"sliding_window": None, "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    ),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, **QWEN_EXPERTS}),
    "qwen3_moe tied, normalised gates": (
        "qwen3_moe", {**QWEN_EXPERTS, "tie_word_embeddings": True, "norm_topk_prob": True, "num_experts_per_tok": 5}
    ),
    "qwen3_moe dense layers": (
        "qwen3_moe", {**QWEN_EXPERTS, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    ),
    "qwen3_moe windows, biases": ("qwen3_moe", {**QWEN_EXPERTS, **WINDOW, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 8}),
    "mixtral with one expert a token, tied": (
        "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True}
    ),
    "mixtral window, head size of its own": ("mixtral", {"num_local_experts": 4, "sliding_window": 24, "head_dim": 24}),
    "glm4_moe, every layer dense": (
        "glm4_moe",
        {"num_hidden_layers": 2, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    ),
}  # fmt: skip
LENGTHS = (100, 1, 37)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_in_both_directions(case, peer_model, packed_logits, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model_type, config = CASES[case]
    peer = peer_model(model_type, **config)
    peer.save_pretrained(tmp_path / "theirs")
    sequences = [torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]

    decoder = load_model(tmp_path / "theirs", select("reference"))
    with torch.no_grad():
        for sequence, ours in zip(sequences, packed_logits(decoder, sequences), strict=True):
            theirs = peer(sequence.unsqueeze(0)).logits[0]
            assert theirs.std() > 0.3
            assert (ours - theirs).abs().max() < 1e-4

    save_model(decoder, tmp_path / "ours", eos_token_id=2, bos_token_id=1, pad_token_id=0)
    returned = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    expected = peer.state_dict()
    assert returned.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in returned.state_dict().items())
    with torch.no_grad():
        assert torch.equal(returned(sequences[0].unsqueeze(0)).logits, peer(sequences[0].unsqueeze(0)).logits)
    assert returned.config.eos_token_id == returned.generation_config.eos_token_id == 2
    assert read_shapes(tmp_path / "ours") == decoder.shapes


def test_windows_change_the_logits_that_the_grid_compares(peer_model) -> None:
    """The lengths exceed the windows: otherwise the window cases would test nothing."""
    peer = peer_model("qwen3", head_dim=16, **WINDOW, max_window_layers=0)
    full = peer_model("qwen3", head_dim=16)
    full.load_state_dict(peer.state_dict())
    tokens = torch.randint(0, 61, (1, LENGTHS[0]))
    with torch.no_grad():
        difference = (peer(tokens).logits - full(tokens).logits)[0].abs().amax(-1)
    assert difference[:20].max() < 1e-4 < difference[30:].max()


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
def test_half_precision_weights_keep_their_values(model_type, peer_model, tmp_path) -> None:
    peer = peer_model(model_type, head_dim=16).to(torch.bfloat16)
    peer.save_pretrained(tmp_path / "theirs")
    decoder = load_model(tmp_path / "theirs", select("reference"))
    assert decoder.embed_tokens.dtype == torch.float32
    assert torch.equal(decoder.embed_tokens, peer.model.embed_tokens.weight.float())
    assert torch.equal(decoder.head_weight, peer.lm_head.weight.float())


def test_shards_are_read_like_one_file(peer_model, packed_logits, tmp_path) -> None:
    peer = peer_model("llama")
    peer.save_pretrained(tmp_path / "one")
    peer.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    tokens = [torch.arange(20)]
    one, shards = (
        packed_logits(load_model(tmp_path / name, select("reference")), tokens)[0] for name in ("one", "shards")
    )
    assert torch.equal(one, shards)
