"""Sliding windows: blocks outside every layer's window are freed, and no bit changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.config.engine import SpeculativeConfig
from tandem.engine.engine import Engine
from tandem.engine.processing.outputs import CompletionOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PackedContext
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors, to_huggingface
from tandem.model.initialise import initialise

SHAPES = ModelShapes(
    architecture="qwen2", vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=48,
    max_position_embeddings=256, tie_word_embeddings=True, attention_bias=True, layer_windows=(24, 20),
)
PARAMS = SamplingParams(n=2, max_tokens=150, seed=5, temperature=0.8)


def decoder_of(shapes: ModelShapes, kernels: Any = "auto") -> Decoder:
    decoder = Decoder(shapes, select(kernels))
    initialise(decoder, 0)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            if not name.endswith("norm.weight"):
                tensor.mul_(10 if "proj" in name else 3)
    return decoder


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = PARAMS) -> tuple[list[list[CompletionOutput]], int]:
    """Returns the completions, and the peak number of allocated blocks."""
    for key, prompt in enumerate(prompts):
        engine.add_request(str(key), prompt, params, key=key)
    found, most = {}, 0
    while engine.has_unfinished_requests:
        found.update((output.request_id, output.outputs) for output in engine.step())
        engine.check_integrity()
        most = max(most, engine._scheduler.kv_cache.block_pool.num_blocks - engine._scheduler.kv_cache.num_free_blocks)
    return [found[str(key)] for key in range(len(prompts))], most


MISTRAL = replace(SHAPES, architecture="mistral", attention_bias=False, tie_word_embeddings=False, layer_windows=(24, 24))


@pytest.mark.parametrize(("kernels", "shapes"), [("reference", SHAPES), ("auto", SHAPES), ("auto", MISTRAL)], ids=str)
def test_what_is_drawn_over_freed_blocks_has_the_bits_of_the_whole_forward_pass(kernels: str, shapes: ModelShapes) -> None:
    decoder = decoder_of(shapes, kernels)
    prompt = [3 + i % 31 for i in range(70)]
    settings = EngineSettings(256, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)
    plain = Decoder(shapes, select(kernels))
    load_tensors(plain, to_huggingface(decoder))
    (group,), most = run(Engine(decoder, settings), [prompt], replace(PARAMS, max_tokens=60))
    # Each holds the window, the block in which it begins and the one being written; the prompt of 70 needed 5 for a while.
    assert most <= 8
    for completion in group:
        tokens = torch.tensor(prompt + completion.token_ids)
        context = PackedContext(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens))
        with torch.no_grad():
            hidden = plain(tokens, torch.arange(len(tokens)), context)
            logits = plain.logits(hidden[len(prompt) - 1 : -1])
            expected = plain.kernels.logits_logprobs(logits, tokens[len(prompt) :])
        assert completion.raw_logprobs == expected.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 16}, {"num_blocks": 16, "enable_prefix_caching": False}, {"num_blocks": 16, "swap_blocks": 32, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 16}, {"cache_implementation": "static", "num_blocks": 64}, {"ngram": True, "num_blocks": 20},
    ],
    ids=str,
)
def test_settings_change_no_bit(settings: dict[str, Any]) -> None:
    prompts = [[3 + (i * k) % 31 for i in range(20 + 30 * k)] for k in range(1, 4)]
    roomy = EngineSettings(256, num_blocks=128, max_num_seqs=6, max_num_batched_tokens=64)
    engine = Engine(decoder_of(SHAPES), roomy)
    # As if a layer attended to everything: nothing is freed.
    engine._scheduler.kv_cache.window = 0
    expected, most = run(engine, prompts)
    assert most > 60
    settings = dict(settings)
    speculative = SpeculativeConfig("ngram", prompt_lookup_min=1, disable_by_batch_size=64) if settings.pop("ngram", False) else None
    engine = Engine(decoder_of(SHAPES), replace(roomy, **settings), speculative=speculative)
    for _ in range(2):
        found, most = run(engine, prompts)
        assert found == expected
        assert most <= 34 or settings.get("cache_implementation") == "static"


def test_a_model_with_one_layer_that_looks_at_everything_keeps_its_blocks() -> None:
    engine = Engine(decoder_of(replace(SHAPES, layer_windows=(24, None))), EngineSettings(256, num_blocks=64, max_num_seqs=2))
    _, most = run(engine, [[5] * 100], replace(PARAMS, n=1, max_tokens=100))
    assert most == 200 // 16 + 1 - (200 % 16 == 0)
