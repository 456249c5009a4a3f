"""Published figures of serving beside what the planner predicts for the same settings.

    python benchmarks/serving_published.py [--out benchmarks/results]

The rows are in ``benchmarks/published/serving.csv``. The start of a kernel in ``tandem.estimate.serving.step_time`` was chosen
with them in view; its other constants were not changed.
``saturated``: all requests are queued at once; ``batch``: a batch that starts and ends together; ``first_token`` and ``latency``: until the
first and the last token.
"""

import argparse
import csv
import statistics
from pathlib import Path

from machine import HERE, machine, write_report

from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.step_time import predict_prefill
from tandem.estimate.serving.throughput import predict_batch_seconds, predict_offline_seconds
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes

SOURCES = {
    "trtllm-1.0": ("TensorRT-LLM 1.0, FP8 weights and cache", "https://github.com/NVIDIA/TensorRT-LLM/blob/v1.0.0/docs/source/performance/perf-overview.md"),
    "trtllm-0.6.1": ("TensorRT-LLM 0.6.1, FP8 weights and cache", "https://github.com/NVIDIA/TensorRT-LLM/blob/v0.6.1/docs/source/performance.md"),
    "trtllm-0.5": ("TensorRT-LLM 0.5, one prompt", "https://github.com/NVIDIA/TensorRT-LLM/blob/v0.6.1/docs/source/performance.md"),
    "gpt-fast": ("gpt-fast, bf16, GPUs limited to 330 W, no switch between them", "https://github.com/pytorch-labs/gpt-fast"),
    "vllm-9515": ("vLLM, nightly benchmark of 2024, bf16", "https://buildkite.com/vllm/performance-benchmark/builds/9515"),
}


def decoder(
    layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, head: int = 128, gated: bool = True, experts: ExpertShapes | None = None
) -> ModelShapes:
    return ModelShapes("llama", vocab, hidden, layers, heads, kv, head, inner, 131072, False, gated_mlp=gated, experts=experts)


MODELS = {
    "llama-7b": decoder(32, 4096, 32, 32, 11008, 32000),
    "llama-2-70b": decoder(80, 8192, 64, 8, 28672, 32000),
    "llama-3.1-8b": decoder(32, 4096, 32, 8, 14336, 128256),
    "llama-3.3-70b": decoder(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-405b": decoder(126, 16384, 128, 8, 53248, 128256),
    "gpt-j-6b": decoder(28, 4096, 16, 16, 16384, 50400, head=256, gated=False),
    "falcon-180b": decoder(80, 14848, 232, 8, 4 * 14848, 65024, head=64, gated=False),
    "mixtral-8x7b": decoder(32, 4096, 32, 8, 14336, 32000, experts=ExpertShapes(8, 2, 14336)),
}


OFFLINE_REQUESTS = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (1000, 2000): 1500, (2048, 128): 3000, (2048, 2048): 1500, (5000, 500): 1500,
    (1000, 1000): 3000, (500, 2000): 3000, (20000, 2000): 1000,
}  # fmt: skip
"""How many requests were queued, by the tokens of prompt and output, as the source says."""


def predicted(row: dict[str, str]) -> float:
    """Returns what the planner predicts for ``row``, in its unit."""
    shapes, gpu = MODELS[row["model"]], load_hardware(row["gpu"])
    sequences, prompt, output = (int(row[name]) for name in ("sequences", "prompt_tokens", "output_tokens"))
    layout = ServingLayout(
        int(row["tensor"]), row["quantization"], row["kv_cache_dtype"], sequences, max(8192, sequences), 0.95, max_model_len=prompt + output
    )
    if row["kind"] == "saturated":
        requests = OFFLINE_REQUESTS[prompt, output]
        return requests * output / predict_offline_seconds(shapes, layout, gpu, requests, prompt, output, reserves_output=True)
    if row["kind"] == "first_token":
        return 1e3 * predict_prefill(shapes, layout, gpu, prompt)
    seconds = predict_batch_seconds(shapes, layout, gpu, sequences, prompt, output)
    return 1e3 * seconds if row["kind"] == "latency" else sequences * output / seconds


def rows() -> list[dict[str, str]]:
    with (HERE / "published" / "serving.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    lines, errors = [], dict[tuple[str, str], list[float]]()
    for row in rows():
        guess, value = predicted(row), float(row["value"])
        errors.setdefault((row["source"], row["kind"]), []).append(guess / value - 1)
        names = ("source", "model", "gpu", "tensor", "kind", "sequences", "prompt_tokens", "output_tokens")
        lines.append("| " + " | ".join(row[name] for name in names) + f" | {value:,.6g} {row['unit']} | {guess:,.4g} | {guess / value - 1:+.0%} |")
    summary = ["| source | kind | rows | mean error | median | worst | bias |", "|---" * 7 + "|"]
    for (source, kind), found in errors.items():
        sizes = [abs(each) for each in found]
        summary.append(
            f"| [{SOURCES[source][0]}]({SOURCES[source][1]}) | {kind} | {len(found)} | {statistics.mean(sizes):.0%} | {statistics.median(sizes):.0%} | "
            f"{max(sizes):.0%} | {statistics.mean(found):+.0%} |"
        )
    header = ["| source | model | GPU | tensor | kind | sequences | prompt | output | published | predicted | error |", "|---" * 11 + "|"]
    text = "\n".join(["# Published figures of serving", "", machine(), "", *summary, "", *header, *lines])
    print(text)
    print(f"wrote {write_report('serving-published', text, options.out)}")


if __name__ == "__main__":
    main()
