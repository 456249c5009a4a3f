"""Mixed precision on ranks: as close to one process as rounding allows, with sums in fp32 and one loss scale for all."""

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from data_parallel_training import record_gradients
from model_ranks import LEARNING_RATE, QWEN3, Case, build, distance, ranks_of, sequences_of, weights_of, whole
from pipeline_ranks import gather_ranks, named
from ranks import RankContext, Ranks

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.kernels.mixed import Precision, in_precision
from tandem.layout.mesh import MeshShape
from tandem.layout.pipeline_stages import stage_spans
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.replica import make_replica
from tandem.trainer.step import LossShare, train_step

CASE = Case(replace(QWEN3, tie_word_embeddings=False), "float32", "cpu")
BINS = ((0, 3), (1, 6), (4,), (5, 2))
"""Micro-batches by sequence, dealt to data-parallel ranks in turn."""
UNIT_ROUNDOFF = {"bf16": 2.0**-9, "fp16": 2.0**-12}
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")

Wrong = Literal["", "sums in bf16", "one rank in fp8", "no whole weights"]


def trained(
    here: RankContext | None, precision: Precision, zero: Any = 0, wrong: Wrong = "", overflow: tuple[str, int] = ("", 0), scale: float = 2.0**12
) -> dict[str, Any]:
    """Takes three steps on this rank, or in one process. ``overflow``: in the second step, rank 1's loss or gradient (by name) is
    multiplied by this factor."""
    ranks = ranks_of(here, CASE)
    stages = ranks.groups["pipeline"]
    spans = stage_spans(CASE.shapes, stages.size)
    if stages.size > 1:
        model = Decoder(CASE.shapes, select(CASE.kernels, torch.float32), spans=[spans[stages.rank]])
        load_tensors(model, weights_of(CASE.shapes).items())
    else:
        model = build(CASE, here)
    is_second = ranks.mesh.rank == 1
    model.kernels = in_precision(model.kernels, "fp8" if wrong == "one rank in fp8" and is_second else precision, CPU)
    pipeline = Pipeline(model, spans, stages) if stages.size > 1 else None
    config = TrainerConfig(
        learning_rate=LEARNING_RATE, weight_decay=0.01, precision=precision, loss_scale=scale, loss_scale_growth_steps=2, max_grad_norm=0.0
    )
    replica, guard, every = make_replica(model, config, ranks, zero, pipeline), GradScaler(config), sequences_of(CASE)
    plain = make_cross_entropy_loss(counts_of(every))
    micro_batches = [collate([every[i] for i in one]) for one in BINS[ranks.data.rank :: ranks.data.size]]
    what, factor, step = *overflow, 0

    def loss(logprobs: Any, rows: Any) -> LossShare:
        share = plain(logprobs, rows)
        return share._replace(loss=share.loss * factor) if (what, step, is_second) == ("loss", 1, True) else share

    if what not in ("", "loss") and is_second:
        dict(model.named_parameters())[what].register_hook(lambda gradient: gradient * factor if step == 1 else gradient)
    found: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "verdicts": [], "weights": []}
    reduce_scatter = Communicator.start_reduce_scatter
    if wrong == "sums in bf16":
        Communicator.start_reduce_scatter = lambda self, x, name, out=None: reduce_scatter(self, x.bfloat16().float(), name, out)  # type: ignore[method-assign]
    try:
        for step in range(CASE.steps):
            seen: dict[str, Any] = record_gradients(replica.sums) if replica.sums is not None and step == 0 else {}
            before = guard.scale
            done = train_step(
                model, replica.optimizer, micro_batches, loss, LEARNING_RATE, guard=guard, sums=replica.sums,
                forward_backward=replica.forward_backward,
            )  # fmt: skip
            if wrong == "no whole weights":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(parameter.bfloat16().float())
            if step == 0:
                # A power of two: dividing by it rounds nothing.
                gradients = {name: value / before for name, value in seen.items()} or {name: p.grad for name, p in model.named_parameters()}
                found["gradients"] = together(here, model, gradients)
            found["losses"].append(done.metrics["sft/loss"])
            found["norms"].append(done.metrics["actor/grad_norm"])
            found["scales"].append(guard.scale)
            found["verdicts"].append(done.verdict)
            with replica.whole():
                found["weights"].append(together(here, model, dict(model.named_parameters())))
    finally:
        Communicator.start_reduce_scatter = reduce_scatter  # type: ignore[method-assign]
    return found


def together(here: RankContext | None, model: Decoder, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By Hugging Face name; a pipeline rank has its own layers."""
    if here is not None and here.groups["pipeline"].size > 1:
        return named(model, [values[name] for name, _ in model.named_parameters()])
    return whole(model, values, None if here is None else here.groups)


_alone: dict[Precision, dict[str, Any]] = {}


def by_one_process(precision: Precision) -> dict[str, Any]:
    if precision not in _alone:
        _alone[precision] = trained(None, precision)
    return _alone[precision]


def updates(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the change of the parameters in three steps."""
    start = weights_of(CASE.shapes)
    return {name: weight.double() - start[name] for name, weight in found["weights"][-1].items()}


def on_ranks(ranks: Ranks, mesh: MeshShape, precision: Precision, zero: int = 0, wrong: Wrong = "") -> dict[str, Any]:
    """Returns the results of all ranks together; values on several ranks must be equal."""
    found = ranks.run(mesh, trained, precision, zero, wrong)
    for one in found:
        assert all(one[name] == found[0][name] for name in ("losses", "norms", "scales", "verdicts"))
    weights = [gather_ranks([{"weights": one["weights"][-1]} for one in found], "weights")]
    return found[0] | {"gradients": gather_ranks(found, "gradients"), "weights": weights}


def is_near(found: dict[str, Any], precision: Precision, exact_sums: bool) -> bool:
    """Asserts that ``found`` is as close to one process as it must be. If ranks multiply whole matrices, every rounding is that of one
    process, and gradients are the same numbers summed in fp32 in another order: the first ones differ by the rounding of fp32. After an
    update, a weight that differs in the last bit of fp32 may round to the other neighbour: with fp32's error e and the precision's u this
    happens to a share e / u of them, which is sqrt(e / u) < 0.1 of the norm of all rounding. Tensor-parallel ranks round their partial sums
    before the sum, where one process rounds the sum: both are as far from fp32 as rounding is, and at most twice that from each other.
    Losses of later steps differ by the same share of their decrease as the updates."""
    wanted, exact = by_one_process(precision), by_one_process("fp32")
    rounding, later = distance(wanted["gradients"], exact["gradients"]), distance(updates(wanted), updates(exact))
    assert rounding > UNIT_ROUNDOFF[precision] / 4, "the precision shows"
    of_later = (0.1 if exact_sums else 2) * later
    apart = max(abs(a - b) for a, b in zip(found["losses"], wanted["losses"], strict=True))
    bounds = [
        (distance(found["gradients"], wanted["gradients"]), 1e-6 if exact_sums else 2 * rounding),
        (abs(found["losses"][0] / wanted["losses"][0] - 1), 1e-7 if exact_sums else 2 * UNIT_ROUNDOFF[precision]),
        (distance(updates(found), updates(wanted)), of_later),
        (apart, of_later * (wanted["losses"][0] - wanted["losses"][-1])),
    ]
    return all(is_at <= most for is_at, most in bounds)


MESHES = {"data 2": MeshShape(data=2), "zero 2": MeshShape(data=2), "pipeline 2": MeshShape(pipeline=2), "tensor 2": MeshShape(tensor=2)}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ranks_are_as_near_to_one_process_as_rounding_lets_them_be(precision: Precision, name: str, ranks: Ranks) -> None:
    found = on_ranks(ranks, MESHES[name], precision, 2 if name == "zero 2" else 0)
    assert is_near(found, precision, exact_sums=name != "tensor 2")
    assert found["scales"] == by_one_process(precision)["scales"] and found["verdicts"] == ["taken"] * 3
    if precision == "fp16":
        assert found["scales"] == [2.0**12, 2.0**13, 2.0**13], "two good steps double it"


@pytest.mark.parametrize(
    ("name", "wrong"), [("data 2", "sums in bf16"), ("zero 2", "sums in bf16"), ("tensor 2", "one rank in fp8"), ("pipeline 2", "no whole weights")]
)
def test_gradients_that_are_added_in_bf16_weights_kept_in_it_and_a_rank_in_fp8_are_too_far(name: str, wrong: Wrong, ranks: Ranks) -> None:
    found = on_ranks(ranks, MESHES[name], "bf16", 2 if name == "zero 2" else 0, wrong)
    assert not is_near(found, "bf16", exact_sums=name != "tensor 2")


@pytest.mark.parametrize(
    ("name", "overflow"),
    [
        # fp16 ends at 65504: the gradients of rank 1's tokens overflow, those of rank 0's do not.
        ("data 2", ("loss", 2**14)), ("zero 2", ("loss", 2**14)),
        ("tensor 2", ("layers.1.down_proj.weight", math.inf)), ("pipeline 2", ("layers.1.down_proj.weight", math.inf)),
    ],
)  # fmt: skip
def test_scale_backs_off_on_all_ranks_where_one_overflows(name: str, overflow: tuple[str, int], ranks: Ranks) -> None:
    for rank in ranks.run(MESHES[name], trained, "fp16", 2 if name == "zero 2" else 0, "", overflow):
        assert rank["verdicts"] == ["taken", "backed_off", "taken"]
        assert rank["scales"] == [2.0**12, 2.0**11, 2.0**11] and math.isfinite(rank["losses"][1])
        first, second, third = rank["weights"]
        assert all(torch.equal(first[key], second[key]) for key in first), "the step is left out"
        assert not all(torch.equal(second[key], third[key]) for key in first)
