"""The plan of a pod's GPUs against a count by hand."""

from dataclasses import replace

from tandem.config.engine import EngineArgs
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import predict_beside_gpus
from tandem.estimate.pod_gpu import cache_tokens_within, engine_weight_bytes, predict_gpu
from tandem.estimate.processes import FORKED_RANK_BYTES
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.parameters import parameter_count
from tandem.layout.residents import KEEP, Residency
from tandem.layout.shapes import ModelShapes

LLAMA = ModelShapes("llama", 100, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)
COUNT = parameter_count(LLAMA)
ENGINE = EngineArgs(max_num_seqs=4, max_num_batched_tokens=10)
LAYER = 64 * 32 + 32 * 32 + 2 * 48 * 32 + 32 * 48
"""Numbers in the matrices of a layer: q|k|v, output, gate|up, down."""


def plan(trainer: TrainerConfig, parallel: ParallelConfig = ParallelConfig(), engine: EngineArgs = ENGINE, precision: str = "fp32", residency=KEEP):  # noqa: B008
    return predict_gpu(LLAMA, trainer, parallel, engine, tokens=50, kv_cache_tokens=1000, reference=True, precision=precision, residency=residency).memory


def test_engine_holds_packed_matrices_a_packed_head_and_one_plain_layer_during_an_update() -> None:
    outside = 2 * 100 * 32 + 32 + 3 * 2 * 32
    assert 3 * LAYER + outside == COUNT
    assert engine_weight_bytes(LLAMA, "float32", "float32") == 4 * (COUNT + 100 * 32 + LAYER)
    assert engine_weight_bytes(LLAMA, "float32", "bfloat16") == 2 * (3 * LAYER + 100 * 32) + 4 * (outside + LAYER)
    tied = replace(LLAMA, tie_word_embeddings=True)
    assert engine_weight_bytes(tied, "bfloat16", "bfloat16") == 2 * (parameter_count(tied) + 100 * 32 + LAYER)


def test_every_phase_of_a_gpu_worked_by_hand() -> None:
    trainer, context = TrainerConfig(), 1 << 30
    found = plan(trainer)
    assert found.trainer == predict_rank_memory(LLAMA, layout_of_trainer(trainer, ParallelConfig(), 50, on_cpu=False)).allocated + 4 * COUNT
    # Weights, two moments and the reference.
    assert found.trainer_idle == 4 * 4 * COUNT
    # Keys and values of 2 heads of 8 in 3 layers; what one layer keeps of a token's forward pass; three copies of 4 rows of logits.
    cache, logits = 1000 * 2 * 3 * 16 * 4, 3 * 4 * 4 * 100
    working = found.rollout - context - engine_weight_bytes(LLAMA, "float32", "float32") - cache - logits
    assert working == 10 * 4 * (4 * 32 + 2 * 64 + 32 + 4 + 3 * 48)
    assert found.segments == 0 and found.largest_phase == found.trainer + found.rollout and found.engine_idle == found.rollout


def test_what_sleeps_elsewhere_leaves_the_gpu_and_16_bits_halve_what_they_hold() -> None:
    stays = plan(TrainerConfig())
    for to in ("memory", "disk"):
        asleep = plan(TrainerConfig(), residency=Residency("figure", to))
        assert asleep.trainer_idle == asleep.engine_idle == 0 and asleep.trainer == stays.trainer - 4 * COUNT
        assert stays.inference - asleep.inference == 3 * 4 * COUNT
        assert asleep.largest_phase == max(asleep.trainer, asleep.inference, asleep.rollout)
    offloaded = plan(TrainerConfig(offload="cpu"))
    assert offloaded.trainer_idle == 2 * 4 * COUNT + 6 * (16 << 20), "moments are away, their pieces stay"
    assert plan(TrainerConfig(dtype="bfloat16")).trainer_idle == 4 * 2 * COUNT
    halved = plan(TrainerConfig(precision="bf16"), precision="bf16")
    assert plan(TrainerConfig()).rollout - halved.rollout == 2 * (3 * LAYER + 100 * 32) + 1000 * 2 * 3 * 16 * 2


def test_ranks_divide_what_a_gpu_holds() -> None:
    sharded = plan(TrainerConfig(), ParallelConfig(data=2, zero=3))
    assert sharded.trainer_idle == 2 * 4 * COUNT
    divided = plan(TrainerConfig(), ParallelConfig(), replace(ENGINE, tensor_parallel_size=2))
    assert divided.rollout - (1 << 30) == (plan(TrainerConfig()).rollout - (1 << 30)) // 2


def test_the_cache_takes_what_the_share_of_the_gpu_leaves() -> None:
    engine, gpu, one_token = replace(ENGINE, gpu_memory_utilization=0.5, device="cuda"), 4 << 30, 2 * 3 * 16 * 2
    tokens = cache_tokens_within(LLAMA, engine, "bfloat16", gpu)
    used = predict_gpu(LLAMA, TrainerConfig(dtype="bfloat16"), ParallelConfig(), engine, tokens=50, kv_cache_tokens=tokens, reference=False).memory.rollout
    assert 0 <= gpu // 2 - used < one_token and tokens > 1_000_000
    halves = replace(engine, tensor_parallel_size=2)
    assert 2 * tokens < cache_tokens_within(LLAMA, halves, "bfloat16", gpu) < 2.01 * tokens
    assert cache_tokens_within(LLAMA, engine, "bfloat16", 1 << 30) < 0


def test_host_memory_beside_gpus_has_processes_copies_and_pinned_state() -> None:
    parallel, weights = ParallelConfig(data=2), 4 * COUNT
    host = predict_beside_gpus(LLAMA, TrainerConfig(), parallel, reference=True)
    assert host.trainer == host.trainer_idle == 2 * FORKED_RANK_BYTES + 3 * weights, "and a staged checkpoint"
    asleep = predict_beside_gpus(LLAMA, TrainerConfig(), parallel, reference=True, residency=Residency("offload", "memory"))
    assert asleep.trainer - host.trainer == 2 * 4 * weights
    assert host.segments == 2 * weights
    assert host.rollout - predict_beside_gpus(LLAMA, TrainerConfig(dtype="bfloat16"), parallel, reference=True).rollout == weights // 2
