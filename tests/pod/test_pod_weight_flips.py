"""A bit that flips in the weights in shared memory, on the wire or inside an engine is found, named and repaired, wherever it is."""

import random
from collections.abc import Iterator

import pytest
from flipped_bits import PLACES, Flipping, faults_of

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def flipping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flipping]:
    made = Flipping(tmp_path_factory.mktemp("flips"))
    yield made
    made.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_found_named_and_repaired(place: str, flipping: Flipping) -> None:
    for number in range(4):
        flip = PLACES[place](flipping, random.Random(f"{place} {number}"))
        assert faults_of(flip) == [], flip
    assert flipping.are_right()
