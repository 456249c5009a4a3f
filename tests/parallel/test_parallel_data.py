"""Data parallelism and ZeRO against one process, and against each other bit for bit."""

import ctypes
import gc
import mmap
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from data_parallel_training import trained
from model_ranks import (
    COHERE,
    DEEPSEEK_V3,
    GEMMA,
    GLM4_MOE,
    GPT_OSS,
    LEARNING_RATE,
    LLAMA,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    Case,
    build,
    by_one_process,
    check,
    ranks_of,
    sequences_of,
)
from ranks import RankContext, Ranks

from tandem.estimate.model_bytes import cut_by_zero, optimizer_bytes
from tandem.kernels import select
from tandem.layout.mesh import MeshShape
from tandem.model.decoder import Decoder
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import MicroBatch, collate
from tandem.trainer.offload.reserved_memory import ReservedMemory
from tandem.trainer.optimizers.adamw import matrices_among
from tandem.trainer.parallel.gradient_reducer import GradientReducer
from tandem.trainer.parallel.ranks import alone as alone_ranks
from tandem.trainer.parallel.replica import make_replica
from tandem.trainer.step import predict, train_step

pytestmark = pytest.mark.usefixtures("one_thread")
LARGER = replace(QWEN3, hidden_size=128, intermediate_size=384, num_hidden_layers=3)


@pytest.mark.parametrize("data", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_equal_one_process_with_uneven_tokens(zero: int, data: int, ranks: Ranks) -> None:
    case = Case(QWEN3)
    check(ranks.run(MeshShape(data=data), trained, case, zero), by_one_process(case))


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_equal_one_process_in_fp32_and_with_untied_weights(zero: int, ranks: Ranks) -> None:
    case = Case(LLAMA, "float32", "cpu")
    check(ranks.run(MeshShape(data=2), trained, case, zero), by_one_process(case))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_several_backward_passes_of_which_some_ranks_have_fewer(zero: int, ranks: Ranks) -> None:
    case = Case(QWEN3, lengths=(9, 2, 17))
    check(ranks.run(MeshShape(data=2), trained, case, zero, 2), by_one_process(case))


@pytest.mark.parametrize("recompute", [pytest.param("full", marks=pytest.mark.full), "selective"])
def test_weights_gathered_for_a_layer_are_there_again_when_it_is_recomputed(recompute: Any, ranks: Ranks) -> None:
    case = Case(QWEN3, recompute=recompute)
    check(ranks.run(MeshShape(data=2), trained, case, 3), by_one_process(case))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
def test_norms_with_weights_for_each_head_are_no_matrices_to_an_optimizer_on_any_mesh(optimizer: Any, ranks: Ranks) -> None:
    case = Case(COHERE, optimizer=optimizer)
    assert not any("norm" in name for name in matrices_among(dict(Decoder(COHERE, select("reference")).named_parameters())))
    check(ranks.run(MeshShape(data=2, tensor=2), trained, case, 3), by_one_process(case))


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_one_is_added_to_the_norms_of_a_layer_while_they_are_there(recompute: Any, ranks: Ranks) -> None:
    case = Case(GEMMA, recompute=recompute)
    check(ranks.run(MeshShape(data=2), trained, case, 3), by_one_process(case))


FURTHER = [pytest.param(shapes, marks=pytest.mark.full) for shapes in (QWEN2_MOE, GLM4_MOE, GPT_OSS, DEEPSEEK_V3, QWEN3_NEXT)]


@pytest.mark.parametrize("shapes", [QWEN3_MOE, *FURTHER], ids=lambda shapes: shapes.architecture)
def test_experts_are_replicas_too(shapes: Any, ranks: Ranks) -> None:
    case = Case(shapes)
    check(ranks.run(MeshShape(data=2), trained, case, 3), by_one_process(case))


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_layers_with_linear_attention_are_replicas_too(zero: int, recompute: Any, ranks: Ranks) -> None:
    for case in (Case(QWEN3_NEXT, recompute=recompute), Case(QWEN3_NEXT, optimizer="muon", recompute=recompute)):
        check(ranks.run(MeshShape(data=2), trained, case, zero), by_one_process(case))


@pytest.mark.full
def test_zero_stands_beside_tensor_and_expert_parallelism(ranks: Ranks) -> None:
    case = Case(QWEN3, sequence=True)
    check(ranks.run(MeshShape(data=2, tensor=2), trained, case, 2), by_one_process(case))
    case = Case(QWEN3_MOE)
    check(ranks.run(MeshShape(data=2, expert=2), trained, case, 1), by_one_process(case))


def test_every_stage_has_the_bits_of_every_other(ranks: Ranks) -> None:
    case = Case(QWEN3, "float32", "cpu")
    wanted = ranks.run(MeshShape(data=3), trained, case, 0)
    for zero in (1, 2, 3):
        for rank, other in zip(ranks.run(MeshShape(data=3), trained, case, zero), wanted, strict=True):
            assert (rank.losses, rank.norms) == (other.losses, other.norms)
            assert all(torch.equal(rank.parameters[name], other.parameters[name]) for name in other.parameters)


def sums_before_clipping(here: RankContext | None, case: Case) -> dict[str, torch.Tensor]:
    """Returns the gradients of ``case`` with one micro-batch per rank, or in one process with one micro-batch for each two ranks."""
    torch.set_num_threads(1)
    model, every = build(case, here), sequences_of(case)
    loss = make_cross_entropy_loss(counts_of(every))
    shares = [collate(every[rank::2], getattr(torch, case.dtype)) for rank in range(2)]
    if here is None:
        for share in shares:
            loss(predict(model, share, 1.0), share).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sums = GradientReducer(model, ranks_of(here, case))
    sums.expect(1)
    loss(predict(model, shares[here.mesh.rank], 1.0), shares[here.mesh.rank]).loss.backward()
    sums.finish()
    found: dict[str, torch.Tensor] = {}
    for bucket, own in zip(sums.buckets, sums.own, strict=True):
        assert own is not None
        found.update(bucket.views(bucket.ranks.all_gather(own, "a test").view(-1)))
    return found


def test_sums_have_the_bits_of_one_process_that_adds_in_the_order_of_the_ranks(ranks: Ranks) -> None:
    case = Case(QWEN3, "float32", "cpu")
    wanted = sums_before_clipping(None, case)
    for found in ranks.run(MeshShape(data=2), sums_before_clipping, case):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_where_no_other_rank_has_the_same_weights_gradients_add_up_in_the_memory_of_their_sum() -> None:
    case = Case(QWEN3, "float32", "cpu")
    model, plain, every = build(case, None), build(case, None), sequences_of(case)
    loss, shares = make_cross_entropy_loss(counts_of(every)), [collate(every[rank::2], torch.float32) for rank in range(2)]
    sums = GradientReducer(model, alone_ranks())
    for _ in range(2):
        places = list[dict[str, int]]()
        sums.expect(2)
        for share in shares:
            loss(predict(model, share, 1.0), share).loss.backward()
            loss(predict(plain, share, 1.0), share).loss.backward()
            places.append({name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None})
        sums.finish()
        begins = [own.data_ptr() for own in sums.own if own is not None]
        for bucket, own in zip(sums.buckets, sums.own, strict=True):
            assert own is not None
            for name, view in bucket.views(own).items():
                grad = plain.get_parameter(name).grad
                assert grad is not None and torch.equal(view, grad) and view.data_ptr() == places[0][name]
        sums.release()
        for p in plain.parameters():
            p.grad = None
    assert begins and all(sums.own[place] is None for place in range(len(begins)))


def begun_when(here: RankContext, case: Case) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Returns which reductions had started when each layer's gradients were ready, and the order in which all started."""
    model, every = build(case, here), sequences_of(case)
    share = collate(every[here.mesh.rank :: 2], getattr(torch, case.dtype))
    sums = GradientReducer(model, ranks_of(here, case))
    seen: list[tuple[str, list[str]]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, list(sums.started))))
    sums.expect(1)
    make_cross_entropy_loss(counts_of(every))(predict(model, share, 1.0), share).loss.backward()
    in_backward = list(sums.started)
    sums.finish()
    assert in_backward == sums.started, "every sum began before the backward pass had ended"
    return seen, sums.started


def test_the_sum_of_a_layer_begins_before_the_backward_pass_reaches_the_layer_before(ranks: Ranks) -> None:
    for seen, started in ranks.run(MeshShape(data=2), begun_when, Case(LLAMA)):
        assert started == ["the head", "layer 1", "layer 0", "the embedding"]
        begun = dict(seen)
        assert begun["layers.0.down_proj.weight"] == ["the head", "layer 1"]
        assert begun["embed_tokens"] == ["the head", "layer 1", "layer 0"]


def resident_bytes(memory: ReservedMemory) -> int:
    """Returns the bytes of the pages that back ``memory``, as counted by the kernel."""
    pages = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.tensor.data_ptr()), ctypes.c_size_t(memory.nbytes), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def bytes_held(here: RankContext, case: Case, zero: Any) -> tuple[int, int, list[int], int]:
    """Bytes of all tensors of this process that a step of two backward passes keeps from one to the next, besides those that were
    there before the model; resident bytes of memory that is handed from one bucket to the next; numbers of buckets, the largest first, and of the model. Two
    steps: AdamW has its moments then."""
    torch.set_num_threads(1)
    gc.collect()
    before = {t.untyped_storage().data_ptr() for t in all_tensors()}
    before |= {m.tensor.data_ptr() for m in gc.get_objects() if type(m) is ReservedMemory}
    model = build(case, here)
    numbers = sum(p.numel() for p in model.parameters())
    replica = make_replica(model, case.trainer, ranks_of(here, case), zero)
    every = sequences_of(case)
    own = every[here.groups["data"].rank :: here.groups["data"].size]
    loss = make_cross_entropy_loss(counts_of(every))
    micro_batches = [collate(own[:1]), collate(own[1:])]
    held: list[int] = []
    handed_on: list[int] = []

    def measure(done: int, total: int) -> None:
        if done < total:
            gc.collect()
            tables = {table.untyped_storage().data_ptr() for table in model.rotary_tables}
            batches = {t.untyped_storage().data_ptr() for m in micro_batches for t in vars_of(m)}
            memories = {m.tensor.data_ptr(): m for m in gc.get_objects() if type(m) is ReservedMemory and m.tensor.data_ptr() not in before}
            left_out = before | batches | memories.keys() | {0} | tables
            found = {s.data_ptr(): s.nbytes() for t in all_tensors() if (s := t.untyped_storage()).data_ptr() not in left_out}
            held.append(sum(found.values()))
            handed_on.append(sum(map(resident_bytes, memories.values())))

    for _ in range(2):
        train_step(model, replica.optimizer, micro_batches, loss, LEARNING_RATE, on_progress=measure, sums=replica.sums)
    assert replica.sums is not None
    return held[-1], handed_on[-1], sorted({bucket.length for bucket in replica.sums.buckets}, reverse=True), numbers


def all_tensors() -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return found + [t.grad for t in found if t.is_leaf and t.grad is not None]


def vars_of(micro_batch: MicroBatch) -> list[torch.Tensor]:
    return [v for name in micro_batch.__slots__ if isinstance(v := getattr(micro_batch, name), torch.Tensor)]


@pytest.mark.parametrize("zero", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2)), 3])
def test_bytes_that_a_rank_holds_between_backward_passes_are_those_of_the_formula(zero: int, ranks: Ranks) -> None:
    case = Case(LARGER, "float32", lengths=(9, 8, 7, 6, 5, 4, 8, 9, 7))
    for held, handed_on, (layer, *others), numbers in ranks.run(MeshShape(data=4), bytes_held, case, zero):
        wanted = cut_by_zero(4 * numbers, 8 * numbers, 4, zero)
        assert abs(held - wanted) < 0.05 * wanted, (held, wanted)
        # Two layers whose sums are under way, each as it is sent and as it arrives, or one bucket of another size; under ZeRO 3 the weights that were
        # whole: of two layers, or of one bucket of another size. In pages of 1,024 numbers.
        is_cut = int(zero == 3)
        most = (4 + 2 * is_cut) * (layer + 1024) + (2 + is_cut) * sum(other + 1024 for other in others)
        assert handed_on <= 4 * most, (handed_on, most)


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_bytes_of_other_optimizers_are_cut_alike(optimizer: Any, zero: int, ranks: Ranks) -> None:
    case = Case(LARGER, "float32", lengths=(9, 8, 7, 6, 5, 4, 8, 9, 7), optimizer=optimizer)
    for held, _, _, numbers in ranks.run(MeshShape(data=4), bytes_held, case, zero):
        wanted = cut_by_zero(4 * numbers, optimizer_bytes(LARGER, optimizer), 4, zero)
        assert abs(held - wanted) < 0.05 * wanted, (held, wanted)
