"""KV blocks that one engine computed are those that another would have computed: brought into its prefix cache, they change no bit of any answer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_adapters import write_adapter

from tandem import LLM, LoRARequest, SamplingParams
from tandem.engine.kv_cache.block_exchange import BlockDigest, DamagedBlocks
from tandem.types import UserError, WeightVersion

PROMPT = [(7 * i) % 37 + 2 for i in range(75)]
"""Four full blocks and 11 tokens."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(n=3, max_tokens=12, seed=5, temperature=0.9, ignore_eos=True)


class Moved:
    """The blocks of ``PROMPT``, which ``llm`` has computed, outside it."""

    def __init__(self, llm: LLM, **names: Any) -> None:
        self.memory = bytearray(8 * llm.engine.block_exchange().block_bytes)
        self.names = names
        self.blocks = llm.engine.block_exchange().export_blocks(PROMPT, memoryview(self.memory), **names)

    def to(self, llm: LLM) -> int:
        return llm.engine.block_exchange().import_blocks(PROMPT, self.blocks, memoryview(self.memory), **self.names)


def results(llm: LLM, params: SamplingParams, **more: Any) -> list[Any]:
    """Returns the tokens with their log-probabilities, whose bits show a difference that no token shows."""
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, **more)
    return [(each.token_ids, each.raw_logprobs) for each in output.outputs]


def cached(llm: LLM, **more: Any) -> int:
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, **more)
    return int(output.num_cached_tokens)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {}), ("qwen3", {"kv_cache_dtype": "int8"}), ("qwen3", {"kv_cache_dtype": "int4"}), ("qwen3", {"kv_cache_dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16"}), ("mistral", {}), ("mixtral", {}), ("qwen3", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)  # fmt: skip
def test_an_engine_with_the_blocks_of_another_answers_as_one_that_computed_them(
    make_llm: Callable[..., LLM], architecture: str, options: dict[str, Any]
) -> None:
    alone, sender, receiver = (make_llm(architecture, digest_weights=True, **options) for _ in range(3))
    expected = [results(alone, params) for params in (GREEDY, SAMPLED)]
    results(sender, replace(GREEDY, max_tokens=1))
    moved = Moved(sender)
    assert len(moved.blocks) == 4 and moved.to(receiver) == 4
    receiver.engine.check_integrity()
    assert [results(receiver, params) for params in (GREEDY, SAMPLED)] == expected
    assert cached(receiver) == 64, "the brought blocks were computed again"
    # A block's bytes do not depend on who computed it.
    own = Moved(alone)
    assert own.blocks == moved.blocks and own.memory == moved.memory
    receiver.engine.check_integrity()


def test_only_the_rest_of_the_prompt_is_computed(make_llm: Callable[..., LLM]) -> None:
    sender, receiver = make_llm(digest_weights=True), make_llm(digest_weights=True)
    results(sender, GREEDY)
    Moved(sender).to(receiver)
    before = receiver.engine.cumulative_stats().computed_tokens
    results(receiver, replace(GREEDY, max_tokens=1))
    assert receiver.engine.cumulative_stats().computed_tokens - before == len(PROMPT) - 64


def test_blocks_travel_in_parts_and_those_that_were_brought_twice_are_there_once(make_llm: Callable[..., LLM]) -> None:
    sender, receiver = make_llm(digest_weights=True), make_llm(digest_weights=True)
    results(sender, GREEDY)
    one, other = sender.engine.block_exchange(), receiver.engine.block_exchange()
    memory = memoryview(bytearray(2 * one.block_bytes))
    for first in (0, 2, 0):
        blocks = one.export_blocks(PROMPT, memory, first=first)
        assert len(blocks) == 2 and other.import_blocks(PROMPT, blocks, memory, first=first) == 2
        receiver.engine.check_integrity()
    assert len(receiver.engine._scheduler.kv_cache.block_pool._cached) == 4
    assert cached(receiver) == 64


def test_a_prefix_that_was_evicted_in_part_is_exported_as_far_as_it_is_there(make_llm: Callable[..., LLM]) -> None:
    sender = make_llm(digest_weights=True, kv_cache_tokens=128, max_model_len=128)
    results(sender, GREEDY)
    others = [{"prompt_token_ids": [3 + i] * 60} for i in range(2)]
    sender.generate(others, replace(GREEDY, max_tokens=1))
    moved = Moved(sender)
    assert len(moved.blocks) < 4
    receiver = make_llm(digest_weights=True)
    assert moved.to(receiver) == len(moved.blocks)
    assert cached(receiver) == 16 * len(moved.blocks)


def test_a_full_cache_takes_what_it_has_room_for_and_preempts_nobody(make_llm: Callable[..., LLM]) -> None:
    sender, receiver = make_llm(digest_weights=True), make_llm(digest_weights=True, kv_cache_tokens=128, max_model_len=128)
    results(sender, GREEDY)
    receiver.engine.add_request("r", [5] * 90, replace(GREEDY, max_tokens=20))
    while receiver.engine.stats().num_requests_running == 0:
        receiver.engine.step()
    moved = Moved(sender)
    assert moved.to(receiver) == 2, "8 blocks, 6 of them held"
    receiver.engine.check_integrity()
    assert receiver.engine.stats().num_preemptions == 0
    while receiver.engine.has_unfinished_requests:
        receiver.engine.step()
    receiver.engine.check_integrity()


def test_a_flipped_bit_is_named_and_only_the_blocks_before_it_are_used(make_llm: Callable[..., LLM]) -> None:
    alone, sender, receiver = (make_llm(digest_weights=True) for _ in range(3))
    results(sender, GREEDY)
    moved = Moved(sender)
    moved.memory[2 * sender.engine.block_exchange().block_bytes + 100] ^= 16
    with pytest.raises(DamagedBlocks, match=rf"block 2 of the prompt does not have its digest {moved.blocks[2].digest}"):
        moved.to(receiver)
    receiver.engine.check_integrity()
    assert cached(receiver) == 32
    assert results(receiver, SAMPLED) == results(alone, SAMPLED)


def test_blocks_of_another_version_prompt_or_salt_are_refused(make_llm: Callable[..., LLM]) -> None:
    sender, receiver = make_llm(digest_weights=True), make_llm(digest_weights=True, weight_version=WeightVersion(0, 1))
    results(sender, GREEDY)
    moved = Moved(sender)
    for refused in (
        lambda: moved.to(receiver),
        lambda: sender.engine.block_exchange().import_blocks(PROMPT[1:], moved.blocks, memoryview(moved.memory)),
        lambda: sender.engine.block_exchange().import_blocks(PROMPT, moved.blocks, memoryview(moved.memory), cache_salt="mine"),
        lambda: sender.engine.block_exchange().import_blocks(PROMPT, [BlockDigest("", ""), *moved.blocks[1:]], memoryview(moved.memory)),
    ):
        with pytest.raises(UserError, match="of another prompt or of other weights"):
            refused()
    receiver.engine.check_integrity()
    assert cached(receiver) == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is int8 there and auto here"),
        ({"dtype": "bfloat16"}, "arithmetic is "),
        ({"weights": 1}, "weights is "),
        ({"architecture": "mixtral"}, "arithmetic|weights"),
    ],
)
def test_layouts_that_differ_are_told_apart_by_name(make_llm: Callable[..., LLM], options: dict[str, Any], why: str) -> None:
    ours = make_llm(digest_weights=True).engine.block_exchange().layout
    theirs = make_llm(digest_weights=True, **options).engine.block_exchange().layout
    ours.check_equal(make_llm(digest_weights=True).engine.block_exchange().layout)
    with pytest.raises(UserError, match=why):
        ours.check_equal(theirs)


def test_layouts_of_two_precisions_of_products_differ(make_llm: Callable[..., LLM]) -> None:
    bf16, fp16 = (make_llm(digest_weights=True, precision=precision).engine.block_exchange().layout for precision in ("bf16", "fp16"))
    with pytest.raises(UserError, match=r"arithmetic is .* fp16 .* there and .* bf16 "):
        bf16.check_equal(fp16)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"digest_weights": False}, "no digests of its weights"),
        ({"enable_prefix_caching": False}, "no prefix cache"),
        ({"cache_implementation": "static"}, "no prefix cache"),
        ({"architecture": "qwen3_next"}, "a qwen3_next model's layers of linear attention keep states"),
        ({"speculative_config": {"method": "draft", "model": 1, "num_speculative_tokens": 2}}, "the draft model"),
    ],
)
def test_an_engine_whose_blocks_no_other_can_use_says_why(make_llm: Callable[..., LLM], options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_llm(**{"digest_weights": True, **options}).engine.block_exchange()


@pytest.mark.full
def test_a_tensor_parallel_engine_is_refused(make_folder: Callable[..., Path], ranks: Callable[..., LLM]) -> None:
    with pytest.raises(UserError, match="a tensor-parallel engine"):
        ranks(make_folder("qwen3")).engine.block_exchange()


def test_new_weights_make_the_blocks_of_the_old_ones_unknown(make_llm: Callable[..., LLM], make_folder: Callable[..., Path]) -> None:
    from tandem.model.huggingface.model_folder import read_tensors

    sender, receiver = make_llm(digest_weights=True), make_llm(digest_weights=True)
    results(sender, GREEDY)
    moved, layout = Moved(sender), receiver.engine.block_exchange().layout
    receiver.engine.update_weights(list(read_tensors(make_folder("qwen3", 1))), WeightVersion(0, 1))
    with pytest.raises(UserError, match="weights is "):
        receiver.engine.block_exchange().layout.check_equal(layout)
    with pytest.raises(UserError, match="of other weights"):
        moved.to(receiver)


def test_an_engine_that_sleeps_has_no_blocks(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(digest_weights=True)
    results(llm, GREEDY)
    moved = Moved(llm)
    llm.engine.sleep()
    for refused in (lambda: moved.to(llm), lambda: Moved(llm)):
        with pytest.raises(UserError, match="asleep"):
            refused()
    llm.engine.wake_up()
    assert moved.to(llm) == 4 and cached(llm) == 64


def test_the_blocks_of_an_adapter_are_its_own(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    alone, sender, receiver = (make_llm(digest_weights=True, enable_lora=True) for _ in range(3))
    request = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", {"q_proj": (64, 32), "v_proj": (32, 32)}, seed=1, rank=3)))
    expected = results(alone, SAMPLED, lora_request=request)
    results(sender, GREEDY, lora_request=request)
    moved = Moved(sender, adapter="one")
    receiver.engine.add_lora(request)
    assert moved.to(receiver) == 4
    assert cached(receiver) == 0 and cached(receiver, lora_request=request) == 64
    assert results(receiver, SAMPLED, lora_request=request) == expected


def test_brought_blocks_are_told_as_stored_events_of_their_request(make_llm: Callable[..., LLM]) -> None:
    sender, receiver = make_llm(digest_weights=True), make_llm(digest_weights=True)
    results(sender, GREEDY)
    events = receiver.engine.record_block_events()
    moved = Moved(sender)
    receiver.engine.block_exchange().import_blocks(PROMPT, moved.blocks, memoryview(moved.memory), request_id="r1")
    told = events.take()
    assert [event[:2] for event in told] == [["stored", "r1"]] * len(told)
    names = [name for event in told for name in event[4]]
    assert names == [block.block_hash[:16] for block in moved.blocks] and {event[3] for event in told} == {len(PROMPT)}
