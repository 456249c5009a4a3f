"""The memory of a GPU against closed forms of the literature, the real schedules, the real sharding plan and published peaks."""

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training.activations import logit_bytes, saved_bytes, whole_layer_bytes
from tandem.estimate.training.held_parameters import held_on_span
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.rank_memory import chunks_in_flight, memory_by_stage, predict_rank_memory
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.pipeline_stages import own_spans, spans_of, whole
from tandem.layout.schedules import PipelineShape, max_in_flight_micro_batches, schedule
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec, local_parameters

GPT = ModelShapes("gpt", 51200, 12288, 96, 96, 96, 128, 49152, 2048, tie_word_embeddings=False, gated_mlp=False)
LLAMA = ModelShapes("llama", 1024, 64, 6, 4, 2, 16, 192, 64, tie_word_embeddings=False)
MIXTURE = replace(LLAMA, experts=ExpertShapes(8, 2, 32, dense_layers=(0,)))


@pytest.mark.parametrize(("tensor", "divides_tokens"), ((1, False), (8, False), (8, True)))
def test_a_layer_saves_what_korthikanti_counts(tensor: int, divides_tokens: bool) -> None:
    layout = TrainingLayout(ParallelConfig(tensor=tensor, sequence_parallel=divides_tokens), 2048, 1, attention="unfused")
    saved = saved_bytes(GPT, 0, layout, dropout=True).of_rank(layout)
    heads, hidden, sequence = 96, 12288, 2048
    # Equations 2 and 4 of arXiv 2205.05198: s b h (10 + 24 / t + 5 a s / (h t)), and all of it divided by t with sequence parallelism.
    scores = 5 * heads * sequence / hidden
    published = hidden * ((34 + scores) / tensor if divides_tokens else 10 + (24 + scores) / tensor)
    assert saved == pytest.approx(published)


def test_selective_recomputation_has_no_scores_and_full_has_the_input_alone() -> None:
    layout = TrainingLayout(ParallelConfig(), 2048, 1, recompute="selective")
    assert saved_bytes(GPT, 0, layout, dropout=True).of_rank(layout) == 34 * 12288
    assert saved_bytes(GPT, 0, replace(layout, recompute="full")).of_rank(layout) == 2 * 12288


def test_an_expert_layer_keeps_a_copy_of_a_token_for_each_of_its_experts() -> None:
    dense, mixed = (whole_layer_bytes(MIXTURE, layer, 2, keeps_sums=False) for layer in (0, 1))
    assert dense.divided - mixed.divided == 2 * 3 * (192 - 2 * 32)
    assert mixed.replicated - dense.replicated == 2 * 2 * 2 * 64 + 8 * 8


@pytest.mark.parametrize(("name", "ranks", "virtual"), (("1f1b", 4, 1), ("gpipe", 3, 1), ("interleaved", 4, 2), ("interleaved", 2, 3)))
@pytest.mark.parametrize("micro_batches", (1, 2, 8, 12))
def test_passes_in_flight_are_those_of_the_schedule_that_runs(name: str, ranks: int, virtual: int, micro_batches: int) -> None:
    parallel = ParallelConfig(pipeline=ranks, virtual_stages=virtual, schedule=name)  # type: ignore[arg-type]
    operations = schedule(name, PipelineShape(ranks, micro_batches, virtual))  # type: ignore[arg-type]
    for rank in range(ranks):
        in_flight = max_in_flight_micro_batches(operations[rank])
        closed = chunks_in_flight(parallel, micro_batches, rank)
        # With surplus micro-batches the interleaved schedule leaves operations out.
        assert closed == in_flight if micro_batches % ranks == 0 or name != "interleaved" else closed >= in_flight


@pytest.mark.parametrize(
    ("shapes", "tensor", "expert"), ((LLAMA, 1, 1), (LLAMA, 2, 1), (MIXTURE, 1, 1), (MIXTURE, 2, 4)), ids=("llama", "llama-tp2", "mixture", "mixture-tp2-ep4")
)
def test_parameters_are_those_of_the_sharding_plan(shapes: ModelShapes, tensor: int, expert: int) -> None:
    held = held_on_span(shapes, whole(shapes.num_hidden_layers), tensor, expert)
    plan = list(local_parameters(shapes, ShardSpec(size=tensor, deterministic=False, expert_size=expert)))
    assert held.expert == sum(parameter.numel for parameter in plan if ".experts." in parameter.name)
    assert held.total == sum(parameter.numel for parameter in plan)


@pytest.mark.parametrize(("zero", "bytes_each"), ((0, 18.0), (1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 16 / 4)))
def test_states_of_a_parameter_in_bf16(zero: int, bytes_each: float) -> None:
    # Megatron-Core's distributed optimizer: 18 bytes without, 6 + 12 / d with it; FSDP holds 16 / d in fp32.
    memory = predict_rank_memory(LLAMA, TrainingLayout(ParallelConfig(data=4, zero=zero), 64, 4))  # type: ignore[arg-type]
    count = held_on_span(LLAMA, whole(6), 1, 1).total
    assert memory.parameters + memory.gradients + memory.optimizer + memory.master_weights == pytest.approx(bytes_each * count, abs=8)


def test_the_first_stage_of_1f1b_stashes_all_passes_and_the_last_none() -> None:
    layout = TrainingLayout(ParallelConfig(pipeline=3), 64, 12)
    stages = memory_by_stage(LLAMA, layout)
    assert stages[0].pipeline_stash > stages[1].pipeline_stash > stages[2].pipeline_stash == 0
    assert [bool(stage.logits) for stage in stages] == [False, False, True]
    spans = spans_of(layout.parallel, LLAMA)
    assert sum(held_on_span(LLAMA, span, 1, 1).total for rank in range(3) for span in own_spans(layout.parallel, spans, rank)) == held_on_span(
        LLAMA, whole(6), 1, 1
    ).total


@pytest.mark.parametrize(("accumulates", "gradient_bytes"), ((False, 2 / 4), (True, 4)))
def test_16_bit_states_are_a_third_and_gradients_stay_whole_until_the_last_micro_batch(accumulates: bool, gradient_bytes: float) -> None:
    # FSDP2 on a model in bf16: weight and two moments have 2 bytes each, divided; a gradient that is not summed yet is whole in fp32.
    layout = TrainingLayout(ParallelConfig(data=4, zero=3), 64, 8, state_precision="bf16", reduces_each_pass=not accumulates)
    memory, count = predict_rank_memory(LLAMA, layout), held_on_span(LLAMA, whole(6), 1, 1).total
    assert memory.master_weights == 0 and memory.parameters + memory.optimizer == pytest.approx(6 / 4 * count, abs=8)
    assert memory.gradients == pytest.approx(gradient_bytes * count, abs=8)


@pytest.mark.parametrize(("system", "count", "mean", "worst"), (("torchtitan", 18, 0.065, 0.20), ("kempnerforge", 23, 0.06, 0.12)))
def test_published_peaks_are_predicted_within_8_percent_on_average(
    system: str, count: int, mean: float, worst: float
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        import planner_memory
    finally:
        sys.path.pop(0)
    each = [abs(ours / theirs - 1) for name, ours, theirs in planner_memory.errors() if planner_memory.system(name) == system]
    assert len(each) == count
    assert sum(each) / len(each) < mean
    assert max(each) < worst


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_of_whole_logits_holds_the_bytes_that_pytorch_has_at_once(precision: str) -> None:
    # Of 256 tokens and 512 words: what is alive after each operation of a real forward and backward pass, in numbers of the logits' size.
    tokens, words, most = 256, 512, 0
    alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    class Alive(TorchDispatchMode):
        def __torch_dispatch__(self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None) -> object:
            nonlocal most
            out = func(*args, **(kwargs if isinstance(kwargs, dict) else {}))
            for each in out if isinstance(out, tuple) else (out,):
                if isinstance(each, torch.Tensor) and each.numel() == tokens * words:
                    storage = each.untyped_storage()
                    alive[storage.data_ptr()] = weakref.ref(storage)
            sizes = [held.nbytes() for reference in list(alive.values()) if (held := reference()) is not None]
            most = max(most, sum(sizes))
            return out

    hidden, head = torch.randn(tokens, 8, dtype=torch.bfloat16), torch.randn(words, 8, dtype=torch.bfloat16, requires_grad=True)
    with Alive():
        logits = hidden @ head.T
        loss = torch.nn.functional.cross_entropy(logits.float() if precision == "fp32" else logits, torch.zeros(tokens, dtype=torch.long))
        if precision == "fp32":
            del logits
        loss.backward()
    layout = TrainingLayout(ParallelConfig(), tokens, 1, loss_precision=precision)  # type: ignore[arg-type]
    assert most == logit_bytes(replace(LLAMA, vocab_size=words), layout)
