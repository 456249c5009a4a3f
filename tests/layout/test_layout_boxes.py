"""Shard offsets: parts of tensors against torch's indexing."""

import random

import pytest
import torch

from tandem.layout.shard_offsets import ShardOffsets, difference, intersection, is_covered, offsets_of_range


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (4, 1, 3), (1, 6)])
def test_run_of_memory_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    x = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
    for start in range(x.numel() + 1):
        for stop in range(start, x.numel() + 1):
            boxes = list(offsets_of_range(shape, start, stop))
            found = torch.cat([x[box.slices].reshape(-1) for box in boxes]) if boxes else x.new_empty(0)
            assert found.tolist() == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def drawn(draw: random.Random, shape: tuple[int, ...]) -> ShardOffsets:
    ends = [sorted(draw.sample(range(size + 1), 2)) for size in shape]
    return ShardOffsets(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def test_intersections_differences_and_covers_are_those_of_sets_of_elements() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
        elements = torch.arange(torch.Size(shape).numel()).view(shape)
        members = lambda box, elements=elements: set(elements[box.slices].reshape(-1).tolist())
        a, parts = drawn(draw, shape), [drawn(draw, shape) for _ in range(draw.randint(1, 4))]
        common = intersection(a, parts[0])
        assert (members(common) if common else set()) == members(a) & members(parts[0])
        rest = [members(box) for box in difference(a, parts[0])]
        assert sum(map(len, rest)) == len(set().union(*rest)), "no element twice"
        assert set().union(*rest) == members(a) - members(parts[0])
        assert is_covered(a, parts) == (members(a) <= set().union(*map(members, parts)))
        assert a.within(a).moved(a.start) == a
