"""The exactness matrix of ``test_engine_exactness`` in bf16."""

from collections.abc import Callable
from pathlib import Path

import pytest
from exactness_cells import FAMILIES, cells_of, check_cells, folders_of


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_has_the_bits_of_the_trainer_in_bf16(make_folder: Callable[..., Path], tmp_path: Path, family: str) -> None:
    check_cells(folders_of(make_folder, family, tmp_path), cells_of(family), "bf16")
