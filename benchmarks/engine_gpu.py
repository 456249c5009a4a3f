"""The engine on a GPU: decoding as a share of the measured copy bandwidth, prefill as a share of the measured matrix rate, and output tokens a
second beside transformers' continuous batching on the same weights, taking turns in one process.

    PYTHONPATH=. python benchmarks/engine_gpu.py                              # needs torch, triton, transformers and a CUDA device
    PYTHONPATH=. python benchmarks/engine_gpu.py --device cpu --models tiny   # does everything run: half a minute, the figures mean nothing

Weights are random, in bf16. A decoding step must read every matrix once and every key and value once: these bytes over its wall time are
what is compared with the bandwidth. Ceilings are measured in the same run: a copy of 2 GiB (bytes read and written) and a product of 8192 x 8192 x
8192 on random numbers.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from machine import machine, write_report
from options import parser

from tandem.engine.core.lifecycle import State
from tandem.engine.engine import Engine
from tandem.engine.kv_cache.block_pool import blocks_for
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.estimate.model_bytes import kv_bytes_per_token
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import config_json, to_huggingface

MODELS = {
    "tiny": ModelShapes("qwen3", 512, 64, 2, 4, 2, 16, 128, 1024, tie_word_embeddings=True, qk_norm=True),
    "0.6B": ModelShapes("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, 16384, tie_word_embeddings=True, rope_theta=1e6, qk_norm=True),
    "8B": ModelShapes("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 16384, tie_word_embeddings=False, rope_theta=1e6, qk_norm=True),
}
DECODE_TARGET, PREFILL_TARGET = 0.70, 0.60


@dataclass(frozen=True)
class Load:
    """Tokens: ``prompt`` and ``new`` of a throughput run, ``context`` before decoding is timed, ``long`` of the timed prefill. ``steps`` that are
    timed at once, ``rounds`` of everything."""

    prompt: int = 512
    new: int = 128
    context: int = 1024
    long: int = 8192
    steps: int = 64
    rounds: int = 3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def ceilings(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes a second of a copy, operations a second of a product)."""
    count, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 24, 512)
    source = torch.zeros(count, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copy, multiply = lambda: target.copy_(source), lambda: a @ b
    for warm in (copy, multiply) * 3:
        warm()
    times = [seconds(lambda call=call: [call() for _ in range(10)], device) / 10 for call in (copy, multiply)]
    return 2 * source.numel() * 2 / times[0], 2 * side**3 / times[1]


def make_decoder(shapes: ModelShapes, device: torch.device, dtype: torch.dtype, deterministic: bool) -> Decoder:
    """Random weights, drawn on the device."""
    decoder = Decoder(shapes, select("auto", dtype, device, deterministic), dtype=dtype, device=device)
    numbers = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, 0.02, generator=numbers)
    return decoder


def make_peer(decoder: Decoder) -> Any:
    """transformers' model of the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = config_json(decoder.shapes)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    like = decoder.embed_tokens
    with torch.device(like.device):
        peer = AutoModelForCausalLM.from_config(config, dtype=like.dtype, attn_implementation="sdpa")
    missing = peer.load_state_dict({name: tensor.clone() for name, tensor in to_huggingface(decoder)}, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    peer.tie_weights()
    return peer.eval()


def make_engine(decoder: Decoder, load: Load, most: int) -> Engine:
    """Room for ``most`` sequences of the longest kind that is measured."""
    length = max(load.context + 3 * load.steps, load.prompt + load.new) + 16
    blocks = max(most * blocks_for(length), blocks_for(load.long + 16)) + most
    return Engine(
        decoder,
        EngineSettings(
            max_model_len=max(length, load.long + 16), num_blocks=blocks, max_num_seqs=most, max_num_batched_tokens=load.long,
            enable_prefix_caching=False, deterministic=True,
        ),
    )  # fmt: skip


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(count)
    return torch.randint(0, vocabulary, (count, length), generator=numbers).tolist()


def drain(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


def decode_step_s(engine: Engine, load: Load, batch: int, device: torch.device) -> float:
    """Wall seconds of one step of ``batch`` sequences whose contexts begin at ``load.context``."""
    params = SamplingParams(max_tokens=3 * load.steps, temperature=1.0, ignore_eos=True)
    for i, prompt in enumerate(prompts_of(batch, load.context, engine.shapes.vocab_size)):
        engine.add_request(str(i), prompt, params, key=i)
    while engine.counts()[State.DECODING] < batch:
        engine.step()
    # Graphs of this size are made in the first steps.
    for _ in range(8):
        engine.step()
    took = seconds(lambda: [engine.step() for _ in range(load.steps)], device) / load.steps
    for name in engine.request_ids:
        engine.abort(name)
    drain(engine)
    return took


def prefill_s(engine: Engine, load: Load, device: torch.device) -> float:
    """Wall seconds from a prompt to its first token."""

    def run() -> None:
        engine.add_request("long", prompt, SamplingParams(max_tokens=1, ignore_eos=True), key=0)
        drain(engine)

    (prompt,) = prompts_of(1, load.long, engine.shapes.vocab_size)
    run()
    return seconds(run, device)


def ours_tokens_per_s(engine: Engine, prompts: list[list[int]], new: int, device: torch.device) -> float:
    def run() -> None:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True), key=i)
        drain(engine)

    return len(prompts) * new / seconds(run, device)


def theirs_tokens_per_s(peer: Any, prompts: list[list[int]], new: int, device: torch.device) -> float:
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    found: dict[str, Any] = {}
    took = seconds(lambda: found.update(peer.generate_batch(prompts, generation_config=settings)), device)
    made = sum(len(output.generated_tokens) for output in found.values())
    assert made == len(prompts) * new, f"transformers made {made} tokens of {len(prompts) * new}"
    return made / took


def matrix_parameters(shapes: ModelShapes) -> int:
    """Weights that a decoded token meets: the layers' matrices and the head."""
    layer = shapes.hidden_size * (shapes.qkv_size + shapes.query_size + 3 * shapes.intermediate_size)
    return shapes.num_hidden_layers * layer + shapes.vocab_size * shapes.hidden_size


def prefill_flops(shapes: ModelShapes, tokens: int) -> float:
    """Matrix products of every layer and causal attention; the head sees one token."""
    head = shapes.vocab_size * shapes.hidden_size
    attention = 2.0 * tokens**2 * shapes.query_size * shapes.num_hidden_layers
    return 2.0 * tokens * (matrix_parameters(shapes) - head) + 2.0 * head + attention


def measure(name: str, options: argparse.Namespace, load: Load, device: torch.device, ceiling: tuple[float, float]) -> list[str]:
    shapes, dtype = MODELS[name], torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = make_decoder(shapes, device, dtype, deterministic=not options.fast)
    peer = None if options.without_peer else make_peer(decoder)
    engine = make_engine(decoder, load, max(options.batches))
    weights = matrix_parameters(shapes) * dtype.itemsize
    kv = kv_bytes_per_token(shapes, str(dtype).removeprefix("torch."), "auto")
    rows = []
    for batch in options.batches:
        times = [decode_step_s(engine, load, batch, device) for _ in range(load.rounds)]
        read = weights + batch * kv * (load.context + 8 + load.steps / 2)
        share = read / min(times) / ceiling[0]
        took = f"{min(times) * 1e3:.2f} ms ({statistics.median(times) * 1e3:.2f})"
        rows.append(f"| {name} | decode, batch {batch} | {took} | {share:.2f} of the copy bandwidth | {DECODE_TARGET} |")
        print(rows[-1], flush=True)
    times = [prefill_s(engine, load, device) for _ in range(load.rounds)]
    share = prefill_flops(shapes, load.long) / min(times) / ceiling[1]
    took = f"{min(times) * 1e3:.1f} ms ({statistics.median(times) * 1e3:.1f})"
    rows.append(f"| {name} | prefill of {load.long} | {took} | {share:.2f} of the matrix rate | {PREFILL_TARGET} |")
    print(rows[-1], flush=True)
    for batch in options.batches if peer is not None else ():
        prompts = prompts_of(batch, load.prompt, shapes.vocab_size)
        ours, theirs = [], []
        for _ in range(load.rounds + 1):
            ours.append(ours_tokens_per_s(engine, prompts, load.new, device))
            theirs.append(theirs_tokens_per_s(peer, prompts, load.new, device))
        # The first round compiled and captured.
        best, other = max(ours[1:]), max(theirs[1:])
        rates = f"{best:,.0f} tokens/s, transformers {other:,.0f}"
        rows.append(f"| {name} | {batch} x ({load.prompt} + {load.new}) | {rates} | {best / other:.2f} times | 1 |")
        print(rows[-1], flush=True)
    engine.close()
    return rows


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--device", default="cuda")
    made.add_argument("--models", nargs="+", default=["0.6B", "8B"], choices=MODELS)
    made.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--fast", action="store_true", help="without the law of bits: torch's products")
    made.add_argument("--without-peer", action="store_true")
    options = made.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is found; run this on a machine with one, or try it with --device cpu --models tiny")
    is_trial = device.type != "cuda"
    load = Load(64, 8, 64, 256, 4, 1) if is_trial else Load(rounds=options.rounds)
    options.batches = [min(batch, 4) for batch in options.batches[:2]] if is_trial else options.batches
    ceiling = ceilings(device, torch.float32 if is_trial else torch.bfloat16)
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU: a trial, whose figures mean nothing"
    lines = [
        "# The engine on a GPU", "", f"{what}. {machine()}", "",
        f"Measured ceilings: copy {ceiling[0] / 1e12:.2f} TB/s, matrix product {ceiling[1] / 1e12:.0f} TFLOP/s. Best (median) of {load.rounds} "
        f"rounds; {'fast' if options.fast else 'deterministic'} kernels; decoding is timed over {load.steps} steps at a context of {load.context}.",
        "", "| model | what | measured | share or ratio | aimed at |", "|---|---|---|---|---|",
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    for name in options.models:
        lines += measure(name, options, load, device, ceiling)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    text = "\n".join(lines)
    if not is_trial:
        print(f"wrote {write_report('engine-gpu', text, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
