"""The predicted bytes of a published model's parts against its model card."""

from tandem.estimate.model_bytes import kv_bytes_per_token, optimizer_bytes, weight_bytes
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes


def test_bytes_of_a_published_model_match_its_checkpoint() -> None:
    # Qwen3-0.6B: 596,049,920 parameters with tied embeddings (its model card: 0.6B, 0.44B without embedding).
    qwen = ModelShapes(
        architecture="qwen3", vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072, max_position_embeddings=40960, tie_word_embeddings=True, qk_norm=True,
    )
    assert parameter_count(qwen) == 596_049_920
    assert weight_bytes(qwen, "bfloat16") == 2 * 596_049_920
    assert weight_bytes(qwen, "bfloat16", 2, 0) + weight_bytes(qwen, "bfloat16", 2, 1) > weight_bytes(qwen, "bfloat16")
    assert kv_bytes_per_token(qwen, "bfloat16") == 2 * 28 * 8 * 128 * 2
    assert kv_bytes_per_token(qwen, "float32", "bfloat16") == 2 * 28 * 8 * 128 * 2
    for name in ("int8", "fp8_e4m3"):
        assert kv_bytes_per_token(qwen, "bfloat16", name) == 2 * 28 * 8 * (128 + 4)
    assert kv_bytes_per_token(qwen, "bfloat16", "int4") == 2 * 28 * 8 * (64 + 4)
    assert optimizer_bytes(qwen) == 8 * 596_049_920
