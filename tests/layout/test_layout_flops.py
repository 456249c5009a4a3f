"""Model FLOPs against a calculation by hand and against torch's counter over transformers' model."""

from dataclasses import replace

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.flops import matrix_parameters, step_flops
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes

LLAMA = ModelShapes("llama", 100, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)


def test_the_formula_is_that_of_palm_worked_by_hand() -> None:
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48
    assert matrix_parameters(LLAMA) == 3 * layer + 100 * 32
    # 6 N + 12 L H Q T a token (Chowdhery et al., 2022, appendix B), with H Q = 32.
    assert step_flops(LLAMA, [10]) == 10 * (6 * (3 * layer + 3200) + 12 * 3 * 32 * 10)
    assert step_flops(LLAMA, [10, 5]) == step_flops(LLAMA, [10]) + step_flops(LLAMA, [5])
    assert step_flops(replace(LLAMA, tie_word_embeddings=True), [10]) == step_flops(LLAMA, [10])


def test_windows_and_experts_count_what_a_token_meets() -> None:
    windowed = replace(LLAMA, layer_windows=(4, None, None))
    assert step_flops(LLAMA, [10]) - step_flops(windowed, [10]) == 10 * 12 * 32 * 6
    moe = replace(LLAMA, architecture="mixtral", experts=ExpertShapes(8, 2, 24))
    assert matrix_parameters(moe) - 3 * (32 * 64 + 32 * 32) - 3200 == 3 * 32 * (8 + 3 * 2 * 24)


def test_latent_attention_in_its_absorbed_form_multiplies_compressed_vectors() -> None:
    latent = LatentAttention(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    shapes = replace(LLAMA, num_key_value_heads=4, head_dim=24, latent=latent)
    # By hand: a head multiplies 16 + 8 and 12 numbers of expanded keys and values, or the row of 32 + 8 and its first 32.
    assert step_flops(shapes, [10, 5], absorbed=True) - step_flops(shapes, [10, 5]) == 6 * 3 * 4 * ((40 + 32) - (24 + 12)) * (10 * 10 + 5 * 5)
    assert step_flops(LLAMA, [10], absorbed=True) == step_flops(LLAMA, [10])


def test_linear_attention_has_the_operations_of_its_states_for_each_token_and_softmax_attention_those_of_its_gates() -> None:
    linear = LinearAttention((0, 2), num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, kernel_size=3)
    shapes = replace(LLAMA, attention_gate=True, linear_attention=linear)
    # By hand: channels 2 x 2 x 6 + 4 x 5 = 44, gates of 4 x 5, and 8 logits; queries with gates are 2 x 32 rows.
    layers = 2 * (32 * (44 + 20 + 8) + 20 * 32) + 32 * (64 + 2 * 16) + 32 * 32 + 3 * 3 * 32 * 48
    assert matrix_parameters(shapes) == layers + 3200
    # Of a head and token three products with its 6 x 5 matrix (read, corrected, read), and 3 taps of each channel; two operations each, in three passes.
    recurrent = 2 * 3 * (3 * 2 * 4 * 6 * 5 + 2 * 3 * 44)
    assert step_flops(shapes, [10]) == 10 * (6 * (layers + 3200) + 12 * 32 * 10 + recurrent)
    assert step_flops(shapes, [20]) - 2 * step_flops(shapes, [10]) == 12 * 32 * (20 * 20 - 2 * 10 * 10), "one layer sees what is before a token"


def test_torch_counts_the_same_operations_in_transformers_model() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    assert counter.get_total_flops() == step_flops(LLAMA, [16, 16])
