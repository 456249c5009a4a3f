"""What training on ranks computes beside what one process computes: every kind of parallelism, its products, ZeRO, every optimizer,
recompute and offload, in float64 and fp32.

    python benchmarks/equality.py [--only "tensor 2" "GRPO, data 2, zero 3"]

Real processes over gloo train a Qwen3 (hidden 32, 2 layers or as many as said, 4 heads, untied; the rows with experts: 6 of them a layer)
for three steps of AdamW, or of Muon where a row says so, on 7 sequences of 2 to 30 tokens, so that ranks have unequal numbers of them.
One process trains from the same weights on the same micro-batches. It is the machinery of `tests/parallel`; that one process agrees with
transformers is shown by `tests/trainer/test_trainer_truth.py`.

Rows of GRPO take ten policy updates, each on 11 samples of three prompts, three of them without a score, beside one process that packs
them by itself, with everything in memory and nothing recomputed. What is offloaded is in files, in pieces of 192 numbers.

Logits: the largest difference of any (they go to about 10); of GRPO, of the log-probabilities of all sampled tokens. Loss and gradient
norm: the largest relative difference in any step. Gradients: the norm of the difference over the norm, all parameters gathered, before
the first clipping (empty where they are in files). Parameters: the largest difference after the last step, as a share of the learning
rate. **bits**: there is none. Wanted in float64: 1e-10 everywhere, parameters before the division too (1e-8 of the learning rate); in
fp32: gradients 1e-6, loss and norm 1e-5, parameters 0.1, or, of these three, twice what rounding alone does to one process ("one process
beside its own float64", of the model and optimizer of the rows below it), since both sides are rounded. After ten steps that is much where
a rounding sends a token to another expert. fp32 runs the C++ kernels where there is a compiler, float64 plain torch.

Bit for bit, in fp32: whether logits, gradients and parameters have every bit of one process. GRPO is trained for ten more steps of two
updates each for this column, on four samples with each in a micro-batch of its own and without clipping: two data-parallel ranks then add
the gradients that one process adds, in its order. In the other columns they add them in another order, which fp32 shows. Data-parallel
ranks, ZeRO and stages of untied models must be bit for bit, and so must each optimizer, recompute and offload on them.

8-bit AdamW has the larger model of hidden 96, because small tensors keep whole moments. Its moments are rounded in blocks of 256 numbers
of what a rank holds, and a tensor rank's part has other blocks, with other scales, than the whole matrix: from the second update on the
ranks train with moments that are rounded otherwise than those of one process, as far from it as 8 bits are
(`tests/parallel/test_parallel_optimizer_states.py` has the bound). In fp32 a last bit of a gradient can round a moment to the next of the
256 values, 1/64 of its block's largest away. What is computed before the first rounding, logits and gradients, is compared there; values
in brackets are measured and not judged. In float64 on data-parallel ranks and stages, and bit for bit, all is.

The exit status is 1 where a row is outside.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from equality_rows import ROWS, Row
from machine import machine, write_report
from options import parser as shared_parser

# isort: split
# The rows have put the folder of these modules on the path.
from data_parallel_training import trained
from model_ranks import LEARNING_RATE, Case, distance, sequences_of
from pipeline_ranks import alone, train_pipeline
from policy_ranks import EACH_ONE, Policy, train_policy
from policy_ranks import gather_shards as whole_tensors
from ranks import Ranks, small_pieces

from tandem.layout.parameters import parameters
from tandem.layout.sharding import shard_slices

PIPELINE_BINS = ((0, 3), (1, 6), (4, 5, 2))
"""Micro-batches by sequence; two data-parallel ranks have a part of each."""
Dtype = Literal["float64", "float32"]


class Whole(NamedTuple):
    """What a run came to, whole: ``logits`` of the first step by sequence, tensors by Hugging Face name."""

    logits: dict[int, torch.Tensor]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


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
    return Policy(case, schedule=row.schedule, offloaded=row.offloaded, deviation=0.05)


def policy_in_order(row: Row, case: Case) -> Policy:
    """Ranks add the gradients of two samples, each in a micro-batch of its own, as one process does."""
    return replace(EACH_ONE, case=case, schedule=row.schedule, offloaded=row.offloaded)


def of_policy(found: dict[str, Any], gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> Whole:
    losses, norms = ([metrics[name] for metrics in found["metrics"]] for name in ("actor/pg_loss", "actor/grad_norm"))
    return Whole(dict(enumerate(found["logprobs"])), losses, norms, gradients, parameters)


MakePolicy = Callable[[Row, Case], Policy]


def by_one_process(row: Row, case: Case, make: MakePolicy = policy_of) -> Whole:
    """With everything in memory and nothing recomputed."""
    case = replace(case, deterministic=False, sequence=False, zero=0, recompute="none")
    if row.is_grpo:
        found = train_policy(None, replace(make(row, case), offloaded=(), schedule=("1f1b", 1)))
        return of_policy(found, found["gradients"], found["parameters"])
    bins = bins_of(row)
    found = alone(case, bins)
    return Whole(by_sequence(found["logits"], bins, case), found["losses"], found["norms"], found["gradients"], found["parameters"])


@contextmanager
def away(ranks: Ranks, row: Row) -> Iterator[Path | None]:
    """A folder for what is offloaded, in pieces so small that small models have many; ``None`` where nothing is."""
    if not row.offloaded:
        yield None
        return
    before = ranks.run(row.mesh, small_pieces, 192, 64)[0]
    with TemporaryDirectory() as folder:
        yield Path(folder)
    ranks.run(row.mesh, small_pieces, *before)


def by_ranks(ranks: Ranks, row: Row, case: Case, make: MakePolicy = policy_of) -> list[Whole]:
    """What each rank has, and, of a pipeline or of GRPO, what they have together."""
    if row.is_grpo:
        policy = make(row, case)
        with away(ranks, row) as folder:
            shares = ranks.run(row.mesh, train_policy, policy, folder)
        gradients = {} if row.offloaded else whole_tensors(shares, "gradients", policy)
        return [of_policy(one, gradients, whole_tensors(shares, "parameters", policy)) for one in shares]
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
    """The largest of any rank; exactly 0 only where every bit is equal, NaN where gradients were not kept."""
    measures: dict[str, Callable[[Whole], float]] = {
        "logits": lambda one: furthest(one.logits, wanted.logits),
        "loss": lambda one: relative(one.losses, wanted.losses),
        "gradients": lambda one: distance(one.gradients, wanted.gradients) if one.gradients else math.nan,
        "norm": lambda one: relative(one.norms, wanted.norms),
        "parameters": lambda one: furthest(one.parameters, wanted.parameters) / LEARNING_RATE,
    }
    assert {i for one in found for i in one.logits} == set(wanted.logits)
    return {name: max(measure(one) for one in found) for name, measure in measures.items()}


EXACT = ("logits", "gradients", "parameters")


def is_bit_for_bit(found: Mapping[str, float]) -> bool:
    return all(found[name] == 0 or math.isnan(found[name]) for name in EXACT)


WITHIN: dict[Dtype, dict[str, float]] = {
    "float64": {"logits": 1e-10, "loss": 1e-10, "gradients": 1e-10, "norm": 1e-10, "parameters": 1e-10 / LEARNING_RATE},
    "float32": {"logits": 1e-4, "loss": 1e-5, "gradients": 1e-6, "norm": 1e-5, "parameters": 0.1},
}


def is_judged(row: Row, name: str, dtype: Dtype) -> bool:
    is_rounded_otherwise = row.is_coded_by_rank or (row.case.optimizer == "adamw8bit" and dtype == "float32")
    return not is_rounded_otherwise or name in ("logits", "gradients")


def is_within(row: Row, found: Mapping[str, float], dtype: Dtype, rounding: Mapping[str, float]) -> bool:
    """``rounding``: the differences of one process in fp32 from float64; empty in float64."""
    limits = {name: max(limit, 2 * rounding.get(name, 0.0)) if name in ("loss", "norm", "parameters") else limit for name, limit in WITHIN[dtype].items()}
    return all(found[name] <= limit or math.isnan(found[name]) for name, limit in limits.items() if is_judged(row, name, dtype))


def cell(value: float) -> str:
    return "**bits**" if value == 0 else "" if math.isnan(value) else f"{value:.1e}"


def kind_of(row: Row) -> tuple[Any, ...]:
    """What rows have in common that one process trains alike."""
    return row.case.shapes, row.case.optimizer, row.is_grpo


class Table:
    """Rows of one dtype beside references that are made once."""

    def __init__(self, ranks: Ranks, dtype: Dtype) -> None:
        self.ranks, self.dtype, self.outside = ranks, dtype, list[str]()
        self.lines = ["", f"## {dtype}", "", f"| ranks | logits | loss | gradients | gradient norm | parameters |{self.last(' bit for bit |')} |"]
        self.lines.append("|---" * (self.lines[-1].count("|") - 1) + "|")
        self._references: dict[Any, Whole] = {}
        self._rounding: dict[Any, dict[str, float]] = {}

    def last(self, text: str) -> str:
        return text if self.dtype == "float32" else ""

    def add(self, row: Row) -> None:
        case = replace(row.case, dtype=self.dtype, kernels="cpu" if self.dtype == "float32" else "reference")
        found = differences(by_ranks(self.ranks, row, case), self._reference(row, case, policy_of))
        is_good, exact = is_within(row, found, self.dtype, self._rounding.get(kind_of(row), {})), False
        if self.dtype == "float32":
            exact = is_bit_for_bit(self._in_order(row, case) if row.is_grpo else found)
            is_good &= exact or not row.is_exact
        if not is_good:
            self.outside.append(f"{row.name}, {self.dtype}")
        judged = " | ".join(cell(value) if is_judged(row, name, self.dtype) else f"({cell(value)})" for name, value in found.items())
        self.lines.append(f"| {row.name} | {judged} |{self.last(' **yes** |' if exact else ' no |')} {'within' if is_good else 'OUTSIDE'} |")
        print(self.lines[-1], file=sys.stderr, flush=True)

    def _in_order(self, row: Row, case: Case) -> dict[str, float]:
        return differences(by_ranks(self.ranks, row, case, policy_in_order), self._reference(row, case, policy_in_order))

    def _reference(self, row: Row, case: Case, make: MakePolicy) -> Whole:
        kind = kind_of(row)
        key = (*kind, bins_of(row), make)
        if key not in self._references:
            reference = self._references[key] = by_one_process(row, case, make)
            if self.dtype == "float32" and make is policy_of and kind not in self._rounding:
                exact = by_one_process(row, replace(case, dtype="float64", kernels="reference"), make)
                self._rounding[kind] = differences([reference], exact)
                self.lines.append(f"| *one process beside its own float64* | {' | '.join(map(cell, self._rounding[kind].values()))} | | |")
        return self._references[key]


def main() -> int:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", help="rows, by their names")
    options = parser.parse_args()
    chosen = [row for row in ROWS if not options.only or row.name in options.only]
    if not chosen:
        parser.error(f"no such row; there are {', '.join(row.name for row in ROWS)}")
    torch.set_num_threads(1)
    described, began = machine(), time.perf_counter()
    lines = ["# Ranks beside one process", "", described, "", (__doc__ or "").split("\n\n", 2)[2].rstrip()]
    outside: list[str] = []
    with closing(Ranks()) as ranks:
        dtypes: tuple[Dtype, ...] = ("float64", "float32")
        for dtype in dtypes:
            table = Table(ranks, dtype)
            for row in chosen:
                table.add(row)
            lines += table.lines
            outside += table.outside
    lines += ["", f"{len(chosen)} rows in each of two dtypes, {time.perf_counter() - began:.0f} s."]
    print("\n".join(lines))
    print(f"wrote {write_report('equality', chr(10).join(lines), options.out)}")
    if outside:
        print(f"outside: {'; '.join(outside)}", file=sys.stderr)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
