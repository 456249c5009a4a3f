"""All layers in one call have the bits of the kernels called one by one, in the engine's ways to compute tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_programs import DENSE, LENGTHS, QWEN3, OneByOne, packed, steps
from torch import Tensor

from tandem.kernels import Kernels, PagedBatch, empty_cache, select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.model import decoder as decoder_module
from tandem.model.attention import PagedContext
from tandem.model.aux_hidden_states import AuxHiddenStates
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise

OTHERS = {
    "experts": replace(QWEN3, architecture="qwen3_moe", experts=ExpertShapes(5, 2, 24, False)),
    "interleaved rotation": replace(QWEN3, rotary_interleaved=True),
    "norms of all heads together": replace(QWEN3, qk_norm_all_heads=True),
    "without norms before": replace(QWEN3, pre_norms=False, post_norms=True),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", DENSE)
def test_all_layers_in_one_call_have_the_bits_of_the_kernels_one_by_one(
    name: str, threads: int, cpu_kernels: Kernels, paged_logits: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 67, (length,), generator=generator) for length in LENGTHS]
    alone = packed(DENSE[name], OneByOne(cpu_kernels))
    expected = {wanted: torch.cat(paged_logits(alone, sequences, steps(), 7, wanted=wanted)) for wanted in (False, True)}
    monkeypatch.setattr(decoder_module, "run_layer", None)
    program = packed(DENSE[name], cpu_kernels)
    torch.set_num_threads(threads)
    for wanted, logits in expected.items():
        ours = torch.cat(paged_logits(program, sequences, steps(), 7, wanted=wanted))
        assert torch.equal(ours.isnan(), logits.isnan())
        assert torch.equal(ours.nan_to_num(), logits.nan_to_num())
    assert logits.nan_to_num().std() > 0.1, "logits that are all alike would say nothing"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", DENSE)
def test_what_layers_read_is_kept_with_the_bits_of_the_kernels_one_by_one(
    name: str, threads: int, cpu_kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders = packed(DENSE[name], OneByOne(cpu_kernels)), packed(DENSE[name], cpu_kernels)
    shapes, starts, blocks = DENSE[name], torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), [-(-length // 16) for length in LENGTHS]
    owner = torch.cat([torch.full((length,), s) for s, length in enumerate(LENGTHS)])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    tables = (torch.arange(max(blocks)) + max(blocks) * torch.arange(len(LENGTHS)).unsqueeze(1)).to(torch.int32)
    batch = PagedBatch(starts, torch.tensor(LENGTHS, dtype=torch.int32), tables, tables[owner, positions // 16].long() * 16 + positions % 16, owner)
    tokens = torch.randint(0, 67, (len(owner),), generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(threads)
    for wanted in (None, torch.tensor([90, 0, 17])):
        kept = []
        for decoder in decoders:
            caches = empty_cache((tables.numel(), shapes.num_key_value_heads, shapes.head_dim), 2, torch.float32, torch.device("cpu"))
            aux = AuxHiddenStates((1, 0))
            kept.append([decoder(tokens, positions, PagedContext(batch, caches, wanted), aux=aux), *aux.states])
            monkeypatch.setattr(decoder_module, "run_layer", None)
        monkeypatch.undo()
        assert all(map(torch.equal, *kept)) and [len(states) for states in kept[0]] == [len(owner if wanted is None else wanted), len(owner), len(owner)]


def test_a_step_of_many_tokens_has_the_bits_of_the_kernels_one_by_one(
    cpu_kernels: Kernels, paged_logits: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [torch.randint(0, 67, (length,), generator=torch.Generator().manual_seed(length)) for length in (159, 160, 81, 40)]
    whole = [[(s, 1000) for s in range(4)]]
    expected = torch.cat(paged_logits(packed(QWEN3, OneByOne(cpu_kernels)), sequences, whole))
    monkeypatch.setattr(decoder_module, "run_layer", None)
    program = packed(QWEN3, cpu_kernels)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(torch.cat(paged_logits(program, sequences, whole)), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_the_program_cannot_say_are_computed_one_by_one(
    name: str, paged_logits: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, run_layer = list[int](), decoder_module.run_layer

    def noted(batch: Any, weights: Any, *state: Any) -> tuple[Tensor, Tensor]:
        ran.append(weights.attention.index)
        return run_layer(batch, weights, *state)

    monkeypatch.setattr(decoder_module, "run_layer", noted)
    paged_logits(packed(OTHERS[name], select("cpu")), [torch.arange(3)], [[(0, 3)]])
    assert ran == [0, 1]


def test_new_weights_are_computed_with_from_the_next_step_on(paged_logits: Callable[..., list[Tensor]]) -> None:
    kernels = select("cpu")
    run = lambda decoder: paged_logits(decoder, [torch.arange(20)], [[(0, 20)]])[0]
    decoder, twin = packed(QWEN3, kernels), Decoder(QWEN3, kernels)
    before = run(decoder)
    initialise(twin, 9)
    twin.pack()
    expected = run(twin)
    decoder.exchange_weights(twin)
    assert torch.equal(run(decoder), expected) and torch.equal(run(twin), before) and not torch.equal(before, expected)


def test_a_cache_whose_scales_alone_are_elsewhere_is_another_cache(cpu_kernels: Kernels) -> None:
    """As after a sleep: the memory of keys and values may be where it was, and that of their scales not."""
    decoder = packed(QWEN3, cpu_kernels)
    caches = empty_cache((3, QWEN3.num_key_value_heads, QWEN3.head_dim), QWEN3.num_hidden_layers, torch.int8, torch.device("cpu"))
    moved = [cache._replace(key_scales=cache.key_scales.clone(), value_scales=cache.value_scales.clone()) for cache in caches]
    positions = torch.arange(20)
    batch = PagedBatch(torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), torch.tensor([[0, 2]], dtype=torch.int32),
                       torch.tensor([*range(16), *range(32, 36)]))  # fmt: skip
    first = decoder(positions, positions, PagedContext(batch, caches, None))
    for cache in caches:
        cache.key_scales.fill_(torch.nan)
        cache.value_scales.fill_(torch.nan)
    assert torch.equal(decoder(positions, positions, PagedContext(batch, moved, None)), first)
    assert all(cache.key_scales.isnan().all() for cache in caches), "what is no longer the cache is not written to"


def test_a_sequence_that_reads_what_one_beside_it_writes_in_the_same_step_waits_for_it(cpu_kernels: Kernels) -> None:
    """Two prompts that begin alike: the second has the first block of the first in its table, is computed in the same step, and is shorter."""
    tokens = torch.cat((torch.arange(66), torch.arange(60), torch.arange(16, 36)))
    positions, i32 = torch.cat((torch.arange(126), torch.arange(16, 36))), torch.int32
    slots = torch.cat((torch.arange(126), torch.arange(128, 148)))
    tables = torch.tensor([range(8), (0, 8, 9, *[-1] * 5)], dtype=i32)
    batch = PagedBatch(torch.tensor([0, 126, 146], dtype=i32), torch.tensor([126, 36], dtype=i32), tables, slots)
    computed = []
    for threads, kernels in ((1, OneByOne(cpu_kernels)), (2, cpu_kernels)):
        torch.set_num_threads(threads)
        caches = empty_cache((10, QWEN3.num_key_value_heads, QWEN3.head_dim), QWEN3.num_hidden_layers, torch.float32, torch.device("cpu"))
        computed.append(packed(QWEN3, kernels)(tokens, positions, PagedContext(batch, caches, None)))
    assert torch.equal(*computed)
    assert torch.equal(computed[1][16:36], computed[1][126:]), "the same tokens behind the same ones"
