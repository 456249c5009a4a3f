"""The exactness matrix by family: the same tokens, and the same bits of every log-probability as the trainer's forward pass, in fp32, whatever the batch,
chunks, prefix cache, preemption, speculation, ranks and kernels."""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_matrix import KEYS, MEMORY, generate
from exactness_cells import CELLS, FAMILIES, METHODS, PREDICTED, cells_of, check_cells, check_trainer, folders_of, start

from tandem.kernels import select


@pytest.mark.parametrize("family", [FAMILIES[0], PREDICTED[0]])
def test_any_two_levels_of_the_matrix_meet_in_a_cell(family: str) -> None:
    cells = cells_of(family)
    levels = [{16, 23, 64}, set(MEMORY), set(METHODS) - set(() if family in PREDICTED else ("mtp",)), {True, False}, {"reference", "ranks", None}]
    assert len(set(cells)) == len(cells) == 3 * len(levels[2])
    for first, second in itertools.combinations(range(len(levels)), 2):
        assert {(cell[first], cell[second]) for cell in cells} == set(itertools.product(levels[first], levels[second])), CELLS[0]._fields[first]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_has_the_bits_of_the_trainer(make_folder: Callable[..., Path], tmp_path: Path, family: str) -> None:
    check_cells(folders_of(make_folder, family, tmp_path), cells_of(family), "fp32")


def test_a_cell_of_the_sink_family_has_the_bits_of_the_trainer(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folders = folders_of(make_folder, "gpt_oss", tmp_path)
    with contextlib.closing(start(folders, 16, "swap", "ngram")) as llm:
        completions = generate(llm)
        assert [generate(llm, [key])[0] for key in KEYS[:2]] == completions[:2]
    check_trainer(folders["plain"], select("cpu"), completions)
