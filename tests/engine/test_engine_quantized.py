"""Batch invariance with quantized weights, and updates that are quantized as they arrive."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.kernels.quantized import PackedQuantized
from tandem.model.huggingface.model_folder import load_model, to_huggingface
from tandem.model.quantization.quantize import QuantizeOptions, quantize_folder
from tandem.types import UserError, WeightVersion

PROMPTS = ["q", "sort 4 1 9 2", "the quick brown fox jumps over the lazy dog", "a prompt of 16 ch", "x" * 48]
PARAMS = SamplingParams(n=2, max_tokens=50, seed=11, temperature=0.9, top_p=0.95, ignore_eos=True)
KINDS = ["int8", "int8+head", "fp8", "int4", "awq", "gptq"]
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def make_quantised(make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """``make_quantised(kind, **engine settings)`` returns an engine with a float folder quantized as it is loaded, or a quantized
    folder."""
    folders: dict[str, Path] = {}

    def make(kind: str, **settings: Any) -> LLM:
        settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **settings}
        if kind not in ("awq", "gptq"):
            return LLM(make_folder("qwen3", 0), quantization=kind, **settings)
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("quantised") / kind
            tokens = list(torch.randint(0, 40, (4, 64), generator=torch.Generator().manual_seed(0)))
            options = QuantizeOptions(kind, group_size=32, act_order=kind == "gptq")  # type: ignore[arg-type]
            quantize_folder(make_folder("qwen3", 0), folders[kind], options, select("reference"), tokens, lambda *at: None)
        return LLM(folders[kind], **settings)

    return make


def generate(llm: LLM, prompts: list[str] = PROMPTS, keys: list[int] | None = None) -> list[list[CompletionOutput]]:
    answers = llm.generate(prompts, PARAMS, request_keys=keys)
    llm.engine.check_integrity()
    return [answer.outputs for answer in answers]


@pytest.mark.parametrize(("kind", "kernels"), [
    *((kind, "auto") for kind in KINDS), pytest.param("w4a8", "auto", marks=pytest.mark.full),
    *(pytest.param(kind, "reference", marks=pytest.mark.full) for kind in KINDS),
])
def test_batches_chunks_cache_and_preemption_change_no_bit(make_quantised: Make, kind: str, kernels: str) -> None:
    llm = make_quantised(kind, kernels=kernels)
    expected = generate(llm)
    assert generate(llm) == expected, "warm cache"
    alone = [generate(make_quantised(kind, kernels=kernels, enable_prefix_caching=False), [p], [k])[0] for k, p in enumerate(PROMPTS)]
    assert alone == expected, "alone"
    for settings in (
        {"max_num_batched_tokens": 23},
        {"max_num_seqs": 2, "max_num_batched_tokens": 5},
        {"kv_cache_tokens": 128, "enable_prefix_caching": False, "max_num_batched_tokens": 17},
        {"kv_cache_tokens": 128, "swap_space": 2**-12, "preemption_mode": "swap"},
        {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}, "kv_cache_tokens": 128},
        {"max_num_batched_tokens": 128, "enable_chunked_prefill": False},
        {
            "kv_cache_tokens": 128, "swap_space": 2**-12, "preemption_mode": "swap",
            "speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "disable_by_batch_size": 64},
        },
    ):
        assert generate(make_quantised(kind, kernels=kernels, **settings)) == expected, settings


@pytest.mark.parametrize("kind", ["int8", "awq"])
def test_with_quantised_keys_and_values_too_nothing_changes_a_bit(make_quantised: Make, kind: str) -> None:
    expected = generate(make_quantised(kind, kv_cache_dtype="int8"))
    assert expected != generate(make_quantised(kind))
    for settings in ({"max_num_batched_tokens": 23}, {"kv_cache_tokens": 128, "enable_prefix_caching": False}):
        assert generate(make_quantised(kind, kv_cache_dtype="int8", **settings)) == expected, settings


def test_a_quantised_folder_has_digests_for_a_server(make_quantised: Make) -> None:
    llm = make_quantised("awq", digest_weights=True)
    assert len(llm.engine.weight_digests) > 10
    assert generate(llm) == generate(make_quantised("awq"))


def test_int8_engines_agree_with_and_without_a_compiler_on_what_they_draw(make_quantised: Make) -> None:
    one, other = (generate(make_quantised("int8", kernels=kernels)) for kernels in ("reference", "cpu"))
    tokens = [[[c.token_ids for c in group] for group in side] for side in (one, other)]
    same = sum(a == b for left, right in zip(*tokens, strict=True) for a, b in zip(left, right, strict=True))
    assert same >= 8, "of ten completions: everything but the integer products may differ in the last bit"


@pytest.mark.parametrize("kind", ["int8", "int8+head", "fp8", "int4"])
def test_the_matrices_are_really_quantised_and_the_outputs_move_a_little(
    make_quantised: Make, make_llm: Make, kind: str
) -> None:
    llm = make_quantised(kind)
    decoder = llm.engine.decoder
    assert decoder._packed is not None
    for step in decoder._packed:
        assert all(isinstance(matrix, PackedQuantized) for matrix in (step.qkv, step.output, step.gate_up, step.down))
    assert isinstance(decoder._packed_head, PackedQuantized) == kind.endswith("head")
    scored = SamplingParams(max_tokens=1, temperature=0)
    ours, plain = (m.generate(PROMPTS, scored) for m in (llm, make_llm()))
    differences = [
        abs(a.outputs[0].raw_logprobs[0] - b.outputs[0].raw_logprobs[0])
        for a, b in zip(ours, plain, strict=True)
        if a.outputs[0].token_ids == b.outputs[0].token_ids
    ]
    assert differences
    assert max(differences) > 0


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "awq"])
def test_an_update_in_plain_tensors_is_rounded_on_arrival(
    make_quantised: Make, make_folder: Callable[..., Path], kind: str
) -> None:
    llm = make_quantised(kind)
    before = generate(llm)
    new = load_model(make_folder("qwen3", 5), select("reference"))
    llm.update_weights([(name, tensor.to(torch.float32)) for name, tensor in to_huggingface(new)], WeightVersion(0, 1))
    after = generate(llm)
    assert after != before
    decoder = llm.engine.decoder
    assert decoder._packed is not None
    assert isinstance(decoder._packed[0].qkv, PackedQuantized)
    if kind != "awq":
        fresh = LLM(make_folder("qwen3", 5), quantization=kind, max_num_seqs=16, max_num_batched_tokens=64, weight_version=WeightVersion(0, 1))
        assert after == generate(fresh)
        dummy = LLM(make_folder("qwen3", 0), quantization=kind, load_format="dummy", max_num_seqs=16, max_num_batched_tokens=64)
        dummy.update_weights(to_huggingface(new), WeightVersion(0, 1))
        assert after == generate(dummy)


def test_an_update_that_does_not_fit_leaves_the_quantised_weights(make_quantised: Make) -> None:
    llm = make_quantised("int8")
    before = generate(llm)
    with pytest.raises(UserError, match="missing"):
        llm.update_weights([("model.norm.weight", torch.ones(32))], WeightVersion(0, 1))
    assert generate(llm) == before


def test_what_cannot_go_together_is_one_clear_line(make_quantised: Make, make_folder: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="quantization is 'int3'"):
        make_quantised("int3")
    awq = make_quantised("awq")._tokenizer_folder
    with pytest.raises(UserError, match=r"quantised already \(awq\); leave quantization out, or 'w4a8'"):
        LLM(awq, quantization="int8")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_the_inputs_of_a_folder_in_int4_are_rounded_where_w4a8_is_asked_for(make_quantised: Make, kind: str) -> None:
    plain, folder = make_quantised(kind), make_quantised(kind)._tokenizer_folder
    engines = [LLM(folder, quantization="w4a8", kernels=kernels, max_num_seqs=16, max_num_batched_tokens=64) for kernels in ("auto", "reference")]
    for llm in engines:
        packed = llm.engine.decoder._packed[0].qkv
        assert isinstance(packed, PackedQuantized) and packed.is_integer_product
    assert generate(engines[0]) != generate(plain)
    drawn = [[list(output.token_ids) for output in outputs] for outputs in generate(engines[0])]
    assert drawn == [[list(output.token_ids) for output in outputs] for outputs in generate(engines[1])]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8+head", pytest.param("awq", marks=pytest.mark.full), pytest.param("gptq", marks=pytest.mark.full)])
def test_two_ranks_hold_half_of_the_quantised_rows_each_and_have_the_bits_of_one(
    make_quantised: Make, make_folder: Callable[..., Path], kind: str
) -> None:
    one = make_quantised(kind)
    expected = generate(one)
    new = list(to_huggingface(load_model(make_folder("qwen3", 5), select("reference"))))
    with contextlib.closing(make_quantised(kind, tensor_parallel_size=2, kv_cache_tokens=128, max_num_batched_tokens=23)) as two:
        assert two.engine.decoder._packed is not None
        packed = two.engine.decoder._packed[0].output
        assert isinstance(packed, PackedQuantized)
        assert packed.rows * 2 == one.engine.decoder.shapes.hidden_size
        assert generate(two) == expected
        for llm in (one, two):
            llm.update_weights(new, WeightVersion(0, 1))
        assert generate(two) == generate(one) != expected


def test_quantised_weights_are_not_cut_through_their_columns(make_quantised: Make) -> None:
    with pytest.raises(UserError, match="cut by rows only"):
        make_quantised("int8", tensor_parallel_size=2, deterministic=False)


MIXTURES = ["qwen2_moe", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next", "deepseek_v3"))]


def in_other_batches(make: Callable[..., LLM]) -> list[list[CompletionOutput]]:
    """Returns the answers of an engine, which are the same in other batches, chunks and blocks."""
    expected = generate(make())
    assert generate(make(max_num_seqs=2, max_num_batched_tokens=5, enable_prefix_caching=False), PROMPTS[2:4], [2, 3]) == expected[2:4]
    assert generate(make(kv_cache_tokens=256, max_num_batched_tokens=23)) == expected
    return expected


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.full), pytest.param("fp8", marks=pytest.mark.full)])
def test_experts_are_quantised_as_they_are_loaded_and_updated(make_folder: Callable[..., Path], family: str, kind: str) -> None:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    llm = LLM(make_folder(family, 0), quantization=kind, **settings)
    experts = [step.experts for step in llm.engine.decoder._packed or () if step.experts is not None]
    assert experts and all(isinstance(matrix, PackedQuantized) for each in experts for matrix in (each.gate_up, each.down))
    before = in_other_batches(lambda **other: LLM(make_folder(family, 0), quantization=kind, **{**settings, **other}))
    new = load_model(make_folder(family, 5), select("reference"))
    llm.update_weights(list(to_huggingface(new)), WeightVersion(0, 1))
    fresh = LLM(make_folder(family, 5), quantization=kind, weight_version=WeightVersion(0, 1), **settings)
    assert generate(llm) == generate(fresh) != before


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "gpt_oss", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("method", ["int8", "fp8", "rtn"])
def test_two_ranks_of_a_quantised_mixture_have_the_bits_of_one(make_folder: Callable[..., Path], tmp_path: Path, family: str, method: Any) -> None:
    quantize_folder(make_folder(family, 0), tmp_path / "model", QuantizeOptions(method, group_size=32), select("reference"), [], lambda *at: None)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    expected = in_other_batches(lambda **other: LLM(tmp_path / "model", **{**settings, **other}))
    with contextlib.closing(LLM(tmp_path / "model", tensor_parallel_size=2, **settings)) as two:
        assert generate(two) == expected
    assert generate(LLM(make_folder(family, 0), **settings)) != expected
