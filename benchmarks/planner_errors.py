"""The step times that ``estimate.training`` predicts beside published measurements of training on GPUs.

    python benchmarks/planner_errors.py

``planner-measured.csv`` is what the few constants of ``efficiency.py`` are fitted on; each of its rows is also predicted with constants that were fitted
without it (five folds, each with rows of every source). ``planner-held-out.csv`` is never fitted on; its column ``collected`` says when a row was added,
and each set was predicted once, by the model as it stood, before anything was changed with a look at it: 18.9 % off for the 49 rows of 2026-11-27, 14.1 %
(worst 38.8 %) for the seven mixtures of experts that were added later on that day. ``planner-held-out-second.csv`` has 60 more rows of eight publications,
whose first prediction is in its column ``first_predicted_s``: that is what rows of strangers give. What a row's source says of its kernels (scaling in fp8, an
exchange that is overlapped, the precision of the loss) is in its columns. Beside both is a model of one line: 6 operations for a parameter and token, and
those of attention, over the peak at a constant utilisation, fitted on the same rows. Where a source leaves the micro-batch open it is the fastest that fits in
memory.
"""

import csv
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from machine import machine, write_report
from options import parser

from tandem.config.parallel import ParallelConfig
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.training.efficiency import FITTED, Efficiency
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.predict import predict_step_time
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.flops import step_flops
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.shapes import ModelShapes

FOLDER = Path(__file__).parent
HELD_OUT = ("planner-held-out.csv", "planner-held-out-second.csv")
BOUNDS = {
    "products": (0.7, 1.0), "tile_s": (1e-6, 8e-6), "memory": (0.5, 0.92), "links": (0.86, 0.92), "contention": (0.0, 0.4),
}  # fmt: skip
"""What is fitted, within what is published or physically possible: no kernel is faster than it was measured alone; STREAM reaches 92 % of a memory's rate
(McCalpin); large messages reach 92 % of the bandwidth of a network (nccl-tests) and 86 % at least (DeepEP, README: 43 of 50 GB/s); collectives
beside them slow kernels by 19 % on average and 40 % at most (arXiv 2507.03114)."""
FOLDS = 5
SOURCES = {
    "megatron-2021": "Narayanan et al., 2021, arXiv 2104.04473, table 1",
    "sequence-parallel-2022": "Korthikanti et al., 2022, arXiv 2205.05198, tables 3 to 5",
    "megatron-core-h100": "Megatron-LM, README, training speed and scalability (github.com/NVIDIA/Megatron-LM)",
    "torchtitan-llama3": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (github.com/pytorch/torchtitan), tables 1 and 3",
    "torchtitan-llama3-compiled": "the same",
}
"""Of ``planner-measured.csv``; ``planner-held-out.csv`` has a column."""


@dataclass(frozen=True, eq=False)
class Row:
    """A published measurement: layouts (one for each micro-batch that the source leaves open) and the seconds of a step. ``collected``: the day on which a
    held-out row was added; ``first_s``: what was predicted then, before anything was changed with a look at it (0: not recorded for this row alone)."""

    source: str
    name: str
    shapes: ModelShapes
    hardware: Hardware
    layouts: tuple[TrainingLayout, ...]
    seconds: float
    collected: str = ""
    first_s: float = 0.0

    def predicted(self, given: Efficiency) -> float:
        """Returns the seconds of the fastest micro-batch of those that fit."""
        return min(predict_step_time(self.shapes, layout, self.hardware, given).seconds for layout in self.layouts)

    def baseline(self, utilisation: float) -> float:
        layout = self.layouts[0]
        flops = step_flops(self.shapes, [layout.sequence] * layout.global_batch)
        return flops / layout.gpus / self.hardware.peak_flops[layout.precision] / utilisation


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(each) for each in csv.DictReader(file)]


def _row(row: Mapping[str, str]) -> Row:
    shapes, whole = _shapes(row), {key: int(value) for key, value in row.items() if value.isdigit()}
    sequence, batch = whole["seq"], whole["global_batch_sequences"]
    titan, core = row["source"].startswith("torchtitan"), row["source"].startswith("megatron-core")
    parallel = ParallelConfig(
        data=whole["dp"], tensor=whole["tp"], pipeline=whole["pp"], virtual_stages=whole["virtual_pp"], context=whole.get("cp", 1), expert=whole["ep"],
        schedule="interleaved" if whole["virtual_pp"] > 1 else "1f1b", zero=whole.get("zero", 3 if titan else 1 if core else 0),  # type: ignore[arg-type]
        # The measurements of 2021 are older than sequence parallelism.
        sequence_parallel=row["source"] != "megatron-2021" and not (row["source"] == "sequence-parallel-2022" and row["recompute"] == "full")
        and row.get("sequence_parallel") != "false",
    )  # fmt: skip
    hardware = _hardware(row)
    layouts = tuple(
        TrainingLayout(
            parallel, sequence, batch, size, row["precision"], row["recompute"], attention=row.get("attention", "auto"),  # type: ignore[arg-type]
            fused_elementwise=row["source"] != "torchtitan-llama3" and not row.get("eager"), fused_loss=not core, reshard_after_forward=whole["pp"] == 1,
            reduce_precision=row.get("reduce") or "fp32", reduces_each_pass=row.get("accumulates") != "whole",  # type: ignore[arg-type]
            state_precision=row.get("state") or "fp32", expert_dispatch=row.get("dispatch") or "copies",  # type: ignore[arg-type]
            experts_as=row.get("experts_as") or "each", cuda_graphs=row.get("graphs") == "true",  # type: ignore[arg-type]
            fp8_scaling=row.get("scaling") or "delayed", overlaps_experts=row.get("overlap") == "true",  # type: ignore[arg-type]
            loss_precision=row.get("loss") or "fp32", whole_vocabulary=row.get("vocabulary") == "whole",  # type: ignore[arg-type]
            tensor_overlap=row.get("tensor_overlap") or "auto",  # type: ignore[arg-type]
            whole_experts=row.get("expert_tensor") == "1",
        )
        for size in _micro_batches(row, batch // whole["dp"])
    )  # fmt: skip
    if core and parallel.pipeline > 1:
        layouts = tuple(replace(each, parallel=_interleaved(parallel, stages)) for each in layouts for stages in _virtual_stages(row))
    name = f"{row['params_b']}B, {row['gpus']} {row['gpu']}"
    return Row(
        row["source"], name, shapes, hardware, fitting(shapes, hardware, layouts), _seconds(row, shapes, sequence, batch), row.get("collected", ""),
        float(row.get("first_predicted_s") or 0),
    )  # fmt: skip


def _hardware(row: Mapping[str, str]) -> Hardware:
    """Returns the GPUs of ``row``, in the nodes and with the network that its source says."""
    hardware = load_hardware(row["gpu"])
    if row.get("gpus_per_node"):
        hardware = replace(hardware, gpus_per_node=int(row["gpus_per_node"]))
    if row.get("network_bytes"):
        hardware = replace(hardware, network_bandwidth=float(row["network_bytes"]))
    if row.get("links") == "mesh":
        hardware = replace(hardware, is_meshed=True)
    return hardware


def fitting(shapes: ModelShapes, hardware: Hardware, layouts: tuple[TrainingLayout, ...]) -> tuple[TrainingLayout, ...]:
    """Returns those of ``layouts`` whose memory a GPU has, at least the smallest."""
    return tuple(each for each in layouts if predict_rank_memory(shapes, each).total <= hardware.memory_bytes) or layouts[:1]


def _shapes(row: Mapping[str, str]) -> ModelShapes:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    llama = row["source"].startswith("torchtitan-llama3")
    experts = latent = None
    if row.get("experts"):
        experts = ExpertShapes(
            int(row["experts"]), int(row["experts_per_token"]), int(row["expert_ffn"]), dense_layers=tuple(range(int(row.get("dense_layers") or 0))),
            shared_intermediate_size=int(row.get("shared_ffn") or 0),
        )  # fmt: skip
    if row.get("latent"):
        queries, keys, plain, rotated, values = map(int, row["latent"].split("/"))
        latent = LatentAttention(keys, plain, rotated, values, queries)
    layers, window = int(row["layers"]), row.get("window")
    return ModelShapes(
        "llama", int(row["vocab"]), hidden, layers, heads, int(row.get("kv_heads") or (8 if llama else heads)),
        int(row.get("head_dim") or hidden // heads), int(row.get("ffn") or (14336 if llama else 4 * hidden)), int(row["seq"]), tie_word_embeddings=not llama,
        gated_mlp=llama if "gated" not in row else row["gated"] == "true", experts=experts,
        qk_norm=row.get("qk_norm") == "true", latent=latent,
        # Every other layer.
        layer_windows=tuple(int(window) if layer % 2 == 0 else None for layer in range(layers)) if window else (),
    )  # fmt: skip


def _micro_batches(row: Mapping[str, str], of_a_rank: int) -> list[int]:
    """Returns what the source says, or the sizes up to 8 that divide a rank's sequences; Korthikanti et al. give theirs in table 3, torchtitan in table 1."""
    if row.get("micro_batch"):
        return [int(row["micro_batch"])]
    if row["source"] == "sequence-parallel-2022":
        return [4 if row["params_b"] == "22" else 1]
    if row["source"].startswith("torchtitan"):
        return [2]
    return [size for size in (1, 2, 4, 8) if of_a_rank % size == 0]


def _interleaved(parallel: ParallelConfig, stages: int) -> ParallelConfig:
    return replace(parallel, virtual_stages=stages, schedule="interleaved")


def _virtual_stages(row: Mapping[str, str]) -> list[int]:
    """Returns the virtual stages that the README of Megatron-LM leaves open: all that divide the layers of a rank. Communication of the pipeline is overlapped
    by default, it says, which is so in the interleaved schedule alone (``megatron/training/arguments.py``)."""
    layers = int(row["layers"]) // int(row["pp"])
    return [stages for stages in range(2, layers + 1) if layers % stages == 0]


def _seconds(row: Mapping[str, str], shapes: ModelShapes, sequence: int, batch: int) -> float:
    if row.get("step_seconds"):
        return float(row["step_seconds"])
    tokens = sequence * batch / int(row["gpus"])
    if row["tokens_per_s_per_gpu"]:
        return tokens / float(row["tokens_per_s_per_gpu"])
    hidden, layers = shapes.hidden_size, shapes.num_hidden_layers
    if row["flop_convention"] == "dense_12":
        return step_flops(shapes, [sequence] * batch) / int(row["gpus"]) / (float(row["tflops_per_gpu"]) * 1e12)
    # Narayanan et al. (2021), equation 3, without its recomputation.
    flops = 72 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + shapes.vocab_size / (12 * hidden * layers))
    return flops / int(row["gpus"]) / (float(row["tflops_per_gpu"]) * 1e12)


def loss(rows: Sequence[Row], given: Efficiency) -> float:
    return fmean(math.log(row.predicted(given) / row.seconds) ** 2 for row in rows)


def fit(rows: Sequence[Row], start: Efficiency = FITTED, rounds: int = 3) -> Efficiency:
    """Returns the constants within ``BOUNDS`` that a search along one after the other finds, with steps that shrink."""
    best, least = start, loss(rows, start)
    for step in (0.3, 0.1, 0.03)[:rounds]:
        improved = True
        while improved:
            improved = False
            for name, (low, high) in BOUNDS.items():
                for sign in (-1, 1):
                    value = min(high, max(low, getattr(best, name) + sign * step * (high - low)))
                    tried = replace(best, **{name: value})
                    if (now := loss(rows, tried)) < least * 0.999:
                        best, least, improved = tried, now, True
    return best


@functools.cache
def _fitted(rows: tuple[Row, ...]) -> Efficiency:
    return fit(rows, Efficiency(**{name: (low + high) / 2 for name, (low, high) in BOUNDS.items()}))


def by_fit(kept: Sequence[Row], row: Row) -> float:
    """Returns the seconds of ``row`` with constants that are fitted on ``kept``."""
    return row.predicted(_fitted(tuple(kept)))


def utilisation(rows: Sequence[Row]) -> float:
    """Returns the constant utilisation of the baseline that fits ``rows`` best."""
    return math.exp(fmean(math.log(row.baseline(1.0) / row.seconds) for row in rows))


def folds(rows: Sequence[Row], predict: Callable[[Sequence[Row], Row], float]) -> list[float]:
    """Returns the error of each row, predicted by what is fitted on the other folds. A fold is every fifth row, so that each has rows of all sources."""
    errors = [0.0] * len(rows)
    for fold in range(FOLDS):
        kept = [row for at, row in enumerate(rows) if at % FOLDS != fold]
        for at in range(fold, len(rows), FOLDS):
            errors[at] = predict(kept, rows[at]) / rows[at].seconds - 1
    return errors


def summary(name: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"| {name} | {len(errors)} | {fmean(sizes):.1%} | {max(sizes):.1%} | {fmean(errors):+.1%} |"


def of_held_out(name: str, rows: Sequence[Row], share: float) -> list[str]:
    """Returns the lines of the table for a file of rows that nothing is fitted on: all, those of dense models and of mixtures, as they were first predicted,
    of each day and of each source."""
    errors = {row: row.predicted(FITTED) / row.seconds - 1 for row in rows}

    def line(what: str, chosen: Callable[[Row], bool]) -> list[str]:
        of = [error for row, error in errors.items() if chosen(row)]
        return [summary(f"`{name}`{what}", of)] if of else []

    lines = line("", lambda row: True)
    lines += line(", dense models", lambda row: row.shapes.experts is None) + line(", mixtures of experts", lambda row: row.shapes.experts is not None)
    if all(row.first_s for row in rows):
        for what, kinds in (("", (True, False)), (", dense models", (False,)), (", mixtures of experts", (True,))):
            first = [row.first_s / row.seconds - 1 for row in rows if (row.shapes.experts is not None) in kinds]
            lines.append(summary(f"`{name}`{what}, first predicted", first))
    for day in dict.fromkeys(row.collected for row in rows):
        lines += line(f", collected {day}", lambda row, day=day: row.collected == day)  # type: ignore[misc]
    for source in dict.fromkeys(row.source for row in rows):
        lines += line(f": {source}", lambda row, source=source: row.source == source)  # type: ignore[misc]
    return [*lines, summary(f"one line, `{name}`", [row.baseline(share) / row.seconds - 1 for row in rows])]


def published_twice(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each layout that several publications or releases measured, and how far apart they are: one of them is missed by half of that."""
    same: dict[object, list[Row]] = {}
    for row in rows:
        same.setdefault((row.name, row.hardware.name, row.shapes, row.layouts), []).append(row)
    groups = [each for each in same.values() if len(each) > 1]
    apart = [max(row.seconds for row in each) / min(row.seconds for row in each) - 1 for each in groups]
    lines = [
        "## Layouts that were published more than once", "",
        f"{len(groups)} layouts, from the fastest to the slowest {fmean(apart):.1%} apart on average and {max(apart):.1%} at most.", "",
        "| layout | seconds | apart |", "| --- | --- | --- |",
    ]  # fmt: skip
    for each, share in zip(groups, apart, strict=True):
        lines.append(f"| {each[0].name}, {of_layout(each[0])} | {', '.join(f'{row.seconds:.3f} ({row.source})' for row in each)} | {share:.1%} |")
    return lines


def of_layout(row: Row) -> str:
    layout, mesh = row.layouts[0], row.layouts[0].parallel
    return (
        f"{layout.precision}, recompute {layout.recompute}, sequence {layout.sequence}, tp {mesh.tensor}, pp {mesh.pipeline} x {mesh.virtual_stages}, "
        f"dp {mesh.data}, cp {mesh.context}, ep {mesh.expert}, ZeRO {mesh.zero}"
    )


def of_row(row: Row, unseen: str, share: float) -> str:
    """Returns the line of a row. ``unseen``: its error with constants that were fitted without it."""
    what, seconds, page = of_layout(row), row.predicted(FITTED), row.baseline(share) / row.seconds - 1
    first = f"{row.first_s / row.seconds - 1:+.1%}" if row.first_s else ""
    return f"| {row.source} | {row.name} | {what} | {row.seconds:.3f} | {seconds:.3f} | {seconds / row.seconds - 1:+.1%} | {unseen} | {first} | {page:+.1%} |"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--fit", action="store_true", help="print the constants that fit all rows of planner-measured.csv")
    options = arguments.parse_args()
    rows, held = read(FOLDER / "planner-measured.csv"), {name: read(FOLDER / name) for name in HELD_OUT}
    if options.fit:
        print(fit(rows))
        return 0
    tested, share = folds(rows, by_fit), utilisation(rows)
    lines = [
        "# Predicted step times and published measurements", "", machine(), "", *(__doc__ or "").split("\n\n")[2:], "", f"Constants: `{FITTED}`.", "",
        "Sources: " + "; ".join(f"{name}: {where}" for name, where in SOURCES.items()) + ".", "",
        "| rows | count | mean error | worst | bias |", "| --- | --- | --- | --- | --- |",
        summary("`planner-measured.csv`, fitted", [row.predicted(FITTED) / row.seconds - 1 for row in rows]),
        summary("`planner-measured.csv`, each in a fold that was not fitted on", tested),
        summary(f"one line ({share:.0%} of the peak), `planner-measured.csv`, fitted", [row.baseline(share) / row.seconds - 1 for row in rows]),
        summary("one line, not fitted on", folds(rows, lambda kept, row: row.baseline(utilisation(kept)))),
        *(line for name, each in held.items() for line in of_held_out(name, each, share)), "",
        "| source | what | layout | measured s | predicted s | error | not fitted on | first predicted | one line |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(of_row(row, f"{error:+.1%}", share) for row, error in zip(rows, tested, strict=True)),
        *(of_row(row, "same", share) for each in held.values() for row in each), "",
        *published_twice([row for each in held.values() for row in each]),
    ]  # fmt: skip
    print("\n".join(lines))
    print(f"wrote {write_report('planner-errors', chr(10).join(lines) + chr(10), options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
