"""Engines of models with latent attention draw the same bits however requests come: chunked, preempted, swapped, warm, alone, guessed, and after an update."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_matrix import MEMORY, SPECULATION, check

from tandem import LLM
from tandem.types import UserError

CELLS = [(chunk, memory, speculation) for chunk in (16, 23, 64) for memory in MEMORY for speculation in SPECULATION]


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "numbers", "ranks", "cells"),
    [
        pytest.param("deepseek_v3", "fp32", 1, CELLS, id="deepseek_v3"),
        pytest.param("deepseek_v2", "fp32", 1, CELLS, id="deepseek_v2"),
        pytest.param("deepseek_v3", "int8", 1, CELLS[:9], id="deepseek_v3, int8"),
        pytest.param("deepseek_v3", "int8 keys and values", 1, CELLS, id="deepseek_v3, int8 keys and values"),
        pytest.param("deepseek_v3", "fp32", 2, CELLS[:9], id="deepseek_v3, two ranks"),
    ],
)
def test_every_cell_of_the_matrix_draws_the_same_bits(
    make_folder: Callable[..., Path], architecture: str, numbers: str, ranks: int, cells: list[tuple[int, str, str]]
) -> None:
    folders = {name: make_folder(architecture, seed) for name, seed in (("plain", 0), ("draft", 2), ("new", 1))}
    check(folders, numbers, ranks, cells)


def test_a_cache_of_4_bits_is_refused_for_compressed_rows(make_folder: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"kv_cache_dtype is 'int4', which a model with latent attention cannot have: .*; choose int8 or fp8_e4m3"):
        LLM(make_folder("deepseek_v3"), kv_cache_dtype="int4")
