"""A decoding step in one call draws the tokens of its parts one by one, with the same bits of their log-probabilities."""

from dataclasses import replace

import pytest
import torch
from dense_programs import DENSE, QWEN3, OneByOne, packed

from tandem.engine.executor.model_input import decode_input
from tandem.engine.executor.row_tensors import RowTensors
from tandem.kernels import BLOCK_TOKENS, Kernels, SampledRows, empty_cache, select
from tandem.kernels.api import KVLayer
from tandem.kernels.dense_layers import LayerInputs
from tandem.model.attention import PagedContext
from tandem.model.aux_hidden_states import AuxHiddenStates
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.model.quantization.scheme import scheme_named

ROWS, COLUMNS, STEPS = 36, 4, 5
"""So many rows that two threads have sequences of their own."""
MODELS = DENSE | {"a head of its own, divided logits": replace(QWEN3, tie_word_embeddings=False, multipliers=replace(QWEN3.multipliers, logits_scaling=3.0))}


def rows_in_use() -> RowTensors:
    """Rows of several lengths, some at the end of a block, with settings of all kinds; some draw greedily."""
    rows, generator = RowTensors(ROWS, COLUMNS, torch.device("cpu")), torch.Generator().manual_seed(3)
    whole = lambda low, high: torch.randint(low, high, (ROWS,), generator=generator)
    keys = whole(-(1 << 62), 1 << 62)
    lengths = whole(1, COLUMNS * BLOCK_TOKENS - STEPS)
    lengths[:3] = torch.tensor([16, 17, 1])
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.3]).repeat(ROWS // 4)
    top_k = torch.tensor([0, 5, 0]).repeat(ROWS // 3)
    top_p, min_p = torch.tensor([1.0, 1.0, 1.0, 0.8, 0.5, 1.0]).repeat(ROWS // 6), torch.tensor([0.0, 0.0, 0.1]).repeat(ROWS // 3)
    rows.fill(torch.arange(ROWS), torch.stack((whole(0, 67), lengths, keys, top_k)), torch.stack((temperature, top_p, min_p)))
    rows.block_tables.copy_(torch.randperm(ROWS * COLUMNS, generator=generator).view(ROWS, COLUMNS))
    return rows


def cache_of(decoder: Decoder) -> list[KVLayer]:
    generator = torch.Generator().manual_seed(4)
    shape = (ROWS * COLUMNS, decoder.shapes.num_key_value_heads, decoder.shapes.head_dim)
    caches = empty_cache(shape, decoder.shapes.num_hidden_layers, torch.float32, torch.device("cpu"))
    for cache in caches:
        cache.keys.normal_(generator=generator)
        cache.values.normal_(generator=generator)
    return caches


def one_by_one(decoder: Decoder, rows: RowTensors, caches: list[KVLayer], index: torch.Tensor) -> SampledRows:
    batch = decode_input(rows, index, rows.block_tables.shape[1])
    logits = decoder.logits(decoder(batch.tokens, batch.positions, PagedContext(batch.paged, caches, None)))
    return decoder.kernels.sample_rows(logits, *rows.sampling_metadata(index))


def at_once(decoder: Decoder, rows: RowTensors, caches: list[KVLayer], index: torch.Tensor) -> SampledRows:
    program = decoder.decode_program(rows.decode_rows)
    assert program is not None and program.most_rows >= len(index)
    return program.run(caches, index)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_one_call_has_the_bits_of_its_parts_one_by_one(name: str, threads: int, cpu_kernels: Kernels) -> None:
    alone, program = packed(MODELS[name], OneByOne(cpu_kernels)), packed(MODELS[name], cpu_kernels)
    torch.set_num_threads(threads)
    expected, ours = rows_in_use(), rows_in_use()
    expected_cache, own_cache = cache_of(alone), cache_of(program)
    tokens = []
    for step in range(STEPS):
        index = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))[: ROWS - step]
        drawn = one_by_one(alone, expected, expected_cache, index)
        own = at_once(program, ours, own_cache, index)
        assert all(map(torch.equal, own, drawn)), f"step {step}"
        expected.append(index, drawn.tokens)
        ours.append(index, own.tokens)
        tokens.append(own.tokens)
    assert all(torch.equal(a, b) for mine, theirs in zip(own_cache, expected_cache, strict=True) for a, b in zip(mine[:2], theirs[:2], strict=True))
    assert len(torch.cat(tokens).unique()) > 10, "tokens that are all alike would say nothing"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_one_call_keeps_what_its_layers_and_its_head_read(name: str, threads: int, cpu_kernels: Kernels) -> None:
    """Of 3 rows no thread has some of its own."""
    alone, program = packed(MODELS[name], OneByOne(cpu_kernels)), packed(MODELS[name], cpu_kernels)
    torch.set_num_threads(threads)
    for count, layers in ((ROWS, (1, 0)), (3, (1,)), (ROWS, (0, 1, 0)), (ROWS, ()), (3, ())):
        rows, index, aux = rows_in_use(), torch.randperm(ROWS, generator=torch.Generator().manual_seed(count))[:count], AuxHiddenStates(layers)
        batch = decode_input(rows, index, rows.block_tables.shape[1])
        hidden = alone(batch.tokens, batch.positions, PagedContext(batch.paged, cache_of(alone), None), aux=aux)
        expected = torch.cat(aux.states, dim=1) if layers else hidden
        decoding = program.decode_program(rows.decode_rows)
        assert decoding is not None
        states = LayerInputs(layers, torch.full(expected.shape, torch.nan))
        decoding.run(cache_of(program), index, states)
        assert torch.equal(states.to, expected) and expected.std() > 0.05


def test_states_that_no_step_can_write_are_refused() -> None:
    decoder, rows = packed(QWEN3, select("cpu")), rows_in_use()
    program = decoder.decode_program(rows.decode_rows)
    assert program is not None
    for layers, shape in (((0,), (2, 48)), ((0,), (3, 96)), ((2,), (3, 48)), ((-1,), (3, 48)), ((), (3, 96))):
        with pytest.raises(ValueError, match=r"the inputs of the layers .* of 2"):
            program.run(cache_of(decoder), torch.arange(3), LayerInputs(layers, torch.empty(shape)))


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "w4a8", "nf4", "bf16"])
def test_a_step_with_a_quantized_head_has_the_bits_of_its_parts_one_by_one(name: str, cpu_kernels: Kernels) -> None:
    named = scheme_named(name)
    scheme, index = replace(named, head=True, group_size=min(32, named.group_size)), torch.arange(ROWS)
    alone, program = packed(QWEN3, OneByOne(cpu_kernels), scheme=scheme), packed(QWEN3, cpu_kernels, scheme=scheme)
    expected = one_by_one(alone, rows_in_use(), cache_of(alone), index)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, at_once(program, rows_in_use(), cache_of(program), index), expected))
    plain = packed(QWEN3, cpu_kernels, scheme=replace(scheme, head=False))
    assert not torch.equal(one_by_one(plain, rows_in_use(), cache_of(plain), index).raw, expected.raw), "the head was not quantized"


@pytest.mark.parametrize("rows", [1, 5])
def test_a_team_of_threads_computes_few_rows_with_the_bits_of_one_thread(rows: int, cpu_kernels: Kernels) -> None:
    """Of layers that are so wide that each product is shared, and of contexts of several spans of the attention's softmax."""
    shapes = replace(QWEN3, vocab_size=1003, hidden_size=640, head_dim=64, intermediate_size=840, max_position_embeddings=1100)
    decoder, state = packed(shapes, cpu_kernels), RowTensors(ROWS, 70, torch.device("cpu"))
    lengths, blocks = torch.full((ROWS,), 1088), torch.randperm(ROWS * COLUMNS, generator=torch.Generator().manual_seed(1))
    state.fill(torch.arange(ROWS), torch.stack((torch.arange(ROWS), lengths, lengths, 0 * lengths)), torch.tensor([1.0, 1.0, 0.0])[:, None].expand(3, ROWS))
    state.block_tables.copy_(blocks[:70].expand(ROWS, 70))
    # Rows that read the same blocks write to one of their own.
    state.block_tables[:, 67] = blocks[70 : 70 + ROWS]
    computed = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        index = torch.arange(rows)
        computed += [at_once(decoder, state, cache_of(decoder), index) for _ in range(3)]
    assert all(torch.equal(a, b) for drawn in computed[1:] for a, b in zip(drawn, computed[0], strict=True))
    expected = one_by_one(packed(shapes, OneByOne(cpu_kernels)), state, cache_of(decoder), torch.arange(rows))
    assert all(map(torch.equal, computed[0], expected))


def test_a_head_that_is_too_large_for_the_cache_is_computed_by_all_threads_together() -> None:
    """34 MiB, with so few rows and so many layers that the logits are few, and threads have sequences of their own in the layers."""
    shapes = replace(QWEN3, vocab_size=180_003, num_hidden_layers=4)
    kernels = select("cpu")
    program, index = packed(shapes, kernels), torch.arange(20)
    expected = one_by_one(packed(shapes, OneByOne(kernels)), rows_in_use(), cache_of(program), index)
    torch.set_num_threads(2)
    assert all(map(torch.equal, at_once(program, rows_in_use(), cache_of(program), index), expected))


def test_new_weights_of_head_and_embedding_are_computed_with_from_the_next_step_on() -> None:
    kernels = select("cpu")
    decoder, twin = packed(QWEN3, kernels), Decoder(QWEN3, kernels)
    initialise(twin, 9)
    twin.pack()
    rows, index = rows_in_use().decode_rows, torch.arange(ROWS)

    def run(decoder: Decoder) -> SampledRows:
        program = decoder.decode_program(rows)
        assert program is not None
        return program.run(cache_of(decoder), index)

    before, expected = run(decoder), run(twin)
    decoder.exchange_weights(twin)
    assert all(map(torch.equal, run(decoder), expected)) and all(map(torch.equal, run(twin), before)) and not torch.equal(before.raw, expected.raw)
    decoder.embed_tokens.data = decoder.embed_tokens.data + 1
    assert not torch.equal(run(decoder).raw, expected.raw)


@pytest.mark.parametrize(("column", "value", "message"), [("length", 0, "row"), ("length", 65, "block table"), ("last_token", 67, "vocabulary of 67")])
def test_a_state_that_a_row_cannot_have_is_named(column: str, value: int, message: str) -> None:
    decoder, rows = packed(QWEN3, select("cpu")), rows_in_use()
    getattr(rows, column)[5] = value
    with pytest.raises(IndexError, match=message):
        at_once(decoder, rows, cache_of(decoder), torch.arange(ROWS))
    with pytest.raises(IndexError, match="row"):
        at_once(decoder, rows, cache_of(decoder), torch.tensor([ROWS]))
