"""The size of a serving pool and the rules of serving: against sums, the load itself, and the parser of the server."""

import argparse
import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.serving.latency import Traffic
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.throughput import predict_saturated
from tandem.layout.shapes import ModelShapes
from tandem.planner.serving.demand import Demand, Target, busiest_rate, read_trace
from tandem.planner.serving.pool import MOST_BUSY, PoolRequest, make_pool_plan, pool_of
from tandem.planner.serving.pool_text import serve_command
from tandem.planner.serving.rules import BATCHINGS, KV_CACHES, batching_rows, format_rows, kv_cache_rows, number_format, quantization_rule
from tandem.types import UserError

LLAMA_3_8B = ModelShapes("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192, False)
LLAMA_3_70B = ModelShapes("llama", 128256, 8192, 80, 64, 8, 128, 28672, 8192, False)
H100, A100 = load_hardware("H100-80GB"), load_hardware("A100-80GB")
LAYOUT = ServingLayout(max_model_len=8192)
TRAFFIC = Traffic(100.0, Lengths.around(1000), Lengths.around(250))
SIZES = shlex.split("--hidden 4096 --layers 32 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256")
RUN = "import sys; from tandem.cli.main import main; code = main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"


def request(traffic: Traffic = TRAFFIC, targets: tuple[Target, ...] = (), **given: object) -> PoolRequest:
    return PoolRequest(LLAMA_3_8B, H100, Demand(traffic, targets), LAYOUT, **given)  # type: ignore[arg-type]


def test_without_targets_the_engines_are_those_that_complete_the_load_with_a_reserve() -> None:
    plan = make_pool_plan(request(quantization="bf16", tensor=1))
    full = predict_saturated(LLAMA_3_8B, replace(LAYOUT, quantization="bf16"), H100, 1000, 250, variation=TRAFFIC.outputs.variation)
    assert plan.chosen.instances == math.ceil(100 / (MOST_BUSY * full.requests_per_s)) > 2
    assert plan.chosen.requests_per_s * plan.chosen.instances == pytest.approx(100)
    assert plan.largest_rate == pytest.approx(MOST_BUSY * full.requests_per_s)


def test_an_engine_fewer_misses_a_target_that_the_pool_meets() -> None:
    targets = (Target("ttft", 0.12), Target("tpot", 0.012))
    asked = request(targets=targets, quantization="fp8", tensor=1)
    plan = make_pool_plan(asked)
    assert plan.chosen.meets(targets)
    fewer = pool_of(asked, plan.chosen.layout, plan.chosen.instances - 1)
    assert fewer is None or not fewer.meets(targets)
    assert plan.largest_rate >= plan.chosen.requests_per_s and "the target" in plan.limit


def test_a_tighter_target_takes_larger_engines_and_one_that_nothing_meets_is_refused_with_the_nearest() -> None:
    alone = {tensor: pool_of(request(), replace(LAYOUT, tensor=tensor, quantization="fp8"), 10_000) for tensor in (1, 2)}
    one, two = ((pool.latency.output_token_s(0.95) if pool else 0.0) for pool in alone.values())
    plan = make_pool_plan(request(targets=(Target("tpot", (one + two) / 2),), quantization="fp8"))
    assert plan.chosen.layout.tensor > 1
    with pytest.raises(UserError, match=r"no layout of H100-80GB has TTFT p95 1 ms: .* a request alone has [\d.]+ ms; raise --ttft"):
        make_pool_plan(request(targets=(Target("ttft", 0.001),)))


def test_the_rule_of_quantization_yields_only_to_a_format_of_no_lower_quality() -> None:
    assert quantization_rule(LLAMA_3_8B, H100, False).name == quantization_rule(LLAMA_3_8B, A100, True).name == "awq"
    assert quantization_rule(LLAMA_3_8B, H100, True).name == "fp8"
    plan = make_pool_plan(request(replace(TRAFFIC, requests_per_s=1000.0)))
    assert plan.rule.name == "awq" and plan.chosen.layout.quantization in ("fp8", "int8", "bf16")
    assert "beats the rule's awq" in plan.reason
    few = make_pool_plan(request(replace(TRAFFIC, requests_per_s=2.0)))
    assert few.chosen.layout.quantization == "awq" and few.chosen.gpus == 1
    # 70B in 16 bits do not fit on one GPU, in 4 bits they do.
    assert make_pool_plan(replace(request(replace(TRAFFIC, requests_per_s=0.5)), shapes=LLAMA_3_70B)).chosen.gpus == 1


def test_sixteen_bits_are_bf16_wherever_the_hardware_multiplies_in_them_as_fast() -> None:
    assert (number_format(H100).name, number_format(A100).name) == ("bf16", "bf16")
    turing = replace(A100, name="T4", peak_flops={"fp32": 8.1e12, "fp16": 6.5e13, "bf16": 8.1e12})
    assert number_format(turing).name == "fp16" and "loss scaling" in number_format(turing).reason


def test_batching_is_better_the_sooner_a_request_may_join_and_chunks_bound_the_pause() -> None:
    layout = replace(LAYOUT, max_num_batched_tokens=1024)
    static, dynamic, continuous, chunked = batching_rows(LLAMA_3_8B, layout, H100, TRAFFIC)
    assert static.output_tokens_per_s < dynamic.output_tokens_per_s < continuous.output_tokens_per_s == chunked.output_tokens_per_s
    assert chunked.pause_s < continuous.pause_s < dynamic.pause_s <= static.pause_s
    # Outputs of one length end together, so that static batching wastes nothing but what joins would have filled.
    equal = batching_rows(LLAMA_3_8B, layout, H100, replace(TRAFFIC, outputs=Lengths.around(250, 0)))
    assert equal[0].output_tokens_per_s == pytest.approx(equal[1].output_tokens_per_s)


def test_what_a_sequence_takes_of_the_cache_is_worked_by_hand() -> None:
    static, paged, prefix, fp8, int8, int4, sliding = kv_cache_rows(LLAMA_3_8B, LAYOUT, H100, replace(TRAFFIC, shared_tokens=600.0))
    token = 2 * 32 * 8 * 128 * 2
    written = 1000 + 250 * TRAFFIC.outputs.variation / 2
    assert static.memory_bytes == 8192 * token
    assert paged.memory_bytes == pytest.approx((written + 8) * token)
    assert prefix.memory_bytes == pytest.approx((written - 600 + 8) * token)
    # 8 bits and an fp32 scale for each head of 128.
    assert fp8.memory_bytes == int8.memory_bytes == pytest.approx(prefix.memory_bytes * (128 + 4) / 256)
    assert int4.memory_bytes == pytest.approx(prefix.memory_bytes * (64 + 4) / 256)
    assert static.running < paged.running <= prefix.running and sliding.refused
    windowed = replace(LLAMA_3_8B, layer_windows=(512,) * 32)
    assert kv_cache_rows(windowed, LAYOUT, H100, TRAFFIC)[-1].memory_bytes == (512 + 16 + 8) * token


def test_every_format_is_compared_and_one_that_the_gpu_lacks_says_so() -> None:
    rows = {row.name: row for row in format_rows(LLAMA_3_8B, LAYOUT, A100, TRAFFIC)}
    assert list(rows) == ["bf16", "fp16", "fp8", "int8", "int4", "gptq", "awq"]
    assert "which A100-80GB has not" in rows["fp8"].refused
    assert rows["awq"].memory_bytes < 0.4 * rows["bf16"].memory_bytes and rows["int8"].memory_bytes < 0.6 * rows["bf16"].memory_bytes
    assert all(row.quality and (row.source or row.quality == "the reference") for row in rows.values())


def test_the_options_of_the_rules_and_the_command_are_those_of_the_server() -> None:
    from tandem.cli.engine_options import engine_args
    from tandem.cli.main import parser

    rules = [rule.options for rule in (*BATCHINGS, *KV_CACHES) if rule.options.startswith("--")]
    commands = [serve_command(make_pool_plan(request(quantization=form)), "models/llama").split(" && ")[-1] for form in ("fp8", "awq", "bf16")]
    taken = parser()
    for command in (*(f"tandem serve MODEL {options}" for options in rules), *commands):
        parsed, unknown = taken.parse_known_args(shlex.split(command)[1:])
        assert not unknown, unknown
        engine_args(parsed).check()
    assert "tandem quantize models/llama models/llama-awq --method awq" in serve_command(make_pool_plan(request(quantization="awq")), "models/llama")


def test_a_trace_is_read_in_the_columns_of_three_sources_and_its_busiest_minute_counts(tmp_path: Path) -> None:
    own, azure, mooncake = tmp_path / "own.csv", tmp_path / "azure.csv", tmp_path / "mooncake.jsonl"
    own.write_text("at_s,prompt_tokens,output_tokens\n5,100,20\n6.5,50,10\n200,70,0\n")
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,100,20\n2023-11-16 18:15:48.180590,50,10\n")
    mooncake.write_text('{"timestamp": 5000, "input_length": 100, "output_length": 20}\n\n{"timestamp": 6500, "input_length": 50, "output_length": 10}\n')
    for file in (own, azure, mooncake):
        trace = read_trace(str(file))
        assert [(round(each.at_s, 3), each.prompt_tokens, each.output_tokens) for each in trace] == [(0, 100, 20), (1.5, 50, 10)]
    times = [*range(0, 300, 10), *(150 + k / 4 for k in range(100))]
    own.write_text("at_s,prompt_tokens,output_tokens\n" + "".join(f"{at},10,5\n" for at in times))
    assert busiest_rate(read_trace(str(own))) == pytest.approx(106 / 60, rel=0.02)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,b\n1,2\n", "line 2 has no column at_s or TIMESTAMP or timestamp; it has a, b"),
        ("at_s,prompt_tokens,output_tokens\n1,x,2\n", "line 2: prompt_tokens is 'x'; it must be a number"),
        ("at_s,prompt_tokens,output_tokens\n1,-5,2\n", "line 2: -5 + 2 tokens at 1 s; lengths must be from 1"),
        ("at_s,prompt_tokens,output_tokens\n1,5,2\n", "has 1 requests with an output; it needs at least 2"),
        ('{"at_s": 1}\n{]\n', "line 1 has no column prompt_tokens"),
        ("{]\n", "it must be CSV with a header, or JSON lines"),
    ],
    ids=("columns", "number", "negative", "one", "missing", "json"),
)
def test_a_trace_that_is_none_is_refused_with_its_line(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(UserError) as error:
        read_trace(str(tmp_path / "trace"))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_the_command_answers_in_json_without_torch() -> None:
    words = ["plan", "serving", *SIZES, "--requests-per-s", "30", "--ttft", "300", "--tpot", "30", "--json"]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "False\n")
    answer = json.loads(done.stdout)
    memory = answer["memory_bytes_per_gpu"]
    assert memory["total"] == sum(size for kind, size in memory.items() if kind != "total") == H100.memory_bytes
    assert answer["gpus"] == answer["instances"] * answer["tensor_parallel_size"]
    assert all(each["predicted_s"] <= each["most_s"] for each in answer["targets"])
    assert answer["output_tokens_per_s"] == pytest.approx(30 * 250, rel=0.01)
    assert {name: rule["answer"] for name, rule in answer["rules"].items()} == {
        "batching": "chunked prefill", "quantization": "fp8", "kv_cache": "paged with prefix cache", "number_format": "bf16",
    }  # fmt: skip


def test_the_text_has_the_answer_its_reason_and_the_tables_and_a_simulation_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    words = ["plan", "serving", *SIZES, "--requests-per-s", "40", "--prompt-tokens", "300", "--output-tokens", "20", "--simulate"]
    assert main(words) == 0
    text = capsys.readouterr().out
    for part in ("answer: 1 engine of 1 GPU", "reason: awq", "what limits it is", "command: tandem quantize MODEL", "kv cache: paged with prefix cache"):
        assert part in text
    assert "simulated, one engine, 1,000 requests: TTFT p50" in text and "0 preemptions" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the load is missing; give --requests-per-s, or a --trace"),
        (["--requests-per-s", "0"], "--requests-per-s is 0; it must be above 0"),
        (["--requests-per-s", "nan"], "--requests-per-s is nan; it must be a number"),
        (["--requests-per-s", "1", "--ttft", "0"], "--ttft is 0 ms; it must be above 0"),
        (["--requests-per-s", "1", "--percentile", "200"], "--percentile is 200; it must be from 1 to 99"),
        (["--requests-per-s", "1", "--shared-prefix", "-3"], "it must be from 0 to below that"),
        (["--requests-per-s", "1", "--prompt-tokens", "0"], "--prompt-tokens is 0; it must be from 1"),
        (["--requests-per-s", "1", "--quantization", "q5"], "quantization is 'q5'; it must be one of"),
        (["--requests-per-s", "1", "--gpu", "A100-80GB", "--quantization", "fp8"], "which A100-80GB has not"),
        (["--requests-per-s", "1", "--tensor-parallel-size", "3"], "it must divide the model's 32 attention heads"),
        (["--requests-per-s", "1", "--kv-cache-dtype", "q"], "kv_cache_dtype is 'q'; it must be one of"),
        (["--requests-per-s", "1", "--max-model-len", "10"], "a sequence at most 10; shorten them, or raise --max-model-len"),
        (["--requests-per-s", "1", "--trace", "/dev/zero"], "it is a device; name a regular file"),
        (["--requests-per-s", "1", "--trace", "t", "--prompt-tokens", "3"], "--prompt-tokens and --trace both give lengths"),
        (["--requests-per-s", "1", "--max-num-batched-tokens", "8"], "it must be at least --max-num-seqs (256), a token for each"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    from tandem.cli import plan_serving

    parser = argparse.ArgumentParser()
    plan_serving.arguments(parser)
    with pytest.raises(UserError) as error:
        plan_serving.run(parser.parse_args([*SIZES, *arguments]))
    assert message in str(error.value) and "\n" not in str(error.value)
