"""The rules of serving, as tables: how requests are batched, in what format the weights are, how keys and values are kept. Each answer has its reason in a
sentence; speed and memory are computed for the model at hand, and a quality is a published figure with its source. Imports no torch."""

from dataclasses import dataclass, replace

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.serving.engine_memory import predict_engine_memory
from tandem.estimate.serving.kv_cache import held_tokens, token_bytes, widest_window
from tandem.estimate.serving.latency import Traffic
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.step_time import EngineStep, predict_decode_step, predict_prefill, predict_step
from tandem.estimate.serving.throughput import most_running, predict_saturated, written_tokens
from tandem.estimate.serving.weight_formats import FORMATS
from tandem.layout.quantizable import cache_cannot, cannot
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError
from tandem.types.kv_cache import BLOCK_TOKENS, KVCacheDtype

EXACT = "exact"
PARTS = 16
"""Of a batch without further admissions, which shrinks while its sequences end."""


@dataclass(frozen=True, slots=True)
class Batching:
    """``options``: of the engine. ``reason``: why it is, or is not, the answer."""

    name: str
    options: str
    reason: str


BATCHINGS = (
    Batching("static", "--batching static", "a batch lasts as long as its longest output, and its rows and blocks are idle from the end of each other one"),
    Batching("dynamic", "--batching dynamic", "a batch lasts as long as its longest output; what ends frees its blocks, but no request joins"),
    Batching(
        "continuous", "--batching continuous --no-enable-chunked-prefill",
        "a request joins as soon as another ends, but its whole prompt is one step, for which every other sequence waits",
    ),
    Batching(
        "chunked prefill", "--batching continuous --enable-chunked-prefill",
        "a request joins as soon as another ends, and the token budget of a step bounds how long a prompt may hold up the sequences that run",
    ),
)  # fmt: skip
BATCHING_ANSWER = "chunked prefill"


@dataclass(frozen=True, slots=True)
class KVCacheRule:
    """A way to keep keys and values. ``quality``: published, ``source``: where."""

    name: str
    options: str
    reason: str
    quality: str = EXACT
    source: str = ""


_SGLANG = "SGLang, docs/advanced_features/quantized_kv_cache.md: KV16 against KV8 (FP8 E4M3)"
_OWN = "benchmarks/results/kv-cache-2026-11-28.md"
KV_CACHES = (
    KVCacheRule("static", "--cache-implementation static", "every sequence reserves the longest context, most of which it never writes"),
    KVCacheRule(
        "paged", "--cache-implementation paged --no-enable-prefix-caching", "a sequence has the blocks that it has written, and half a block more on average"
    ),
    KVCacheRule(
        "paged with prefix cache", "--cache-implementation paged --enable-prefix-caching",
        "prompts that begin alike share blocks, which are computed and held once; without any in common it costs nothing",
    ),
    KVCacheRule(
        "fp8_e4m3", "--kv-cache-dtype fp8_e4m3", "half of the bytes, so that more sequences run and each reads less; take it where the cache is what limits",
        "gsm8k 0.918 for 0.917, gpqa_diamond 0.690 for 0.701 (Qwen3-235B-A22B)", _SGLANG,
    ),
    KVCacheRule(
        "int8", "--kv-cache-dtype int8", "half of the bytes, for GPUs without fp8; a scale for each token and head",
        "mean KL divergence 1.5e-5 in a small model; no figure of a large one could be read at its source", _OWN,
    ),
    KVCacheRule(
        "int4", "--kv-cache-dtype int4", "a quarter of the bytes, where more sequences matter more than the same answers; a scale for each token and head",
        "mean KL divergence 5.7e-3 in a small model, in which one of ten greedy answers differs", _OWN,
    ),
    KVCacheRule(
        "sliding window", "the model's own", "blocks outside the window are freed; it is a property of the model, which was trained with it, and no option"
    ),
)  # fmt: skip
KV_CACHE_ANSWER = "paged with prefix cache"
QUANTIZED_KV: dict[str, KVCacheDtype] = {"fp8_e4m3": "fp8_e4m3", "int8": "int8", "int4": "int4"}
LOAD_OPTIONS = {
    "bf16": "--dtype bfloat16", "fp16": "--dtype float16", "fp8": "--quantization fp8", "int8": "--quantization int8", "int4": "--quantization int4",
    "gptq": "of a folder: tandem quantize --method gptq", "awq": "of a folder: tandem quantize --method awq",
}  # fmt: skip
FORMAT_REASONS = {
    "bf16": "the weights as they were trained",
    "fp16": "the same bytes as bf16 with a narrower range, which the activations of some models leave",
    "fp8": "half of the bytes, and products at up to twice the rate, which shortens prompts too",
    "int8": "half of the bytes, and products at the integer rate, on GPUs without fp8",
    "int4": "a quarter of the bytes, rounded to nearest while the weights are loaded, without calibration",
    "gptq": "a quarter of the bytes, rounded with a calibration text that compensates the error of each column",
    "awq": "a quarter of the bytes, rounded after the channels with the largest inputs were scaled",
}
"""Why one would take each format of ``FORMATS``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rule recommends, and why in a sentence."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """An entry of a table, computed for a model: ``output_tokens_per_s`` of an engine for which requests always wait, ``running`` sequences at once,
    ``memory_bytes`` (of the weights of a GPU, or of the cache of a sequence, as the table says), ``pause_s`` (of the running sequences, at worst, or until
    a mean prompt alone is computed). ``refused``: why it cannot be; the other figures are 0."""

    name: str
    options: str
    reason: str
    output_tokens_per_s: float = 0.0
    running: float = 0.0
    memory_bytes: float = 0.0
    pause_s: float = 0.0
    quality: str = EXACT
    source: str = ""
    refused: str = ""


def number_format(hardware: Hardware) -> Answer:
    """Returns the 16 bits to compute in. The rule of thumb takes BF16 from the H100 on and FP16 with loss scaling before; a GPU before it that has BF16 at
    the rate of FP16 (A100) takes BF16 as well."""
    if "fp8" in hardware.peak_flops:
        return Answer("bf16", f"{hardware.name} is of the H100's generation or later: bf16 has the range of fp32, so that no loss is scaled")
    if hardware.peak_flops["bf16"] >= hardware.peak_flops.get("fp16", 0.0):
        return Answer("bf16", f"before the H100 the rule is fp16 with loss scaling, but {hardware.name} has bf16 at the same rate, which needs none")
    share = hardware.peak_flops["bf16"] / hardware.peak_flops["fp16"]
    return Answer("fp16", f"before the H100 the rule is fp16 with loss scaling, and {hardware.name} has bf16 at only {share:.0%} of that rate")


def batching_rule() -> Answer:
    """Returns how requests are batched."""
    return _answer(BATCHINGS, BATCHING_ANSWER)


def kv_cache_rule() -> Answer:
    """Returns how keys and values are kept."""
    return _answer(KV_CACHES, KV_CACHE_ANSWER)


def quantization_rule(shapes: ModelShapes, hardware: Hardware, latency_matters: bool) -> Answer:
    """Returns the format of the weights: AWQ for production, or GPTQ where the model cannot have it, FP8 where latency matters and the GPU multiplies in it."""
    lacking = cannot(shapes, "awq")
    four_bits, instead = ("awq", "") if lacking is None else ("gptq", f"; gptq, because the model has {lacking}")
    if not latency_matters:
        reason = "in production a quarter of the weights' bytes leaves most to the cache, at the smallest loss of the 4-bit formats"
        return Answer(four_bits, f"{reason}{instead}")
    if "fp8" in hardware.peak_flops:
        return Answer("fp8", "latency matters: fp8 also shortens prompts, which 4-bit weights do not, and its quality is that of bf16")
    return Answer(four_bits, f"latency matters, but {hardware.name} does not multiply in fp8; 4-bit weights shorten the steps of decoding{instead}")


def batching_rows(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, traffic: Traffic) -> list[Row]:
    """Returns what each kind of batching does with requests that always wait. ``pause_s``: the longest step that a running sequence waits for, beside a
    prompt that is longer than 99 % of them; of the first two kinds, until the batch of a request begins, half of one on average. ``memory_bytes``: of the
    cache, that no sequence uses."""
    prompts, outputs = traffic.prompts, traffic.outputs
    long = prompts.quantile(0.99) - traffic.shared_tokens
    full = predict_saturated(
        shapes, layout, hardware, prompts.mean, outputs.mean, shared_tokens=traffic.shared_tokens, variation=outputs.variation
    )
    context = prompts.mean + written_tokens(outputs.mean, outputs.variation)
    cache = predict_engine_memory(shapes, layout, hardware).cache_tokens * token_bytes(shapes, layout) / layout.tensor
    rows = []
    for batching in BATCHINGS:
        if batching.name in ("static", "dynamic"):
            running = most_running(
                shapes, layout, hardware, prompts.mean, outputs.mean, reserves_output=True, shared_tokens=traffic.shared_tokens
            )
            seconds, share = _closed_batch(shapes, layout, hardware, traffic, running, batching.name == "static")
            rows.append(Row(batching.name, batching.options, batching.reason, running * outputs.mean / seconds, running, (1 - share) * cache, seconds / 2))
            continue
        chunk = min(long, layout.max_num_batched_tokens - full.running) if batching.name == BATCHING_ANSWER else long
        pause = predict_step(shapes, layout, hardware, EngineStep(full.running, context, max(1.0, chunk), chunk / 2)).seconds
        idle = (1 - full.cache_share) * cache
        rows.append(Row(batching.name, batching.options, batching.reason, full.output_tokens_per_s, full.running, idle, pause))
    return rows


def _closed_batch(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, traffic: Traffic, running: float, keeps_rows: bool
) -> tuple[float, float]:
    """Returns the seconds of a batch of ``running`` sequences until the longest has ended, and the share of its blocks that unfinished sequences hold.
    ``keeps_rows``: ended sequences are computed on with the others."""
    prompts, outputs = traffic.prompts, traffic.outputs
    longest = max(1.0, outputs.mean_longest(running))
    seconds = predict_prefill(shapes, layout, hardware, max(1, round(prompts.mean - traffic.shared_tokens)), max(1, round(running)))
    used = 0.0
    for part in range(PARTS):
        at = longest * (part + 0.5) / PARTS
        left = running * (1 - outputs.share_below(at))
        step = predict_decode_step(shapes, layout, hardware, running if keeps_rows else max(1.0, left), prompts.mean + at).seconds
        seconds += longest / PARTS * step
        used += left / running / PARTS
    return seconds, used


def format_rows(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, traffic: Traffic) -> list[Row]:
    """Returns each format of the weights in ``layout``. ``memory_bytes``: of the weights of a GPU; ``pause_s``: until a mean prompt alone is computed."""
    rows, prompts, outputs = [], traffic.prompts.mean, traffic.outputs
    for form in FORMATS.values():
        other = replace(layout, quantization=form.name)  # type: ignore[arg-type]
        row = Row(form.name, LOAD_OPTIONS[form.name], FORMAT_REASONS[form.name], quality=form.quality, source=form.source)
        try:
            memory = predict_engine_memory(shapes, other, hardware)
        except UserError as error:
            rows.append(replace(row, refused=str(error)))
            continue
        full = predict_saturated(
            shapes, other, hardware, prompts, outputs.mean, shared_tokens=traffic.shared_tokens, variation=outputs.variation
        )
        first = predict_prefill(shapes, other, hardware, max(1, round(prompts - traffic.shared_tokens)))
        rows.append(
            replace(row, output_tokens_per_s=full.output_tokens_per_s, running=full.running, memory_bytes=memory.weights, pause_s=first)
        )
    return rows


def kv_cache_rows(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, traffic: Traffic) -> list[Row]:
    """Returns each way to keep keys and values. ``memory_bytes``: of a mean sequence on each GPU, half of whose output is written; ``pause_s``: until a mean
    prompt alone is computed."""
    prompts, outputs, length = traffic.prompts.mean, traffic.outputs, layout.max_model_len or shapes.default_context
    rows = []
    for rule in KV_CACHES:
        dtype = QUANTIZED_KV.get(rule.name, layout.kv_cache_dtype)
        other, shared = replace(layout, kv_cache_dtype=dtype), traffic.shared_tokens if rule.name not in ("static", "paged") else 0.0
        row = Row(rule.name, rule.options, rule.reason, quality=rule.quality, source=rule.source)
        if rule.name == "sliding window" and widest_window(shapes) is None:
            rows.append(replace(row, refused="the model has layers with full attention, which need every block"))
            continue
        if (reason := cache_cannot(shapes, dtype)) is not None:
            rows.append(replace(row, refused=f"{dtype}, {reason}"))
            continue
        if rule.name == "static":
            running = max(1.0, min(layout.max_num_seqs, predict_engine_memory(shapes, other, hardware).cache_tokens // length))
            bounded = replace(other, max_num_seqs=int(running))
            full, held = predict_saturated(shapes, bounded, hardware, prompts, outputs.mean, variation=outputs.variation), float(length)
        else:
            full = predict_saturated(shapes, other, hardware, prompts, outputs.mean, shared_tokens=shared, variation=outputs.variation)
            held = held_tokens(shapes, prompts - shared + written_tokens(outputs.mean, outputs.variation))
        first = predict_prefill(shapes, other, hardware, max(1, round(prompts - shared)))
        size = held * token_bytes(shapes, other) / layout.tensor
        rows.append(replace(row, output_tokens_per_s=full.output_tokens_per_s, running=full.running, memory_bytes=size, pause_s=first))
    return rows


def longest_sequence(prompts: Lengths, outputs: Lengths, context: int) -> int:
    """Returns the ``max_model_len`` that 999 of 1,000 requests need, in whole KiTokens, at most the model's ``context``."""
    needed = prompts.quantile(0.999) + outputs.quantile(0.999) + BLOCK_TOKENS
    return max(2, min(context, -(-int(needed) // 1024) * 1024))


def _answer(table: tuple[Batching, ...] | tuple[KVCacheRule, ...], name: str) -> Answer:
    return next(Answer(each.name, each.reason) for each in table if each.name == name)
