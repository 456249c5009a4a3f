"""``tandem serve`` and ``tandem generate`` take every option of ``EngineArgs``."""

import dataclasses
from typing import Any

import pytest

from tandem.cli.engine_options import engine_args
from tandem.cli.main import parser
from tandem.config.engine import EngineArgs, SpeculativeConfig
from tandem.config.pooling import PoolerConfig
from tandem.types import UserError

GIVEN: dict[str, tuple[Any, ...]] = {
    "verify": ("--verify",),
    "download_dir": ("--download-dir", "cache"),
    "weight_cache_gib": ("--weight-cache-gib", "0.5"),
    "dtype": ("--dtype", "bfloat16"),
    "quantization": ("--quantization", "int8+head"),
    "device": ("--device", "cuda:1"),
    "kernels": ("--kernels", "reference"),
    "attention": ("--attention", "flash3"),
    "deterministic": ("--no-deterministic",),
    "max_model_len": ("--max-model-len", "77"),
    "max_num_seqs": ("--max-num-seqs", "7"),
    "max_num_batched_tokens": ("--max-num-batched-tokens", "99"),
    "batching": ("--batching", "dynamic"),
    "enable_chunked_prefill": ("--no-enable-chunked-prefill",),
    "enable_prefix_caching": ("--no-enable-prefix-caching",),
    "cache_implementation": ("--cache-implementation", "static"),
    "kv_cache_tokens": ("--kv-cache-tokens", "1024"),
    "kv_cache_dtype": ("--kv-cache-dtype", "int8"),
    "preemption_mode": ("--preemption-mode", "swap"),
    "swap_space": ("--swap-space", "2"),
    "watermark": ("--watermark", "0.25"),
    "tensor_parallel_size": ("--tensor-parallel-size", "2"),
    "rank_timeout_s": ("--rank-timeout-s", "9.5"),
    "enable_lora": ("--enable-lora",),
    "max_loras": ("--max-loras", "3"),
    "max_lora_rank": ("--max-lora-rank", "5"),
    "speculative_config": ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    "async_scheduling": ("--no-async-scheduling",),
    "enforce_eager": ("--enforce-eager",),
    "seed": ("--seed", "8"),
    "convert": ("--convert", "embed"),
    "pooler_config": ("--pooler-config", '{"pooling_type": "MEAN"}'),
    "hf_overrides": ("--hf-overrides", '{"is_matryoshka": true}'),
    "tokenizer": ("--tokenizer", "folder"),
    "otlp_traces_endpoint": ("--otlp-traces-endpoint", "https://collector:4317"),
    "otlp_traces_protocol": ("--otlp-traces-protocol", "grpc"),
    "revision": ("--revision", "v1"),
    "generation_config": ("--generation-config", "vllm"),
    "override_generation_config": ("--override-generation-config", '{"top_k": 3}'),
}
OWN: dict[str, set[str]] = {"serve": set(), "generate": {"enable_lora", "max_loras", "max_lora_rank", "convert", "pooler_config", "hf_overrides"}}
EXPECTED = EngineArgs(
    model="m", verify=True, download_dir="cache", weight_cache_gib=0.5, dtype="bfloat16", quantization="int8+head", device="cuda:1", kernels="reference",
    attention="flash3", deterministic=False, max_model_len=77, max_num_seqs=7, max_num_batched_tokens=99, batching="dynamic",
    enable_chunked_prefill=False, enable_prefix_caching=False, cache_implementation="static", kv_cache_tokens=1024, kv_cache_dtype="int8",
    preemption_mode="swap", swap_space=2.0, watermark=0.25, tensor_parallel_size=2, rank_timeout_s=9.5, enable_lora=True, max_loras=3, max_lora_rank=5,
    speculative_config=SpeculativeConfig("ngram", num_speculative_tokens=3), async_scheduling=False, enforce_eager=True, seed=8, tokenizer="folder",
    revision="v1", generation_config="vllm", override_generation_config={"top_k": 3},
    convert="embed", pooler_config=PoolerConfig("MEAN"), hf_overrides={"is_matryoshka": True},
    otlp_traces_endpoint="https://collector:4317", otlp_traces_protocol="grpc",
)  # fmt: skip


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_field_is_an_option(command: str) -> None:
    # gpu_memory_utilization is instead of kv_cache_tokens, and max_prefill_slowdown goes with chunked prefill; runner is what the
    # command is for, or auto; precision goes with fp32 weights,
    # and model_impl and trust_remote_code with plain ones on one rank.
    others = {
        "model", "load_format", "skip_tokenizer_init", "gpu_memory_utilization", "max_prefill_slowdown", "runner", "precision", "model_impl",
        "trust_remote_code",
    }  # fmt: skip
    assert GIVEN.keys() | others == {field.name for field in dataclasses.fields(EngineArgs)}
    assert engine_args(parser().parse_args([command, "m", "--max-prefill-slowdown", "3.5"]), model="m").max_prefill_slowdown == 3.5
    assert engine_args(parser().parse_args([command, "m", "--precision", "bf16"]), model="m").precision == "bf16"
    by_module = engine_args(parser().parse_args([command, "m", "--model-impl", "transformers", "--trust-remote-code"]), model="m")
    assert by_module == EngineArgs(model="m", model_impl="transformers", trust_remote_code=True)
    words = [word for name, given in GIVEN.items() if name not in OWN[command] for word in given]
    args = engine_args(parser().parse_args([command, "m", *words]), model="m")
    defaults = EngineArgs()
    assert args == dataclasses.replace(EXPECTED, **{name: getattr(defaults, name) for name in OWN[command]})
    assert engine_args(parser().parse_args([command, "m"]), model="m") == EngineArgs(model="m")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--batching", "none"), "invalid choice: 'none'"),
        (("--max-num-seqs", "many"), "'many' is not a whole number"),
        (("--max-num-seqs", "0"), "engine max_num_seqs is 0; it must be at least 1"),
        (("--speculative-config", "ngram"), "--speculative-config is not JSON"),
        (("--speculative-config", "[]"), "it must be a JSON object"),
        (("--speculative-config", '{"metod": "ngram"}'), "did you mean 'engine.speculative_config.method'?"),
        (("--gpu-memory-utilization", "90"), "it must be above 0 and at most 1"),
        (("--gpu-memory-utilization", ".9", "--device", "cuda", "--kv-cache-tokens", "64"), "each sets the size of the KV cache; leave one of them out"),
        (("--override-generation-config", "[]"), "--override-generation-config is []; it must be a JSON object"),
        (("--otlp-traces-endpoint", "collector:4317"), "engine otlp_traces_endpoint is 'collector:4317'; give the address of a collector"),
        (("--dtype", "bfloat16", "--precision", "bf16"), "engine precision is 'bf16', which computes over fp32 weights, and dtype is 'bfloat16'"),
        (("--attention", "flash3"), "engine attention is 'flash3', which needs a GPU and 16 bits"),
        (("--async-scheduling", "--tensor-parallel-size", "2"), "tensor-parallel ranks follow each step"),
    ],
)
def test_a_wrong_value_is_one_line(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as caught:
        engine_args(parser().parse_args(["serve", "m", *words]), model="m")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_generate_draws_the_same_from_static_batches_over_static_kv(command: Any, model: Any) -> None:
    given = ("generate", model, "--prompt", "31=", "--prompt", "7=", "--n", "3", "--max-tokens", "6", "--json")
    static = ("--batching", "static", "--cache-implementation", "static", "--max-num-seqs", "2")
    assert command(*given, *static).out == command(*given).out != ""
