"""Weights go from one pod's shared memory to another's over TCP: every byte verified, whatever happens on the way."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from two_pods import TwoPods

from tandem.types import WeightVersion
from tandem.weight_transfer.update import WeightReader


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(1000, 300, generator=generator)),
        ("small", torch.randn(7, generator=generator, dtype=torch.float64)),
        ("half", torch.randn(33, 129, generator=generator).to(torch.bfloat16)),
        ("scalar", torch.tensor(3.5)),
        ("nothing", torch.empty(0, 5)),
        ("last", torch.randn(200, 300, generator=generator)),
    ]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[TwoPods]:
    torch.set_num_threads(1)
    made = TwoPods(tmp_path)
    yield made
    made.close()


def test_every_version_arrives_bit_for_bit_and_the_engines_of_the_other_pod_read_it(pods: TwoPods) -> None:
    reader = WeightReader(pods.own)
    for step in range(4):
        sent = pods.publish(weights(step), WeightVersion(1, step))
        got = pods.bring(WeightVersion(1, step))
        assert (got.protocol, got.fetched) == ("tcp", ((), 0)) and got.manifest.digest == sent.digest
        assert got.manifest.tensors[0].segment not in pods.buffers.names
        read = reader.read(WeightVersion(1, step))
        assert [name for name, _ in read.tensors] == [name for name, _ in weights(step)]
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(weights(step), read.tensors, strict=True))
    reader.close()
