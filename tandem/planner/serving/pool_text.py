"""A serving pool as text and as JSON. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.model_bytes import state_bytes
from tandem.estimate.serving.latency import Traffic
from tandem.estimate.serving.layout import ServingLayout
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.planner.as_text import GIB, table
from tandem.planner.serving.pool import Pool, PoolPlan
from tandem.planner.serving.rules import (
    Answer,
    Row,
    batching_rows,
    batching_rule,
    format_rows,
    kv_cache_rows,
    kv_cache_rule,
    number_format,
)

PERCENTILES = (50, 95, 99)


def pool_text(plan: PoolPlan, model: str | None) -> str:
    return "\n".join(_lines(plan, model))


def pool_json(plan: PoolPlan, model: str | None) -> dict[str, Any]:
    """Returns a plan as an object: seconds and bytes; rates are those of the pool unless they are named otherwise."""
    chosen, traffic, (shapes, layout, hardware, _) = plan.chosen, plan.request.demand.traffic, _of(plan)
    return {
        **brief_json(plan, chosen),
        "reason": plan.reason,
        "gpu": hardware.name,
        "parameters": parameter_count(shapes),
        "load": {
            "requests_per_s": traffic.requests_per_s, "prompt_tokens": _lengths(traffic.prompts), "output_tokens": _lengths(traffic.outputs),
            "shared_prefix_tokens": traffic.shared_tokens,
        },
        "targets": [{**asdict(each), "predicted_s": chosen.value(each)} for each in plan.request.demand.targets],
        "memory_bytes_per_gpu": {"total": chosen.memory.total, **_memory(chosen)},
        "kv_cache_blocks_per_engine": chosen.memory.num_blocks,
        "state_snapshots_per_engine": chosen.memory.num_snapshots,
        "state_bytes_per_sequence": state_bytes(shapes),
        "max_model_len": layout.max_model_len,
        "largest_requests_per_s_per_engine": plan.largest_rate,
        "limit": plan.limit,
        "command": serve_command(plan, model),
        "fewer_gpus": [brief_json(plan, pool) for pool in plan.formats if pool.gpus < chosen.gpus],
        "rules": {
            name: {"answer": answer.name, "reason": answer.reason, "compared": [asdict(row) for row in rows]} for name, answer, rows in _rules(plan)
        },
    }  # fmt: skip


def brief_json(plan: PoolPlan, pool: Pool) -> dict[str, Any]:
    """Returns a pool with its figures alone."""
    price, latency = plan.request.hardware.price_per_hour, pool.latency
    return {
        "instances": pool.instances, "gpus": pool.gpus, "tensor_parallel_size": pool.layout.tensor, "quantization": pool.layout.quantization,
        "kv_cache_dtype": pool.layout.kv_cache_dtype, "max_num_seqs": pool.layout.max_num_seqs, "max_num_batched_tokens": pool.layout.max_num_batched_tokens,
        "dollars_per_hour": pool.gpus * price or None,
        "output_tokens_per_s": pool.instances * latency.load.output_tokens_per_s, "requests_per_s_per_engine": pool.requests_per_s,
        "running_per_engine": latency.load.running, "kv_cache_share": latency.load.cache_share,
        "ttft_s": {f"p{share}": latency.first_token_s(share / 100) for share in PERCENTILES},
        "tpot_s": {f"p{share}": latency.output_token_s(share / 100) for share in PERCENTILES},
    }  # fmt: skip


def serve_command(plan: PoolPlan, model: str | None) -> str:
    """Returns the command that starts the engines of one machine, each with its GPUs."""
    chosen, name = plan.chosen, model or "MODEL"
    form, layout = chosen.layout.quantization, chosen.layout
    here = min(chosen.instances, max(1, plan.request.hardware.gpus_per_node // layout.tensor))
    given = {"awq": "", "gptq": "", "bf16": " --dtype bfloat16", "fp16": " --dtype float16"}.get(form, f" --quantization {form}")
    folder = f"{name}-{form}" if form in ("awq", "gptq") else name
    command = (
        f"tandem serve {folder} --device cuda --instances {here} --tensor-parallel-size {layout.tensor}{given} "
        f"--max-num-seqs {layout.max_num_seqs} --max-num-batched-tokens {layout.max_num_batched_tokens} --max-model-len {layout.max_model_len} "
        f"--gpu-memory-utilization {layout.gpu_memory_utilization:g}"
    )
    command += "" if layout.kv_cache_dtype == "auto" else f" --kv-cache-dtype {layout.kv_cache_dtype}"
    return command if folder == name else f"tandem quantize {name} {folder} --method {form} && {command}"


def _of(plan: PoolPlan) -> tuple[ModelShapes, ServingLayout, Hardware, Traffic]:
    request = plan.request
    return request.shapes, plan.chosen.layout, request.hardware, request.demand.traffic


def _rules(plan: PoolPlan) -> list[tuple[str, Answer, list[Row]]]:
    model = _of(plan)
    return [
        ("batching", batching_rule(), batching_rows(*model)), ("quantization", plan.rule, format_rows(*model)),
        ("kv_cache", kv_cache_rule(), kv_cache_rows(*model)), ("number_format", number_format(plan.request.hardware), []),
    ]  # fmt: skip


def _memory(pool: Pool) -> dict[str, int]:
    """Returns the bytes of a GPU by kind, the largest first."""
    return dict(sorted(pool.memory.by_kind().items(), key=lambda each: -each[1]))


def _lengths(lengths: Lengths) -> dict[str, float]:
    return {"mean": lengths.mean, **{f"p{share}": lengths.quantile(share / 100) for share in PERCENTILES}}


def _lines(plan: PoolPlan, model: str | None) -> Iterator[str]:
    chosen, traffic, (shapes, layout, hardware, _) = plan.chosen, plan.request.demand.traffic, _of(plan)
    targets = ", ".join(map(str, plan.request.demand.targets)) or "no latency targets"
    cost = f", ${chosen.gpus * hardware.price_per_hour:,.2f} an hour" if hardware.price_per_hour else ""
    asked = f"{traffic.requests_per_s:,.4g} requests/s of {traffic.prompts.mean:,.0f} + {traffic.outputs.mean:,.0f} tokens"
    yield f"{parameter_count(shapes) / 1e9:.2f}B parameters on {hardware.name}: {asked}, {targets}"
    engines = f"{_counted(chosen.instances, 'engine')} of {_counted(layout.tensor, 'GPU')} (tensor parallel {layout.tensor})"
    yield f"answer: {engines}, {layout.quantization}, KV cache {layout.kv_cache_dtype}: {_counted(chosen.gpus, 'GPU')}{cost}"
    yield f"reason: {plan.reason}"
    yield ""
    load, latency = chosen.latency.load, chosen.latency
    titles = [f"{figure} p{share}" for figure in ("TTFT", "TPOT") for share in PERCENTILES]
    yield from table(
        ("", "requests/s", "tokens/s", "running", "KV cache used", *titles),
        [(
            "an engine", f"{chosen.requests_per_s:,.3g}", f"{load.output_tokens_per_s:,.0f}", f"{load.running:.1f}", f"{load.cache_share:.0%}",
            *(_milliseconds(latency.first_token_s(share / 100)) for share in PERCENTILES),
            *(_milliseconds(latency.output_token_s(share / 100)) for share in PERCENTILES),
        )],
    )  # fmt: skip
    yield f"an engine can take {plan.largest_rate:,.3g} requests/s; what limits it is {plan.limit}"
    yield "memory of a GPU, GiB: " + ", ".join(f"{name.replace('_', ' ')} {size / GIB:.3g}" for name, size in _memory(chosen).items())
    if shapes.linear_attention is not None:
        states, snapshots = f"{state_bytes(shapes) / 2**20:,.1f} MiB of each sequence", f"{chosen.memory.num_snapshots:,} snapshots of such states"
        yield f"states of linear attention: {states}, however long it is; {snapshots} in an engine's prefix cache, which serves prompts at these alone"
    yield f"command: {serve_command(plan, model)}"
    columns = {
        "batching": ("idle KV cache", "waits at most"), "quantization": ("weights of a GPU", "first token"), "kv_cache": ("of a sequence", "first token"),
    }  # fmt: skip
    for name, answer, rows in _rules(plan):
        yield ""
        yield f"{name.replace('_', ' ')}: {answer.name}, because {answer.reason}"
        if rows:
            yield from table(("", "tokens/s, full", "running", *columns[name], "quality"), [_cells(row) for row in rows])
    yield ""
    sources = dict.fromkeys(row.source for _, _, rows in _rules(plan) for row in rows if row.source)
    yield "sources of qualities: " + "; ".join(sources)


def _cells(row: Row) -> Sequence[str]:
    if row.refused:
        return (row.name, "no", "", "", "", row.refused)
    return (row.name, f"{row.output_tokens_per_s:,.0f}", f"{row.running:,.0f}", f"{row.memory_bytes / GIB:.3g} GiB", _milliseconds(row.pause_s), row.quality)


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 10 else f"{seconds:,.3g} s"
