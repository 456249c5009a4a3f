"""The exactness matrix of ``test_engine_exactness`` for a hybrid of softmax and linear attention, with snapshots of states where the prefix cache is on."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_matrix import generate
from exactness_cells import cells_of, check_cells, check_trainer, folders_of, start

from tandem.engine.core.lifecycle import Transition
from tandem.engine.llm import LLM
from tandem.kernels import select
from tandem.kernels.mixed import Precision
from tandem.types import UserError


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_cell_of_a_hybrid_has_the_bits_of_the_trainer(make_folder: Callable[..., Path], tmp_path: Path, precision: Precision) -> None:
    check_cells(folders_of(make_folder, "qwen3_next", tmp_path), cells_of("qwen3_next"), precision)


def test_a_hybrid_refuses_what_its_states_cannot_do(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folders = folders_of(make_folder, "qwen3_next", tmp_path)
    with pytest.raises(UserError, match=r"engine swap_space is 1e-06 GiB, and a qwen3_next model's states of one sequence take 0.0000 GiB"):
        start(folders, 16, "roomy", "none", swap_space=1e-6)
    with pytest.raises(UserError, match="the draft model is a qwen3_next with layers of linear attention"):
        LLM(make_folder("qwen3", 0), speculative_config={"method": "draft", "model": folders["plain"]})


def test_a_cell_of_a_hybrid_has_the_bits_of_the_trainer(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folders = folders_of(make_folder, "qwen3_next", tmp_path)
    with contextlib.closing(start(folders, 16, "swap", "ngram")) as llm:
        completions = generate(llm)
        stats = llm.engine.stats()
        assert llm.engine.transitions()[Transition.SWAP_IN] > 0 and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    check_trainer(folders["plain"], select("cpu"), completions)
