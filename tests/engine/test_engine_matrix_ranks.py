"""The same tokens, and the same bits of every log-probability, in every cell of ``engine_matrix`` on two ranks."""

from pathlib import Path

import pytest
from engine_matrix import MEMORY, NUMBERS, SPECULATION, check


@pytest.mark.full
@pytest.mark.parametrize("numbers", NUMBERS)
def test_every_cell_of_the_matrix_draws_the_same_bits_on_two_ranks(matrix_folders: dict[str, Path], numbers: str) -> None:
    check(matrix_folders, numbers, 2, [(23, memory, speculation) for memory in MEMORY for speculation in SPECULATION])
