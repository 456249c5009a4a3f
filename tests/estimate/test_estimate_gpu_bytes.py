"""The predicted bytes on a GPU against a calculation by hand."""

from dataclasses import replace

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.gpu_bytes import gpu_saved_bytes, gpu_training_bytes, host_bytes_beside_gpu
from tandem.layout.shapes import ModelShapes, parameter_count

LLAMA = ModelShapes("llama", 100, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)


def test_bytes_of_a_gpu_worked_by_hand() -> None:
    count, tokens = parameter_count(LLAMA), 50
    # In 16 bits: two normed inputs, q|k|v, attention's output, gate|up and their product; the residual stream twice in fp32.
    layer = 2 * (2 * 32 + 64 + 32 + 3 * 48) + 8 * 32 + 4 * 4
    bf16 = TrainerConfig(precision="bf16")
    assert gpu_saved_bytes(LLAMA, bf16, tokens) == tokens * (6 * 32 + 3 * layer)
    logits = tokens * 100 * 16
    assert gpu_training_bytes(LLAMA, bf16, tokens) == 16 * count + 2 * count + tokens * (6 * 32 + 3 * layer) + logits
    offloaded = gpu_training_bytes(LLAMA, replace(bf16, offload="cpu"), tokens)
    assert gpu_training_bytes(LLAMA, bf16, tokens) - offloaded == 8 * count - 6 * (16 << 20)
    assert host_bytes_beside_gpu(LLAMA, replace(bf16, offload="cpu")) == 12 * count + 8 * count
    cut = gpu_training_bytes(LLAMA, bf16, tokens, ParallelConfig(data=2, zero=1))
    assert gpu_training_bytes(LLAMA, bf16, tokens) - cut == 4 * count
