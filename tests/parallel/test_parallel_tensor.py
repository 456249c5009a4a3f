"""Tensor and sequence parallelism: ranks that shard a model train like one process."""

from dataclasses import replace

import pytest
import torch
from model_ranks import (
    COHERE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA,
    GLM4_MOE,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MISTRAL,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    SMOLLM3,
    Case,
    Trained,
    build,
    by_one_process,
    check,
    sequences_of,
    train,
)
from ranks import RankContext, Ranks

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import saved_by_stage
from tandem.layout.mesh import MeshShape
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import PackedContext
from tandem.trainer.micro_batch import collate

FULL = pytest.mark.full
DEEPSEEK = (DEEPSEEK_V2, DEEPSEEK_V3)
pytestmark = pytest.mark.usefixtures("one_thread")


def trained(here: RankContext, case: Case) -> Trained:
    return train(here, case)


FAST = {(LLAMA, False, False), (LLAMA, True, False), (LLAMA, True, True), (QWEN3, True, False), (QWEN3_MOE, False, True), (QWEN3_MOE, True, False)}
FAST |= {(QWEN3_NEXT, False, False)}
OTHERS = [pytest.param(shapes, marks=FULL) for shapes in (QWEN3_NEXT, *DEEPSEEK)]
CASES = [
    pytest.param(Case(shapes, deterministic=deterministic, sequence=sequence), marks=[] if (shapes, sequence, deterministic) in FAST else FULL)
    for shapes in (QWEN3, LLAMA, QWEN3_MOE, MISTRAL, GRANITE, SMOLLM3, GEMMA, QWEN2_MOE, GLM4_MOE, GPT_OSS, COHERE, QWEN3_NEXT, *DEEPSEEK)
    for sequence in (False, True)
    for deterministic in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.shapes.architecture}{' sequence' * c.sequence}{' deterministic' * c.deterministic}")
def test_two_tensor_ranks_train_what_one_process_trains(ranks: Ranks, case) -> None:
    check(ranks.run(MeshShape(tensor=2), trained, case), by_one_process(case))


@pytest.mark.full
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_tensor_ranks_in_fp32_at_a_temperature(ranks: Ranks, sequence) -> None:
    case = Case(replace(QWEN3, num_key_value_heads=4), "float32", "cpu", sequence=sequence, temperature=0.7)
    check(ranks.run(MeshShape(tensor=4), trained, case), by_one_process(case))


@pytest.mark.parametrize(
    "shapes",
    [LLAMA, QWEN3_MOE, MISTRAL, *(pytest.param(shapes, marks=FULL) for shapes in (GRANITE, SMOLLM3, GEMMA, QWEN2_MOE, GLM4_MOE, GPT_OSS, COHERE)), *OTHERS],
    ids=lambda s: s.architecture,
)
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_a_deterministic_cut_has_the_bits_of_one_process(ranks: Ranks, shapes, sequence) -> None:
    case = Case(shapes, "float32", "cpu", deterministic=True, sequence=sequence, temperature=0.7, steps=1)
    found, wanted = ranks.run(MeshShape(tensor=2), trained, case), by_one_process(case)
    check(found, wanted)
    for rank in found:
        assert rank.losses == wanted.losses
        assert all(torch.equal(rank.logits[i], wanted.logits[i]) and torch.equal(rank.logprobs[i], wanted.logprobs[i]) for i in wanted.logits)


@FULL
@pytest.mark.parametrize(("zero", "recompute"), [(0, "none"), (1, "selective"), (3, "full")])
def test_tensor_ranks_times_data_ranks(ranks: Ranks, zero, recompute) -> None:
    case = Case(QWEN3, sequence=True, zero=zero, recompute=recompute)
    check(ranks.run(MeshShape(data=2, tensor=2), trained, case), by_one_process(case))


def rows_and_saved_bytes(here: RankContext, case: Case) -> tuple[int, int]:
    """Returns the rows of the residual stream of a batch on this rank, and the bytes that the forward pass keeps for the backward pass."""
    model, batch = build(case, here), collate(sequences_of(case), torch.float64)
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = model(batch.tokens, batch.positions, PackedContext(batch.cu_seqlens, batch.max_seqlen))
    return len(hidden), sum(kept.values())


def test_sequence_parallel_ranks_keep_their_share_of_the_residual_streams_tokens_and_others_all(ranks: Ranks) -> None:
    tokens = len(collate(sequences_of(Case(LLAMA))).tokens)
    whole, shared = (ranks.run(MeshShape(tensor=2), rows_and_saved_bytes, Case(LLAMA, sequence=sequence)) for sequence in (False, True))
    assert [rows for rows, _ in whole] == [tokens] * 2 and [rows for rows, _ in shared] == [-(-tokens // 2)] * 2
    assert all(a < b for (_, a), (_, b) in zip(shared, whole, strict=True))


def saved_in_fact(here: RankContext, case: Case, tokens: int) -> int:
    """Returns the bytes of the tensors that autograd keeps of a forward pass of one rank, its weights excepted."""
    model, held = build(case, here), dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids, positions = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(ids, positions, PackedContext(torch.tensor([0, tokens], dtype=torch.int32), tokens))
        logprobs = model.token_logprobs(hidden, positions, ids, 1.0, tokens)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert logprobs.raw.requires_grad
    return sum(size for place, size in held.items() if place not in weights)


@pytest.mark.parametrize(("sequence", "deterministic"), [(False, False), (True, False), (True, True)])
def test_the_prediction_of_what_a_tensor_parallel_rank_keeps(sequence: bool, deterministic: bool, ranks: Ranks) -> None:
    shapes, tokens = ModelShapes("llama", 64, 128, 6, 4, 2, 32, 384, 1024, False), 512
    case = Case(shapes, "float32", "cpu", deterministic, sequence)
    mesh = ParallelConfig(tensor=2, sequence_parallel=sequence, deterministic=deterministic)
    (predicted,) = saved_by_stage(shapes, layout_of_trainer(TrainerConfig(), mesh, tokens))
    for kept in ranks.run(MeshShape(tensor=2), saved_in_fact, case, tokens):
        assert kept == pytest.approx(predicted, rel=0.08), (kept, predicted)
