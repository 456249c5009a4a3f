"""Blocks, tables and the prefix cache: no block is lost, shared by mistake, or found under the wrong key."""

import random

import pytest

from tandem.engine.kv_cache.block_pool import BlockAllocator
from tandem.engine.kv_cache.block_table import BlockCopy, fork, make_writable, needs_block
from tandem.engine.kv_cache.prefix_cache import PrefixCache, chain, root_key
from tandem.types import WeightVersion

ROOT = root_key(WeightVersion(0, 0))


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_every_block_in_exactly_one_state(seed: int) -> None:
    rng = random.Random(seed)
    allocator, held, keys = BlockAllocator(12), [], 0
    for _ in range(2000):
        action = rng.choice(("allocate", "retain", "release", "release", "name", "find", "forget"))
        if action == "allocate" and allocator.free_count:
            held.append(allocator.allocate())
        elif action == "retain" and held:
            held.append(rng.choice(held))
            allocator.retain(held[-1])
        elif action == "release" and held:
            allocator.release(held.pop(rng.randrange(len(held))))
        elif action == "name" and held:
            allocator.name(rng.choice(held), str(keys).encode())
            keys += 1
        elif action == "find" and keys:
            found = allocator.find(str(rng.randrange(keys)).encode())
            if found is not None:
                held.append(found)
        elif action == "forget" and rng.random() < 0.05:
            allocator.forget_all()
        allocator.check_integrity({block: held.count(block) for block in held})
        assert allocator.free_count == 12 - len(set(held))


def test_the_integrity_check_sees_a_lost_and_a_twice_freed_block() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate()
    with pytest.raises(AssertionError, match="references"):
        allocator.check_integrity()
    allocator = BlockAllocator(3)
    allocator._free.append(0)
    with pytest.raises(AssertionError, match="twice"):
        allocator.check_integrity()


def test_cached_blocks_are_given_out_last_and_the_least_recently_used_first() -> None:
    allocator = BlockAllocator(3)
    blocks = [allocator.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        allocator.name(block, bytes([number]))
    allocator.release(blocks[0])
    allocator.release(blocks[1])
    assert allocator.find(bytes([0])) == blocks[0]
    allocator.release(blocks[0])
    allocator.release(blocks[2])
    assert [allocator.allocate() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]
    assert allocator.find(bytes([0])) is None


def test_a_fork_writes_to_a_copy_and_the_last_holder_in_place() -> None:
    allocator = BlockAllocator(8)
    table = [allocator.allocate() for _ in range(2)]
    other = fork(allocator, table)
    assert needs_block(allocator, table, 20)
    column, block, copy = make_writable(allocator, table, 20)
    assert (column, copy) == (1, BlockCopy(other[1], block)) and table[0] == other[0] and table[1] != other[1]
    assert not needs_block(allocator, table, 20) and not needs_block(allocator, other, 20)
    assert needs_block(allocator, other, 32)
    column, block, copy = make_writable(allocator, other, 32)
    assert (column, copy) == (2, None) and other[2] == block


def test_a_key_depends_on_version_adapter_salt_and_every_token_before() -> None:
    tokens = list(range(40))
    keys = chain(ROOT, tokens)
    assert len(keys) == 2
    assert chain(ROOT, tokens, keys[:1]) == keys
    roots = [
        root_key(WeightVersion(0, 1)), root_key(WeightVersion(1, 0)), root_key(WeightVersion(0, 0), adapter="a"),
        root_key(WeightVersion(0, 0), salt="a"), root_key(WeightVersion(0, 0), adapter="a", salt="a"), ROOT,
    ]
    assert len({chain(root, tokens)[0] for root in roots}) == len(roots)
    changed = chain(ROOT, [1, *tokens[1:]])
    assert changed[0] != keys[0] and changed[1] != keys[1]


def test_a_match_leaves_at_least_one_token_to_compute() -> None:
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, enabled=True)
    table = [allocator.allocate() for _ in range(3)]
    keys = cache.keys(ROOT, list(range(48)))
    cache.register(keys, table, 47)
    assert cache.match(keys, 48) == table[:2]
    assert cache.match(keys, 33) == table[:2]
    assert cache.match(keys, 32) == table[:1]
    assert cache.match(keys, 16) == []


def test_blocks_of_another_weight_version_never_match() -> None:
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, enabled=True)
    tokens = list(range(48))
    cache.register(cache.keys(ROOT, tokens), [allocator.allocate() for _ in range(3)], 48)
    assert cache.match(cache.keys(root_key(WeightVersion(0, 1)), tokens), 48) == []
    assert len(cache.match(cache.keys(ROOT, tokens), 48)) == 2
