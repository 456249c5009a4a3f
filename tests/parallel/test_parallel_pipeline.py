"""Pipeline parallelism: the ranks compute the results of one process."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_ranks import (
    COHERE,
    DEEPSEEK_V3,
    GEMMA,
    GPT_OSS,
    GRANITE,
    LEARNING_RATE,
    LLAMA,
    OLMO2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    SMOLLM3,
    Case,
    distance,
    sequences_of,
    weights_of,
)
from pipeline_ranks import alone, gather_ranks, micro_batches_of, named, train_pipeline
from ranks import RankContext, Ranks

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.mesh import MeshShape
from tandem.layout.pipeline_stages import stage_spans
from tandem.layout.schedules import PipelineShape, ScheduleName
from tandem.layout.sharding import shard_slices
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_model, load_tensors, save_model, to_huggingface
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.parallel.pipeline import Pipeline, _End
from tandem.trainer.parallel.ranks import Ranks as AllRanks
from tandem.trainer.parallel.ranks import alone as alone_ranks
from tandem.trainer.parallel.replica import make_replica
from tandem.trainer.parallel.router_balance import make_balance
from tandem.trainer.step import train_step

TIED, UNTIED = replace(QWEN3, num_hidden_layers=5), replace(LLAMA, num_hidden_layers=5)
HYBRID = replace(QWEN3_NEXT, num_hidden_layers=4, linear_attention=replace(QWEN3_NEXT.linear_attention, layers=(0, 1, 3)))
BINS = ((0, 3), (1,), (4, 5), (2,), (6,))
"""Micro-batches by sequence; as uneven as can be: 17 + 5, 2, 30 + 3, 17 and 8 tokens."""
pytestmark = pytest.mark.usefixtures("one_thread")


def check(found: list[dict[str, Any]], wanted: dict[str, Any], close: float, apart: float) -> None:
    for rank in found:
        pairs = zip(rank["inferred"], wanted["inferred"], strict=True)
        assert all(torch.allclose(a, b, rtol=close * 10, atol=0) and a.dtype == torch.float64 for a, b in pairs)
    assert len(found[-1]["logits"]) == len(wanted["logits"])
    assert all(torch.allclose(a, b, rtol=close * 10, atol=close * 10) for a, b in zip(found[-1]["logits"], wanted["logits"], strict=True))
    assert distance(gather_ranks(found, "gradients"), wanted["gradients"]) < close
    for rank in found:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=close * 10)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=close * 10)
    parameters = gather_ranks(found, "parameters")
    assert parameters.keys() == wanted["parameters"].keys()
    assert max((parameters[name] - value).abs().max().item() for name, value in wanted["parameters"].items()) < apart


CASES = [
    pytest.param(2, "1f1b", 1, (), TIED, id="2 ranks, tied"),
    pytest.param(2, "1f1b", 1, (4, 1), UNTIED, id="2 ranks, uneven, untied"),
    pytest.param(4, "1f1b", 1, (), TIED, id="4 ranks, tied"),
    pytest.param(4, "gpipe", 1, (1, 2, 1, 1), UNTIED, id="4 ranks, GPipe"),
    pytest.param(2, "interleaved", 2, (1, 2, 1, 1), TIED, id="2 ranks, interleaved, tied"),
    pytest.param(2, "interleaved", 2, (), UNTIED, id="2 ranks, interleaved, untied"),
    pytest.param(2, "1f1b", 1, (), replace(QWEN3_MOE, num_hidden_layers=3), id="2 ranks, mixtures of experts"),
    pytest.param(
        2, "1f1b", 1, (), replace(GRANITE, num_hidden_layers=3, tie_word_embeddings=True), id="2 ranks, multipliers and four norms", marks=pytest.mark.full
    ),
    pytest.param(2, "1f1b", 1, (), replace(OLMO2, num_hidden_layers=3), id="2 ranks, norms after only", marks=pytest.mark.full),
    pytest.param(2, "1f1b", 1, (), replace(SMOLLM3, num_hidden_layers=2), id="2 ranks, a layer without rotation", marks=pytest.mark.full),
    pytest.param(2, "1f1b", 1, (), DEEPSEEK_V3, id="2 ranks, latent attention", marks=pytest.mark.full),
    pytest.param(2, "1f1b", 1, (), GEMMA, id="2 ranks, caps and norms from one", marks=pytest.mark.full),
    pytest.param(2, "1f1b", 1, (), GPT_OSS, id="2 ranks, sinks and biases of experts", marks=pytest.mark.full),
    pytest.param(2, "1f1b", 1, (), COHERE, id="2 ranks, attention and MLP side by side", marks=pytest.mark.full),
    pytest.param(2, "1f1b", 1, (), QWEN3_NEXT, id="2 ranks, linear attention on the first, softmax attention on the second", marks=pytest.mark.full),
    pytest.param(4, "1f1b", 1, (), HYBRID, id="4 ranks, a layer of linear or softmax attention each", marks=pytest.mark.full),
    pytest.param(2, "interleaved", 2, (), HYBRID, id="2 ranks, interleaved, linear attention", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("size", "order", "virtual", "counts", "shapes"), CASES)
def test_a_pipeline_is_one_process_in_float64(
    ranks: Ranks, size: int, order: ScheduleName, virtual: int, counts: tuple[int, ...], shapes: Any
) -> None:
    case = Case(shapes)
    found = ranks.run(MeshShape(pipeline=size), train_pipeline, case, BINS, order, virtual, counts)
    check(found, alone(case, BINS), 1e-10, 1e-10)


@pytest.mark.parametrize("shapes", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_pipeline_is_one_process_in_float32(ranks: Ranks, shapes: Any) -> None:
    case = Case(shapes, dtype="float32", kernels="cpu")
    found = ranks.run(MeshShape(pipeline=2), train_pipeline, case, BINS)
    check(found, alone(case, BINS), 1e-6, 0.1 * LEARNING_RATE)


@pytest.mark.full
def test_fewer_micro_batches_than_ranks_and_a_single_one(ranks: Ranks) -> None:
    case = Case(TIED)
    for bins in (BINS[:2], BINS[:1]):
        for order, virtual in (("1f1b", 1), ("gpipe", 1)):
            check(ranks.run(MeshShape(pipeline=4), train_pipeline, case, bins, order, virtual), alone(case, bins), 1e-10, 1e-10)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_gradients_of_every_schedule_are_bit_for_bit_those_of_one_process(ranks: Ranks, kernels: Any) -> None:
    """Each stage sums its gradients in the order of the micro-batches, and a stage boundary changes no sum."""
    case = Case(UNTIED, dtype="float32", kernels=kernels, steps=1)
    wanted = alone(case, BINS)["gradients"]
    for order, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        found = gather_ranks(ranks.run(MeshShape(pipeline=2), train_pipeline, case, BINS, order, virtual), "gradients")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), order


def test_gradients_of_a_tied_embedding_are_the_same_under_every_schedule_and_on_both_stages(ranks: Ranks) -> None:
    case = Case(TIED, dtype="float32", kernels="cpu")
    found = [ranks.run(MeshShape(pipeline=2), train_pipeline, case, BINS, *how) for how in (("gpipe",), ("1f1b",), ("interleaved", 2))]
    for name in ("gradients", "parameters"):
        first, *others = (gather_ranks(one, name) for one in found)
        assert all("model.embed_tokens.weight" in rank[name] for one in found for rank in one)
        assert all(torch.equal(value, other[key]) for other in others for key, value in first.items())


PRODUCTS = [
    pytest.param(MeshShape(pipeline=2, data=2), Case(TIED), "1f1b", 1, id="2 x data 2"),
    pytest.param(MeshShape(pipeline=2, tensor=2), Case(TIED), "1f1b", 1, id="2 x tensor 2", marks=pytest.mark.full),
    pytest.param(MeshShape(pipeline=2, tensor=2), Case(UNTIED, sequence=True), "interleaved", 2, id="2 x tensor 2, sequence parallel, interleaved"),
    pytest.param(MeshShape(pipeline=2, context=2), Case(TIED), "1f1b", 1, id="2 x context 2", marks=pytest.mark.full),
    pytest.param(MeshShape(pipeline=2, data=2, tensor=2), Case(TIED, sequence=True), "1f1b", 1, id="2 x 2 x 2", marks=pytest.mark.full),
    pytest.param(MeshShape(pipeline=2, tensor=2), Case(HYBRID), "1f1b", 1, id="2 x tensor 2, linear attention", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("mesh", "case", "order", "virtual"), PRODUCTS)
def test_products_with_other_kinds_of_parallelism_are_one_process(ranks: Ranks, mesh: MeshShape, case: Case, order: Any, virtual: int) -> None:
    bins = ((0, 3), (1, 6), (4, 5, 2))
    found = ranks.run(mesh, train_pipeline, case, bins, order, virtual)
    wanted = alone(case, bins)
    for rank in found:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-10)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-10)
        for kind in ("gradients", "parameters"):
            for name, value in rank[kind].items():
                part = wanted[kind][name][shard_slices(case.shapes, name, wanted[kind][name].shape, rank["cut"])]
                assert torch.allclose(value, part, rtol=1e-9, atol=1e-10), (kind, name)
    names = {name for rank in found for name in rank["parameters"]}
    assert names == wanted["parameters"].keys()


def saved_by_micro_batch(here: RankContext, case: Case, bins: Any, order: ScheduleName) -> tuple[int, int]:
    """Returns the peak number of tensors that this rank's backward passes keep, and the number for one micro-batch."""
    ranks = here.groups["pipeline"]
    spans = stage_spans(case.shapes, ranks.size)
    model = Decoder(case.shapes, select("reference", torch.float64), dtype=torch.float64, spans=[spans[ranks.rank]])
    load_tensors(model, weights_of(case.shapes).items())
    live, most = 0, 0

    class Kept:
        def __init__(self, x: torch.Tensor) -> None:
            nonlocal live, most
            self.x = x
            live += 1
            most = max(most, live)

        def __del__(self) -> None:
            nonlocal live
            live -= 1

    micro_batches, loss_of = micro_batches_of(case, bins), make_cross_entropy_loss(counts_of(sequences_of(case)))
    peaks = []
    for chosen in (micro_batches, micro_batches[:1]):
        most = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
            Pipeline(model, spans, ranks, order).forward_backward(chosen, loss_of)
        assert live == 0
        peaks.append(most)
    return peaks[0], peaks[1]


def test_the_stash_measured_is_the_published_one(ranks: Ranks) -> None:
    """Counted in tensors saved by autograd: the same number for every micro-batch, but for two at most where the last layer leaves rows out."""
    case, bins, p = Case(replace(TIED, num_hidden_layers=4)), ((0,), (1,), (2,), (3,), (4,), (5,)), 4
    for order, wanted in (("1f1b", [min(p - rank, len(bins)) for rank in range(p)]), ("gpipe", [len(bins)] * p)):
        found = ranks.run(MeshShape(pipeline=p), saved_by_micro_batch, case, bins, order)
        assert [most / one for most, one in found] == pytest.approx(wanted, rel=0.02)


def stage_from_folder(here: RankContext, folder: str, shapes: Any, virtual: int) -> dict[str, torch.Tensor]:
    ranks = here.groups["pipeline"]
    spans = stage_spans(shapes, ranks.size * virtual)
    own = [spans[s] for s in PipelineShape(ranks.size, 1, virtual).stages_of(ranks.rank)]
    model = load_model(folder, select("reference", torch.float32), spans=own)
    return {name: tensor.clone() for name, tensor in to_huggingface(model)}


@pytest.mark.parametrize("shapes", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_stage_reads_its_own_tensors_from_a_hugging_face_folder_and_no_others(ranks: Ranks, tmp_path: Path, shapes: Any) -> None:
    model = Decoder(shapes, select("reference", torch.float32))
    load_tensors(model, weights_of(shapes).items())
    save_model(model, tmp_path / "model")
    found = ranks.run(MeshShape(pipeline=2), stage_from_folder, str(tmp_path / "model"), shapes, 2)
    together: dict[str, torch.Tensor] = {}
    for one in found:
        twice = one.keys() & together.keys()
        assert twice <= ({"model.embed_tokens.weight"} if shapes.tie_word_embeddings else set())
        together |= one
    wanted = dict(to_huggingface(model))
    assert together.keys() == wanted.keys()
    assert all(torch.equal(together[name], value) for name, value in wanted.items())


def stepped(here: RankContext, case: Case, bins: Any, zero: Any, order: ScheduleName, virtual: int) -> dict[str, Any]:
    """Takes the steps of ``alone`` with ``train_step`` as one rank, with gradient reduction that overlaps the backward passes."""
    ranks = here.groups["pipeline"]
    spans = stage_spans(case.shapes, ranks.size * virtual)
    own = [spans[s] for s in PipelineShape(ranks.size, 1, virtual).stages_of(ranks.rank)]
    dtype = getattr(torch, case.dtype)
    everyone = AllRanks(here.mesh, here.groups)
    model = Decoder(case.shapes, select(case.kernels, dtype), dtype=dtype, spans=own, parallel=everyone.model_parallel())
    load_tensors(model, weights_of(case.shapes).items())
    return steps_of(model, case, bins, everyone, zero, Pipeline(model, spans, ranks, order))


def steps_of(model: Decoder, case: Case, bins: Any, ranks: AllRanks, zero: Any = 0, pipeline: Pipeline | None = None) -> dict[str, Any]:
    config = TrainerConfig(
        learning_rate=LEARNING_RATE, dtype=case.dtype, weight_decay=0.01, router_balance_loss=case.balance_loss, router_bias_rate=case.bias_rate
    )
    model.recompute, model.router_balance = case.recompute, make_balance(model, config, ranks)
    replica = make_replica(model, config, ranks, zero, pipeline)
    micro_batches = micro_batches_of(case, bins, (ranks.data.rank, ranks.data.size))
    loss_of = make_cross_entropy_loss(counts_of(sequences_of(case)))
    found: dict[str, Any] = {"losses": [], "norms": [], "overloads": []}
    for _ in range(case.steps):
        done = train_step(
            model, replica.optimizer, micro_batches, loss_of, LEARNING_RATE, sums=replica.sums, forward_backward=replica.forward_backward
        )
        found["losses"].append(done.metrics["sft/loss"])
        found["norms"].append(done.metrics["actor/grad_norm"])
        found["overloads"].append(done.metrics.get("router/max_overload"))
    with replica.whole():
        found["parameters"] = named(model, list(model.parameters()))
    found["biases"] = {} if model.router_balance is None else model.router_balance.state()
    return found


@pytest.mark.parametrize(
    ("mesh", "zero", "order", "virtual"),
    [
        (MeshShape(pipeline=2), 0, "1f1b", 1),
        (MeshShape(pipeline=2, data=2), 0, "interleaved", 2),
        (MeshShape(pipeline=2, data=2), 1, "1f1b", 1),
        (MeshShape(pipeline=2, data=2), 2, "1f1b", 1),
        (MeshShape(pipeline=2, data=2), 3, "1f1b", 1),
        (MeshShape(pipeline=2, data=2), 2, "interleaved", 2),
        (MeshShape(pipeline=2, data=2), 3, "gpipe", 1),
        (MeshShape(pipeline=2, data=2), 3, "interleaved", 2),
    ],
)
@pytest.mark.parametrize("shapes", [TIED, UNTIED], ids=["tied", "untied"])
def test_training_steps_of_a_pipeline_beside_replicas_and_zero_are_one_process(
    ranks: Ranks, shapes: Any, mesh: MeshShape, zero: int, order: Any, virtual: int
) -> None:
    case, bins = Case(shapes), ((0, 3), (1, 6), (4, 5, 2))
    found, wanted = ranks.run(mesh, stepped, case, bins, zero, order, virtual), alone(case, bins)
    for rank in found:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-10)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-10)
    assert distance(gather_ranks(found, "parameters"), wanted["parameters"]) < 1e-10


@pytest.mark.parametrize(
    ("mesh", "order", "virtual", "recompute"),
    [
        (MeshShape(pipeline=2), "1f1b", 1, "none"),
        (MeshShape(pipeline=2), "interleaved", 2, "full"),
        (MeshShape(pipeline=2, data=2), "1f1b", 1, "none"),
        pytest.param(MeshShape(pipeline=2, data=2, expert=2), "gpipe", 1, "full", marks=pytest.mark.full),
        pytest.param(MeshShape(pipeline=2, context=2), "1f1b", 1, "none", marks=pytest.mark.full),
    ],
)
def test_experts_are_balanced_on_every_stage_as_in_one_process(ranks: Ranks, mesh: MeshShape, order: Any, virtual: int, recompute: Any) -> None:
    case = Case(replace(QWEN3_MOE, num_hidden_layers=4), balance_loss=0.05, bias_rate=0.01, recompute=recompute)
    bins = ((0, 3), (1, 6), (4, 5, 2))
    dtype = getattr(torch, case.dtype)
    model = Decoder(case.shapes, select(case.kernels, dtype), dtype=dtype)
    load_tensors(model, weights_of(case.shapes).items())
    found, wanted = ranks.run(mesh, stepped, case, bins, 0, order, virtual), steps_of(model, case, bins, alone_ranks())
    biases: dict[str, Any] = {}
    for rank in found:
        for name in ("losses", "norms", "overloads"):
            assert rank[name] == pytest.approx(wanted[name], rel=1e-10)
        assert all(biases.setdefault(layer, bias) == bias for layer, bias in rank["biases"].items())
        for name, value in rank["parameters"].items():
            if ".experts." not in name or mesh.expert == 1:
                assert torch.allclose(value, wanted["parameters"][name], rtol=1e-9, atol=1e-10), name
    assert biases == wanted["biases"] and len(biases) == 4
    assert any(abs(value) > 0.005 for bias in biases.values() for value in bias)


def test_a_stage_goes_back_with_the_bits_of_the_gradient_that_it_was_sent() -> None:
    gradient, x = torch.randn(5, 3), torch.randn(5, 3, requires_grad=True)
    gradient[0, 0] = -0.0
    _End.apply(x.view_as(x), gradient).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and torch.equal(x.grad.view(torch.int32), gradient.view(torch.int32))


def imports_of_a_step(here: RankContext) -> bool:
    train_pipeline(here, Case(TIED), BINS)
    return "sympy" in sys.modules


@pytest.mark.full
def test_ranks_of_a_pipeline_do_not_import_sympy() -> None:
    fresh = Ranks()
    try:
        assert fresh.run(MeshShape(pipeline=2), imports_of_a_step) == [False, False]
    finally:
        fresh.close()
