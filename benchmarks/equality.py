"""What training on ranks computes beside what one process computes: every kind of parallelism, its products and ZeRO, in float64 and fp32.

    python benchmarks/equality.py [--only "tensor 2" "zero 3"]

Real processes over gloo train a Qwen3 (hidden 32, 2 layers or as many as said, 4 heads, untied; the rows with experts: 6 of them a layer) for three
steps of AdamW, or of Muon where a row says so, on 7 sequences of 2 to 30 tokens, so that ranks have unequal numbers of them. One process trains
from the same weights on the same micro-batches. It is the machinery of `tests/parallel`; that one process agrees with transformers is shown by
`tests/trainer/test_trainer_truth.py`.

Rows of GRPO take three policy updates on 11 samples of three prompts, three of them without a score, beside one process that packs them by itself.

Logits: the largest difference of any (they go to about 10); of GRPO, of the log-probabilities of all sampled tokens. Loss and gradient norm: the
largest relative difference in three steps. Gradients: the norm of the difference over the norm, all parameters gathered, before clipping.
Parameters: the largest difference after three steps, as a share of the learning rate. **bits**: there is none. Wanted in float64: 1e-10
everywhere, parameters before the division too (1e-8 of the learning rate); in fp32: gradients 1e-6, loss and norm 1e-5, parameters 0.1.
The exit status is 1 where a row is outside. fp32 runs the C++ kernels where there is a compiler, float64 plain torch. "One process beside its own
float64" is what rounding alone does to the fp32 that the rows below it are compared with.
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from machine import ROOT, machine, write_report
from options import parser as shared_parser

sys.path.insert(0, str(ROOT / "tests" / "parallel"))

from data_ranks import trained
from model_ranks import LEARNING_RATE, QWEN3, QWEN3_MOE, Case, distance, sequences_of
from pipeline_ranks import alone, train_pipeline
from policy_ranks import Policy, train_policy
from policy_ranks import gather_shards as whole_tensors
from ranks import Ranks

from tandem.layout.mesh import MeshShape
from tandem.layout.shapes import parameters
from tandem.layout.sharding import shard_slices

DENSE, TIED = replace(QWEN3, tie_word_embeddings=False), QWEN3
MUON = Case(DENSE, optimizer="muon")
FOUR, EIGHT = replace(DENSE, num_hidden_layers=4), replace(DENSE, num_hidden_layers=8)
PIPELINE_BINS = ((0, 3), (1, 6), (4, 5, 2))
"""Micro-batches by sequence; two data-parallel ranks have a part of each."""
Dtype = Literal["float64", "float32"]


@dataclass(frozen=True)
class Row:
    """``mesh`` trains ``case``; ``schedule`` (name, virtual stages) where it has a pipeline. ``is_grpo``: by policy updates of GRPO."""

    name: str
    mesh: MeshShape
    case: Case = field(default_factory=lambda: Case(DENSE))
    schedule: tuple[Any, int] = ("1f1b", 1)
    is_grpo: bool = False


class Whole(NamedTuple):
    """What a run came to, whole: ``logits`` of the first step by sequence, tensors by Hugging Face name."""

    logits: dict[int, torch.Tensor]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


ROWS = (
    Row("data 2", MeshShape(data=2)),
    *(Row(f"data 2, zero {zero}", MeshShape(data=2), Case(DENSE, zero=zero)) for zero in (1, 2, 3)),
    Row("tensor 2, sequence parallel", MeshShape(tensor=2), Case(DENSE, sequence=True)),
    Row("tensor 2, not sequence parallel", MeshShape(tensor=2)),
    Row("tensor 2, deterministic, sequence parallel", MeshShape(tensor=2), Case(DENSE, deterministic=True, sequence=True)),
    Row("tensor 2, deterministic", MeshShape(tensor=2), Case(DENSE, deterministic=True)),
    Row("pipeline 2, 1f1b", MeshShape(pipeline=2)),
    Row("pipeline 2, 1f1b, tied embedding", MeshShape(pipeline=2), Case(TIED)),
    Row("pipeline 2, gpipe", MeshShape(pipeline=2), schedule=("gpipe", 1)),
    Row("pipeline 2, interleaved, 4 layers", MeshShape(pipeline=2), Case(FOUR), schedule=("interleaved", 2)),
    Row("pipeline 4, 1f1b, 4 layers", MeshShape(pipeline=4), Case(FOUR)),
    Row("pipeline 4, gpipe, 4 layers", MeshShape(pipeline=4), Case(FOUR), schedule=("gpipe", 1)),
    Row("pipeline 4, interleaved, 8 layers", MeshShape(pipeline=4), Case(EIGHT), schedule=("interleaved", 2)),
    Row("context 2", MeshShape(context=2)),
    Row("data 2, expert 2", MeshShape(data=2, expert=2), Case(QWEN3_MOE)),
    Row("context 2, expert 2", MeshShape(context=2, expert=2), Case(QWEN3_MOE)),
    Row("data 2 x tensor 2", MeshShape(data=2, tensor=2), Case(DENSE, sequence=True)),
    Row("data 2 x tensor 2, zero 3", MeshShape(data=2, tensor=2), Case(DENSE, sequence=True, zero=3)),
    Row("data 2 x context 2", MeshShape(data=2, context=2)),
    Row("data 2 x pipeline 2", MeshShape(data=2, pipeline=2)),
    Row("tensor 2 x context 2", MeshShape(tensor=2, context=2), Case(DENSE, sequence=True)),
    Row("tensor 2 x pipeline 2", MeshShape(tensor=2, pipeline=2), Case(DENSE, sequence=True)),
    Row("context 2 x pipeline 2", MeshShape(context=2, pipeline=2)),
    Row("data 2 x tensor 2, expert 2", MeshShape(data=2, tensor=2, expert=2), Case(QWEN3_MOE, sequence=True)),
    Row("data 2 x tensor 2 x pipeline 2", MeshShape(data=2, tensor=2, pipeline=2), Case(DENSE, sequence=True)),
    Row("data 2 x tensor 2 x context 2", MeshShape(data=2, tensor=2, context=2), Case(DENSE, sequence=True)),
    Row("data 2 x tensor 2 x context 2, zero 2", MeshShape(data=2, tensor=2, context=2), Case(DENSE, sequence=True, zero=2)),
    *(Row(f"muon, data 2, zero {zero}", MeshShape(data=2), replace(MUON, zero=zero)) for zero in (1, 2, 3)),
    Row("muon, tensor 2", MeshShape(tensor=2), replace(MUON, sequence=True)),
    Row("muon, tensor 2, deterministic", MeshShape(tensor=2), replace(MUON, deterministic=True)),
    Row("muon, data 2 x tensor 2, zero 3", MeshShape(data=2, tensor=2), replace(MUON, sequence=True, zero=3)),
    Row("muon, data 2, expert 2, zero 2", MeshShape(data=2, expert=2), Case(QWEN3_MOE, optimizer="muon", zero=2)),
    Row("GRPO, data 2", MeshShape(data=2), is_grpo=True),
    *(Row(f"GRPO, data 2, zero {zero}", MeshShape(data=2), Case(DENSE, zero=zero), is_grpo=True) for zero in (1, 2, 3)),
    Row("GRPO, tensor 2, sequence parallel", MeshShape(tensor=2), Case(DENSE, sequence=True), is_grpo=True),
    Row("GRPO, tensor 2, deterministic", MeshShape(tensor=2), Case(DENSE, deterministic=True), is_grpo=True),
    Row("GRPO, pipeline 2, 1f1b", MeshShape(pipeline=2), is_grpo=True),
    Row("GRPO, pipeline 2, interleaved, 4 layers", MeshShape(pipeline=2), Case(FOUR), ("interleaved", 2), is_grpo=True),
    Row("GRPO, context 2", MeshShape(context=2), is_grpo=True),
    Row("GRPO, data 2, expert 2", MeshShape(data=2, expert=2), Case(QWEN3_MOE), is_grpo=True),
    Row("GRPO, data 2 x tensor 2, zero 3", MeshShape(data=2, tensor=2), Case(DENSE, sequence=True, zero=3), is_grpo=True),
    Row("GRPO, data 2 x pipeline 2, zero 1", MeshShape(data=2, pipeline=2), Case(DENSE, zero=1), is_grpo=True),
    Row("GRPO, data 2 x tensor 2 x pipeline 2", MeshShape(data=2, tensor=2, pipeline=2), Case(DENSE, sequence=True), is_grpo=True),
)


def bins_of(row: Row) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of ``row``: what a rank has in one go."""
    if row.mesh.pipeline > 1:
        return PIPELINE_BINS
    count = len(row.case.lengths)
    return tuple(tuple(range(first, count, row.mesh.data)) for first in range(row.mesh.data))


def by_sequence(logits: list[torch.Tensor], bins: tuple[tuple[int, ...], ...], case: Case) -> dict[int, torch.Tensor]:
    """``logits`` of each micro-batch, by sequence. Tokens after the last that predicts one that counts are not computed."""
    masks = [sequence.loss_mask for sequence in sequences_of(case)]
    lengths = [max(i for i, counts in enumerate(mask) if counts) for mask in masks]
    return {i: part for one, own in zip(logits, bins, strict=True) for i, part in zip(own, one.split([lengths[i] for i in own]), strict=True)}


def policy_of(row: Row, case: Case) -> Policy:
    # With steeper weights fp32 in one process is further from its own float64 than ranks may be from it.
    return Policy(case, schedule=row.schedule, deviation=0.05)


def of_policy(found: dict[str, Any], gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> Whole:
    losses, norms = ([metrics[name] for metrics in found["metrics"]] for name in ("actor/pg_loss", "actor/grad_norm"))
    return Whole(dict(enumerate(found["logprobs"])), losses, norms, gradients, parameters)


def in_one_process(row: Row, case: Case) -> Whole:
    if row.is_grpo:
        found = train_policy(None, policy_of(row, case))
        return of_policy(found, found["gradients"], found["parameters"])
    bins = bins_of(row)
    found = alone(case, bins)
    return Whole(by_sequence(found["logits"], bins, case), found["losses"], found["norms"], found["gradients"], found["parameters"])


def on_ranks(ranks: Ranks, row: Row, case: Case) -> list[Whole]:
    """What each rank has, and, of a pipeline or of GRPO, what they have together."""
    if row.is_grpo:
        policy = policy_of(row, case)
        shares = ranks.run(row.mesh, train_policy, policy)
        tensors = [whole_tensors(shares, name, policy) for name in ("gradients", "parameters")]
        return [of_policy(one, *tensors) for one in shares]
    if row.mesh.pipeline == 1:
        found = ranks.run(row.mesh, trained, case, case.zero)
        return [Whole(one.logits, one.losses, one.norms, one.gradients, one.parameters) for one in found]
    bins = bins_of(row)
    found = ranks.run(row.mesh, train_pipeline, case, bins, *row.schedule)
    dealt = [tuple(one[first :: row.mesh.data] for one in bins) for first in range(row.mesh.data)]
    logits: dict[int, torch.Tensor] = {}
    for rank, one in enumerate(found):
        if one["logits"]:
            data = rank // row.mesh.tensor // row.mesh.context % row.mesh.data
            logits |= by_sequence(one["logits"], dealt[data], case)
    whole = [together(case, found, name) for name in ("gradients", "parameters")]
    return [Whole(logits, one["losses"], one["norms"], *whole) for one in found]


def together(case: Case, found: list[dict[str, Any]], kind: str) -> dict[str, torch.Tensor]:
    """Every tensor out of the parts that ranks hold; where they hold the same numbers, those of the last."""
    shapes = dict(parameters(case.shapes))
    made: dict[str, torch.Tensor] = {}
    for one in found:
        for name, part in one[kind].items():
            whole = made.setdefault(name, torch.full(shapes[name], torch.nan, dtype=part.dtype))
            whole[shard_slices(case.shapes, name, shapes[name], one["cut"])] = part
    assert made.keys() == shapes.keys() and all(bool(tensor.isfinite().all()) for tensor in made.values())
    return made


def furthest(found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]) -> float:
    return max((found[key] - wanted[key]).abs().max().item() for key in found)


def relative(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def differences(found: list[Whole], wanted: Whole) -> dict[str, float]:
    """The largest of any rank; exactly 0 only where every bit is equal."""
    measures: dict[str, Callable[[Whole], float]] = {
        "logits": lambda one: furthest(one.logits, wanted.logits),
        "loss": lambda one: relative(one.losses, wanted.losses),
        "gradients": lambda one: distance(one.gradients, wanted.gradients),
        "norm": lambda one: relative(one.norms, wanted.norms),
        "parameters": lambda one: furthest(one.parameters, wanted.parameters) / LEARNING_RATE,
    }
    assert {i for one in found for i in one.logits} == set(wanted.logits)
    return {name: max(measure(one) for one in found) for name, measure in measures.items()}


def cells(found: Mapping[str, float]) -> str:
    return " | ".join("**bits**" if value == 0 else f"{value:.1e}" for value in found.values())


WITHIN: dict[Dtype, dict[str, float]] = {
    "float64": {"logits": 1e-10, "loss": 1e-10, "gradients": 1e-10, "norm": 1e-10, "parameters": 1e-10 / LEARNING_RATE},
    "float32": {"logits": 1e-4, "loss": 1e-5, "gradients": 1e-6, "norm": 1e-5, "parameters": 0.1},
}


def main() -> int:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", help="rows, by their names")
    options = parser.parse_args()
    chosen = [row for row in ROWS if not options.only or row.name in options.only]
    if not chosen:
        parser.error(f"no such row; there are {', '.join(row.name for row in ROWS)}")
    torch.set_num_threads(1)
    described, began, outside = machine(), time.perf_counter(), []
    lines = ["# Ranks beside one process", "", described, "", (__doc__ or "").split("\n\n", 2)[2].rstrip()]
    with closing(Ranks()) as ranks:
        for dtype, kernels in (("float64", "reference"), ("float32", "cpu")):
            within = WITHIN[dtype]  # type: ignore[index]
            lines += ["", f"## {dtype}", "", "| ranks | logits | loss | gradients | gradient norm | parameters | |", "|---|---|---|---|---|---|---|"]
            references: dict[Any, Whole] = {}
            for row in chosen:
                case = replace(row.case, dtype=dtype, kernels=kernels)
                key = (row.case.shapes, row.case.optimizer, row.is_grpo, bins_of(row))
                if key not in references:
                    plain = replace(case, deterministic=False, sequence=False, zero=0)
                    is_new = all(known[:3] != key[:3] for known in references)
                    references[key] = in_one_process(row, plain)
                    if dtype == "float32" and is_new:
                        exact = in_one_process(row, replace(plain, dtype="float64", kernels="reference"))
                        lines.append(f"| *one process beside its own float64* | {cells(differences([references[key]], exact))} | |")
                found = differences(on_ranks(ranks, row, case), references[key])
                is_within = all(found[name] <= limit for name, limit in within.items())
                if not is_within:
                    outside.append(f"{row.name}, {dtype}")
                lines.append(f"| {row.name} | {cells(found)} | {'within' if is_within else 'OUTSIDE'} |")
                print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", f"{len(chosen)} rows in each of two dtypes, {time.perf_counter() - began:.0f} s."]
    print("\n".join(lines))
    print(f"wrote {write_report('equality', chr(10).join(lines), options.out)}")
    if outside:
        print(f"outside: {'; '.join(outside)}", file=sys.stderr)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
