"""Size a serving pool: how many engines, of how many GPUs each, serve a load within its latency targets.

Needs no GPU and no torch. The load is a rate with mean lengths, or a trace: CSV or JSON lines with at_s, prompt_tokens and output_tokens (the columns of the
Azure and Mooncake traces are known too), whose busiest minute counts. Without targets an engine is loaded to 90 % of what it completes. Lengths are
lognormal. The rules of batching, quantization and the KV cache are printed with their reasons, computed for the model. A folder named 'serving' is ./serving.

examples:
  tandem plan serving MODEL_FOLDER --gpu H100-80GB --requests-per-s 40 --prompt-tokens 1500 --output-tokens 300 --ttft 800 --tpot 40
  tandem plan serving --gpu L40S --hidden 4096 --layers 32 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --requests-per-s 10 --json
  tandem plan serving MODEL_FOLDER --gpu H200 --trace requests.csv --ttft 500 --percentile 99 --simulate
"""

import argparse
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tandem.cli.number_types import token_count
from tandem.cli.plan import hardware_named, model_of, size_arguments
from tandem.estimate.serving.host import HIDDEN, SEQUENCE_S
from tandem.estimate.serving.kernels import KERNELS, PUBLISHED
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.planner.serving.demand import Demand
    from tandem.planner.serving.pool import PoolRequest

USUAL_PROMPT, USUAL_OUTPUT = 1000, 250
MOST_TOKENS = 10_000_000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a Hugging Face folder or config.json, or a recipe; otherwise the sizes below")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--gpu", default="H100-80GB", help="a kind of GPU, a YAML file with its figures, or this-machine: its GPUs, or its CPU measured (default: H100-80GB)",
    )  # fmt: skip
    parser.add_argument(
        "--simulate", action="store_true", help="also play the load through the engine's own scheduler and KV cache manager, which takes seconds"
    )
    size_arguments(parser)
    load = parser.add_argument_group("the load")
    load.add_argument("--requests-per-s", type=float, help="requests a second of the whole pool (with --trace: instead of its busiest minute)")
    load.add_argument("--prompt-tokens", type=token_count, help=f"mean tokens of a prompt (default: {USUAL_PROMPT:,})")
    load.add_argument("--prompt-p95", type=token_count, help="tokens that 95 %% of the prompts do not exceed (default: 2.0 times the mean)")
    load.add_argument("--output-tokens", type=token_count, help=f"mean tokens of an output (default: {USUAL_OUTPUT:,})")
    load.add_argument("--output-p95", type=token_count, help="tokens that 95 %% of the outputs do not exceed (default: 2.0 times the mean)")
    load.add_argument("--shared-prefix", type=token_count, default=0, help="tokens with which all prompts begin, such as a system prompt (default: 0)")
    load.add_argument("--trace", metavar="FILE", help="requests that were recorded, instead of the mean lengths")
    load.add_argument("--ttft", type=float, metavar="MS", help="the time to the first token in milliseconds that --percentile of the requests may have")
    load.add_argument("--tpot", type=float, metavar="MS", help="the same of the time for each further token")
    load.add_argument("--percentile", type=float, default=95.0, help="of the targets, in per cent (default: 95)")
    engine = parser.add_argument_group("the engines")
    engine.add_argument("--tensor-parallel-size", type=int, help="GPUs of an engine (default: what takes the fewest in all, up to a node)")
    engine.add_argument(
        "--quantization", help="of the weights: bf16, fp16, fp8, int8, int4, gptq or awq (default: the rule: awq; with a target fp8 where the GPU has it)"
    )
    engine.add_argument("--kv-cache-dtype", default="auto", help="auto, bfloat16, int8, fp8_e4m3 or int4 (default: auto)")
    engine.add_argument("--max-model-len", type=token_count, help="tokens of a sequence (default: what 999 of 1,000 requests need)")
    engine.add_argument("--max-num-seqs", type=int, default=256, help="sequences that run at once in an engine (default: 256)")
    engine.add_argument("--max-num-batched-tokens", type=token_count, default=8192, help="tokens of a step (default: 8192)")
    engine.add_argument(
        "--engine-host", choices=tuple(SEQUENCE_S), default=HIDDEN, help="what the host adds to a step, by the engine's release (default: hidden)"
    )
    engine.add_argument(
        "--kernels", choices=tuple(KERNELS), default=PUBLISHED, help="of published engines, or Tandem's batch-invariant ones (default: published)"
    )
    engine.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of the GPU's memory for the engine (default: 0.9)")


def run(options: argparse.Namespace) -> int:
    request = _request(options)
    from tandem.planner.serving.pool import make_pool_plan
    from tandem.planner.serving.pool_text import pool_json, pool_text

    plan = make_pool_plan(request)
    answer, text = pool_json(plan, options.model) if options.json else {}, "" if options.json else pool_text(plan, options.model)
    if options.simulate:
        from tandem.planner.serving.simulated_pool import simulate_pool, simulated_text

        simulated = simulate_pool(plan)
        answer["simulated"] = simulated
        text += f"\n{simulated_text(simulated)}"
    print(json.dumps(answer, indent=2) if options.json else text)
    return 0


def _request(options: argparse.Namespace) -> "PoolRequest":
    from tandem.estimate.serving.layout import ServingLayout
    from tandem.estimate.serving.weight_formats import format_named
    from tandem.planner.serving.pool import PoolRequest
    from tandem.planner.serving.rules import longest_sequence

    shapes, _ = model_of(options)
    hardware, demand = hardware_named(options.gpu), _demand(options)
    if options.quantization is not None:
        format_named(options.quantization)
    context = shapes.max_position_embeddings
    prompts, outputs = demand.traffic.prompts, demand.traffic.outputs
    length = longest_sequence(prompts, outputs, context) if options.max_model_len is None else options.max_model_len
    if not 2 <= length <= context:
        raise UserError(f"--max-model-len is {length:,}; it must be from 2 to the model's context, {context:,}")
    if prompts.mean + outputs.mean > length:
        raise UserError(
            f"prompts and outputs have {prompts.mean + outputs.mean:,.0f} tokens on average, and a sequence at most {length:,}; shorten them, or raise "
            "--max-model-len"
        )
    # A longer request is refused, so that neither part is longer than a sequence.
    traffic = replace(demand.traffic, prompts=prompts.cut(length), outputs=outputs.cut(length))
    layout = ServingLayout(
        1, "bf16", options.kv_cache_dtype, options.max_num_seqs, options.max_num_batched_tokens, options.gpu_memory_utilization, length,
        host_sequence_s=SEQUENCE_S[options.engine_host], kernels=options.kernels,
    )  # fmt: skip
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise UserError(
            f"--max-num-batched-tokens is {options.max_num_batched_tokens}; it must be at least --max-num-seqs ({options.max_num_seqs}), a token for each"
        )
    tensor = options.tensor_parallel_size
    if tensor is not None:
        replace(layout, tensor=tensor).check(shapes, hardware)
    return PoolRequest(shapes, hardware, replace(demand, traffic=traffic), layout, tensor, options.quantization)


def _demand(options: argparse.Namespace) -> "Demand":
    from tandem.estimate.serving.latency import Traffic
    from tandem.planner.serving.demand import Demand, Target, busiest_rate, read_trace, trace_lengths

    for name in ("requests_per_s", "ttft", "tpot", "percentile", "gpu_memory_utilization"):
        value: Any = getattr(options, name)
        if value is not None and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be a number")
    if not 1 <= options.percentile <= 99:
        raise UserError(f"--percentile is {options.percentile:g}; it must be from 1 to 99")
    targets = tuple(
        Target(figure, getattr(options, figure) / 1e3, options.percentile) for figure in ("ttft", "tpot") if getattr(options, figure) is not None
    )
    if options.trace is not None:
        for name in ("prompt_tokens", "prompt_p95", "output_tokens", "output_p95"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} and --trace both give lengths; leave one out")
        trace = read_trace(options.trace)
        prompts, outputs = trace_lengths(trace)
        rate = options.requests_per_s if options.requests_per_s is not None else busiest_rate(trace)
    else:
        if options.requests_per_s is None:
            raise UserError("the load is missing; give --requests-per-s, or a --trace (see 'tandem plan serving --help')")
        trace, rate = (), options.requests_per_s
        prompts, outputs = _lengths(options, "prompt", USUAL_PROMPT), _lengths(options, "output", USUAL_OUTPUT)
    demand = Demand(Traffic(rate, prompts, outputs, options.shared_prefix), targets, trace)
    demand.check()
    return demand


def _lengths(options: argparse.Namespace, name: str, usual: int) -> Any:
    from tandem.estimate.lengths import Lengths

    mean, p95 = getattr(options, f"{name}_tokens"), getattr(options, f"{name}_p95")
    for flag, value in (("tokens", mean), ("p95", p95)):
        if value is not None and not 1 <= value <= MOST_TOKENS:
            raise UserError(f"--{name}-{flag} is {value}; it must be from 1 to {MOST_TOKENS:,}")
    mean = usual if mean is None else mean
    return Lengths.around(mean) if p95 is None else Lengths.with_p95(mean, p95)
