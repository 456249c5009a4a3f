"""Blocks, block tables and the prefix cache: no block is lost, shared by mistake, or found under a wrong key."""

import random

import pytest

from tandem.engine.core.request import Prefill, Request, Sequence
from tandem.engine.kv_cache.block_pool import BlockCopy, BlockPool, block_hashes, root_hash
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.types import WeightVersion

ROOT = root_hash(WeightVersion(0, 0))


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_every_block_in_exactly_one_state(seed: int) -> None:
    rng = random.Random(seed)
    pool, held, keys = BlockPool(12), [], 0
    for _ in range(2000):
        action = rng.choice(("allocate", "retain", "release", "release", "name", "find", "forget"))
        if action == "allocate" and pool.num_free_blocks:
            held.append(pool.get_new_block())
        elif action == "retain" and held:
            held.append(rng.choice(held))
            pool.touch(held[-1])
        elif action == "release" and held:
            pool.free_block(held.pop(rng.randrange(len(held))))
        elif action == "name" and held:
            pool.cache_block(rng.choice(held), str(keys).encode())
            keys += 1
        elif action == "find" and keys:
            found = pool.get_cached_block(str(rng.randrange(keys)).encode())
            if found is not None:
                held.append(found)
        elif action == "forget" and rng.random() < 0.05:
            pool.reset_prefix_cache()
        pool.check_integrity({block: held.count(block) for block in held})
        assert pool.num_free_blocks == 12 - len(set(held))


def test_the_integrity_check_sees_a_lost_and_a_twice_freed_block() -> None:
    pool = BlockPool(3)
    pool.get_new_block()
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity()
    pool = BlockPool(3)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()


def test_cached_blocks_are_given_out_last_and_the_least_recently_used_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.get_new_block() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.cache_block(block, bytes([number]))
    pool.free_block(blocks[0])
    pool.free_block(blocks[1])
    assert pool.get_cached_block(bytes([0])) == blocks[0]
    pool.free_block(blocks[0])
    pool.free_block(blocks[2])
    assert [pool.get_new_block() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]
    assert pool.get_cached_block(bytes([0])) is None


def test_a_fork_writes_to_a_copy_and_the_last_holder_in_place() -> None:
    kv_cache = KVCacheManager(8)
    table = [kv_cache.block_pool.get_new_block() for _ in range(2)]
    other = kv_cache.fork(table)
    assert kv_cache.needs_slot(table, 20) and kv_cache.num_blocks_for_slots([(table, 20), (other, 20)]) == 1
    assert kv_cache.allocate_slots(table, 20, 21) == [(1, table[1], BlockCopy(other[1], table[1]))]
    assert table[0] == other[0] and table[1] != other[1]
    assert kv_cache.allocate_slots(table, 20, 21) == [] and not kv_cache.needs_slot(other, 20)
    assert kv_cache.needs_slot(other, 32)
    assert kv_cache.allocate_slots(other, 32, 33) == [(2, other[2], None)] and len(other) == 3


def test_slots_are_given_all_or_none_and_a_shared_block_is_not_copied_at_its_start() -> None:
    kv_cache = KVCacheManager(4)
    table = [kv_cache.block_pool.get_new_block()]
    assert kv_cache.allocate_slots(table, 16, 16 * 5 + 1) is None and len(table) == 1 and kv_cache.num_free_blocks == 3
    other = kv_cache.fork(table)
    assert kv_cache.allocate_slots(other, 0, 1) == [(0, other[0], None)]
    assert kv_cache.allocate_slots(table, 10, 33) == [(1, table[1], None), (2, table[2], None)] and kv_cache.num_free_blocks == 0
    kv_cache.block_pool.check_integrity(dict.fromkeys(table + other, 1))


def test_a_key_depends_on_version_adapter_salt_and_every_token_before() -> None:
    tokens = list(range(40))
    keys = block_hashes(ROOT, tokens)
    assert len(keys) == 2
    assert block_hashes(ROOT, tokens, keys[:1]) == keys
    roots = [
        root_hash(WeightVersion(0, 1)), root_hash(WeightVersion(1, 0)), root_hash(WeightVersion(0, 0), adapter="a"),
        root_hash(WeightVersion(0, 0), salt="a"), root_hash(WeightVersion(0, 0), adapter="a", salt="a"), ROOT,
    ]
    assert len({block_hashes(root, tokens)[0] for root in roots}) == len(roots)
    changed = block_hashes(ROOT, [1, *tokens[1:]])
    assert changed[0] != keys[0] and changed[1] != keys[1]


def prefill_of(tokens: list[int], arrival: int = 0) -> Prefill:
    return Prefill([Sequence(Request("a", None, tokens, SamplingParams(), 0, 0, arrival), 0, 0)], tokens)


def computed(kv_cache: KVCacheManager, length: int) -> list[int]:
    """Returns the cached blocks of a prompt of ``length`` tokens, and frees them."""
    blocks = kv_cache.get_computed_blocks(prefill_of(list(range(length))))
    kv_cache.free(blocks)
    return blocks


def with_prompt(kv_cache: KVCacheManager, length: int, num_computed: int) -> list[int]:
    """Allocates the blocks of a prompt whose first ``num_computed`` tokens are computed."""
    prefill = prefill_of(list(range(length)))
    assert kv_cache.get_computed_blocks(prefill) == [] and kv_cache.allocate_prompt(prefill, [])
    kv_cache.cache_blocks(prefill.sequences[0].request, prefill.block_hashes, prefill.blocks, num_computed)
    return prefill.blocks


def test_a_match_leaves_at_least_one_token_to_compute() -> None:
    kv_cache = KVCacheManager(8)
    table = with_prompt(kv_cache, 48, num_computed=47)
    assert computed(kv_cache, 48) == table[:2]
    assert computed(kv_cache, 33) == table[:2]
    assert computed(kv_cache, 32) == table[:1]
    assert computed(kv_cache, 16) == []


def test_blocks_of_another_weight_version_never_match() -> None:
    kv_cache = KVCacheManager(8)
    with_prompt(kv_cache, 48, num_computed=48)
    kv_cache.weight_version = WeightVersion(0, 1)
    assert computed(kv_cache, 48) == []
    kv_cache.weight_version = WeightVersion(0, 0)
    assert len(computed(kv_cache, 48)) == 2


def test_a_prompt_gets_all_its_blocks_or_none_and_a_reserve_stays_free() -> None:
    kv_cache = KVCacheManager(6)
    table = with_prompt(kv_cache, 40, num_computed=40)
    kv_cache.free(table)
    prefill = prefill_of(list(range(70)))
    assert not kv_cache.allocate_prompt(prefill, kv_cache.get_computed_blocks(prefill), num_reserved=2)
    assert prefill.blocks == [] and kv_cache.num_free_blocks == 6
    assert kv_cache.allocate_prompt(prefill, kv_cache.get_computed_blocks(prefill), num_reserved=1)
    assert prefill.blocks[:2] == table[:2] and prefill.num_computed_tokens == prefill.num_cached_tokens == 32 and len(set(prefill.blocks)) == 5


def test_events_say_what_is_in_the_prefix_cache() -> None:
    """Replayed, the events give the blocks that are in the cache, after any operations."""
    draw = random.Random(5)
    kv_cache, cached, held, said = KVCacheManager(24), set[str](), list[list[int]](), 0
    events = kv_cache.record_block_events()
    assert kv_cache.record_block_events() is events
    for step in range(400):
        if draw.random() < 0.02:
            kv_cache.reset_prefix_cache()
        elif held and draw.random() < 0.5:
            kv_cache.free(held.pop(draw.randrange(len(held))))
        else:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 4))] * 40
            prefill = prefill_of(tokens[: draw.randrange(20, 100)], step)
            if kv_cache.allocate_prompt(prefill, kv_cache.get_computed_blocks(prefill)):
                request = prefill.sequences[0].request
                kv_cache.cache_blocks(request, prefill.block_hashes, prefill.blocks, len(prefill.tokens) // 2)
                kv_cache.cache_blocks(request, prefill.block_hashes, prefill.blocks, len(prefill.tokens))
                held.append(prefill.blocks)
        for kind, *fields in events.take():
            said += 1
            if kind == "stored":
                name, first, prompt_tokens, hashes = fields
                assert name == "a" and hashes == [each[:8].hex() for each in prefill.block_hashes[first : first + len(hashes)]]
                assert not cached & set(hashes) and prompt_tokens == len(prefill.tokens)
                cached |= set(hashes)
            elif kind == "removed":
                assert set(fields[0]) <= cached
                cached -= set(fields[0])
            else:
                cached.clear()
        assert cached == {each[:8].hex() for each in kv_cache.block_pool._by_hash}
    assert said > 150 and events.take() == []
