"""The rows of the table of `equality.py`: which mesh trains which model and how."""

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from machine import ROOT

sys.path.insert(0, str(ROOT / "tests" / "parallel"))

from model_ranks import QWEN3, QWEN3_MOE, Case

from tandem.layout.mesh import MeshShape

DENSE, TIED = replace(QWEN3, tie_word_embeddings=False), QWEN3
MUON = Case(DENSE, optimizer="muon")
WIDE = Case(replace(DENSE, hidden_size=96, intermediate_size=160), optimizer="adamw8bit")
"""8-bit AdamW codes the moments of tensors of 4,096 numbers and more."""
FOUR, EIGHT = replace(DENSE, num_hidden_layers=4), replace(DENSE, num_hidden_layers=8)


@dataclass(frozen=True)
class Row:
    """``mesh`` trains ``case``; ``schedule`` (name, virtual stages) where it has a pipeline. ``is_grpo``: by policy updates of GRPO.
    ``offloaded``: keys of the trainer that are ``nvme``. ``is_exact``: fp32 must be bit for bit. ``is_coded_by_rank``: moments of 8 bits are
    in blocks of what a rank holds, so only what is computed before one is rounded can be equal."""

    name: str
    mesh: MeshShape
    case: Case = field(default_factory=lambda: Case(DENSE))
    schedule: tuple[Any, int] = ("1f1b", 1)
    is_grpo: bool = False
    offloaded: tuple[str, ...] = ()
    is_exact: bool = False
    is_coded_by_rank: bool = False


def grpo(name: str, mesh: MeshShape, case: Case | None = None, **others: Any) -> Row:
    """Ten policy updates."""
    return Row(f"GRPO, {name}", mesh, replace(case or Case(DENSE), steps=10), is_grpo=True, **others)


ONE, DATA, TENSOR, PIPELINE, CONTEXT = MeshShape(), MeshShape(data=2), MeshShape(tensor=2), MeshShape(pipeline=2), MeshShape(context=2)
DATA_TENSOR, DATA_PIPELINE, DATA_EXPERT = MeshShape(data=2, tensor=2), MeshShape(data=2, pipeline=2), MeshShape(data=2, expert=2)
ALL_EIGHT = MeshShape(data=2, tensor=2, pipeline=2)
SEQUENCE, DETERMINISTIC = Case(DENSE, sequence=True), Case(DENSE, deterministic=True)
ALL_AWAY = ("offload", "offload_parameters", "offload_activations")

ROWS = (
    Row("data 2", DATA, is_exact=True),
    *(Row(f"data 2, zero {zero}", DATA, Case(DENSE, zero=zero), is_exact=True) for zero in (1, 2, 3)),
    Row("tensor 2, sequence parallel", TENSOR, SEQUENCE),
    Row("tensor 2, not sequence parallel", TENSOR),
    Row("tensor 2, deterministic, sequence parallel", TENSOR, Case(DENSE, deterministic=True, sequence=True)),
    Row("tensor 2, deterministic", TENSOR, DETERMINISTIC),
    Row("pipeline 2, 1f1b", PIPELINE, is_exact=True),
    Row("pipeline 2, 1f1b, tied embedding", PIPELINE, Case(TIED)),
    Row("pipeline 2, gpipe", PIPELINE, schedule=("gpipe", 1), is_exact=True),
    Row("pipeline 2, interleaved, 4 layers", PIPELINE, Case(FOUR), ("interleaved", 2), is_exact=True),
    Row("pipeline 4, 1f1b, 4 layers", MeshShape(pipeline=4), Case(FOUR), is_exact=True),
    Row("pipeline 4, gpipe, 4 layers", MeshShape(pipeline=4), Case(FOUR), ("gpipe", 1), is_exact=True),
    Row("pipeline 4, interleaved, 8 layers", MeshShape(pipeline=4), Case(EIGHT), ("interleaved", 2), is_exact=True),
    Row("context 2", CONTEXT),
    Row("data 2, expert 2", DATA_EXPERT, Case(QWEN3_MOE)),
    Row("context 2, expert 2", MeshShape(context=2, expert=2), Case(QWEN3_MOE)),
    Row("data 2 x tensor 2", DATA_TENSOR, SEQUENCE),
    Row("data 2 x tensor 2, zero 3", DATA_TENSOR, replace(SEQUENCE, zero=3)),
    Row("data 2 x context 2", MeshShape(data=2, context=2)),
    Row("data 2 x pipeline 2", DATA_PIPELINE),
    Row("tensor 2 x context 2", MeshShape(tensor=2, context=2), SEQUENCE),
    Row("tensor 2 x pipeline 2", MeshShape(tensor=2, pipeline=2), SEQUENCE),
    Row("context 2 x pipeline 2", MeshShape(context=2, pipeline=2)),
    Row("data 2 x tensor 2, expert 2", MeshShape(data=2, tensor=2, expert=2), Case(QWEN3_MOE, sequence=True)),
    Row("data 2 x tensor 2 x pipeline 2", ALL_EIGHT, SEQUENCE),
    Row("data 2 x tensor 2 x context 2", MeshShape(data=2, tensor=2, context=2), SEQUENCE),
    Row("data 2 x tensor 2 x context 2, zero 2", MeshShape(data=2, tensor=2, context=2), replace(SEQUENCE, zero=2)),
    *(Row(f"muon, data 2, zero {zero}", DATA, replace(MUON, zero=zero), is_exact=True) for zero in (1, 2, 3)),
    Row("muon, tensor 2", TENSOR, replace(MUON, sequence=True)),
    Row("muon, tensor 2, deterministic", TENSOR, replace(MUON, deterministic=True)),
    Row("muon, data 2 x tensor 2, zero 3", DATA_TENSOR, replace(MUON, sequence=True, zero=3)),
    Row("muon, data 2, expert 2, zero 2", DATA_EXPERT, Case(QWEN3_MOE, optimizer="muon", zero=2)),
    grpo("data 2", DATA, is_exact=True),
    *(grpo(f"data 2, zero {zero}", DATA, Case(DENSE, zero=zero), is_exact=True) for zero in (1, 2, 3)),
    grpo("tensor 2, sequence parallel", TENSOR, SEQUENCE),
    grpo("tensor 2, deterministic", TENSOR, DETERMINISTIC),
    grpo("pipeline 2, 1f1b", PIPELINE, is_exact=True),
    grpo("pipeline 2, gpipe", PIPELINE, schedule=("gpipe", 1), is_exact=True),
    grpo("pipeline 2, interleaved, 4 layers", PIPELINE, Case(FOUR), schedule=("interleaved", 2), is_exact=True),
    grpo("pipeline 2, 1f1b, tied embedding", PIPELINE, Case(TIED)),
    grpo("context 2", CONTEXT),
    grpo("data 2, expert 2", DATA_EXPERT, Case(QWEN3_MOE)),
    grpo("context 2, expert 2", MeshShape(context=2, expert=2), Case(QWEN3_MOE)),
    *(grpo(f"data 2 x tensor 2, zero {zero}", DATA_TENSOR, replace(SEQUENCE, zero=zero)) for zero in (1, 2, 3)),
    grpo("data 2 x context 2", MeshShape(data=2, context=2)),
    *(grpo(f"data 2 x pipeline 2, zero {zero}", DATA_PIPELINE, Case(DENSE, zero=zero), is_exact=True) for zero in (1, 2, 3)),
    grpo("tensor 2 x context 2", MeshShape(tensor=2, context=2), SEQUENCE),
    grpo("tensor 2 x pipeline 2", MeshShape(tensor=2, pipeline=2), SEQUENCE),
    grpo("context 2 x pipeline 2", MeshShape(context=2, pipeline=2)),
    grpo("data 2 x tensor 2, expert 2", MeshShape(data=2, tensor=2, expert=2), Case(QWEN3_MOE, sequence=True)),
    grpo("data 2 x tensor 2 x pipeline 2", ALL_EIGHT, SEQUENCE),
    grpo("data 2 x tensor 2 x context 2, zero 2", MeshShape(data=2, tensor=2, context=2), replace(SEQUENCE, zero=2)),
    *(grpo(f"muon, data 2, zero {zero}", DATA, replace(MUON, zero=zero), is_exact=True) for zero in (1, 2, 3)),
    grpo("muon, tensor 2", TENSOR, replace(MUON, sequence=True)),
    grpo("muon, pipeline 2", PIPELINE, MUON, is_exact=True),
    grpo("muon, data 2 x tensor 2, zero 1", DATA_TENSOR, replace(MUON, sequence=True, zero=1)),
    *(grpo(f"8-bit AdamW, data 2, zero {zero}", DATA, replace(WIDE, zero=zero), is_exact=True) for zero in (1, 2, 3)),
    grpo("8-bit AdamW, tensor 2", TENSOR, replace(WIDE, sequence=True), is_coded_by_rank=True),
    grpo("8-bit AdamW, pipeline 2", PIPELINE, WIDE, is_exact=True),
    grpo("8-bit AdamW, data 2 x tensor 2, zero 1", DATA_TENSOR, replace(WIDE, sequence=True, zero=1), is_coded_by_rank=True),
    *(grpo(f"recompute {what}, one process", ONE, Case(DENSE, recompute=what), is_exact=True) for what in ("selective", "full")),
    grpo("recompute full, data 2, zero 3", DATA, Case(DENSE, recompute="full", zero=3), is_exact=True),
    grpo("recompute selective, data 2 x tensor 2, zero 1", DATA_TENSOR, replace(SEQUENCE, recompute="selective", zero=1)),
    grpo("offload of moments, one process", ONE, offloaded=("offload",), is_exact=True),
    grpo("offload of moments and activations, data 2, zero 1", DATA, Case(DENSE, zero=1), offloaded=("offload", "offload_activations"), is_exact=True),
    grpo("offload of moments, weights and activations, data 2, zero 3", DATA, Case(DENSE, zero=3), offloaded=ALL_AWAY, is_exact=True),
    grpo("offload of moments and activations, pipeline 2", PIPELINE, offloaded=("offload", "offload_activations"), is_exact=True),
    grpo("offload of all three and recompute full, data 2 x tensor 2, zero 3", DATA_TENSOR, replace(SEQUENCE, zero=3, recompute="full"), offloaded=ALL_AWAY),
)
