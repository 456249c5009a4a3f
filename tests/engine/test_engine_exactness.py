"""The exactness matrix by family: the same tokens, and the same bits of every log-probability as the trainer's forward pass, in fp32 and bf16, whatever the
batch, chunks, prefix cache, preemption, speculation, ranks and kernels."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import eagle3_head, with_predictor
from engine_matrix import KEYS, MEMORY, PROMPTS, SPECULATION, Completions, before_and_after_an_update, generate

from tandem.engine.core.lifecycle import Transition
from tandem.engine.llm import LLM
from tandem.kernels import Kernels, select
from tandem.kernels.mixed import in_precision
from tandem.model.attention import PackedContext
from tandem.model.huggingface.model_folder import load_model
from tandem.types import UserError

FAMILIES = ("qwen3", "qwen3_moe", "mistral", "gpt_oss", "deepseek_v3")
"""A dense one, one with a mixture of experts, one with sliding windows, one with sinks, one with latent attention."""
CELLS = [
    (16, "roomy", "none"), (64, "recompute", "none"), (23, "swap", "none"), (16, "recompute", "ngram"), (23, "roomy", "draft"), (64, "swap", "draft"),
    (16, "swap", "eagle3"), (23, "recompute", "mtp"),
]  # fmt: skip
"""Chunk, memory and speculation."""
HYBRID_CELLS = [
    (16, "roomy", "none"), (64, "recompute", "none"), (23, "swap", "none"), (64, "swap", "none"), (23, "recompute", "ngram"), (16, "swap", "ngram"),
    (64, "roomy", "draft"), (16, "recompute", "eagle3"),
]  # fmt: skip
RANKED, BY_REFERENCE = [(23, "roomy", "none"), (16, "swap", "ngram")], [(64, "roomy", "none"), (16, "recompute", "draft")]
METHODS: dict[str, dict[str, Any]] = SPECULATION | {
    method: {"speculative_config": {"method": method, "num_speculative_tokens": 3, "disable_by_batch_size": 64}} for method in ("mtp", "eagle3")
}
PREDICTED = ("deepseek_v3",)
"""Families whose folders have a layer of multi-token prediction."""
Folders = dict[str, Path]


def folders_of(make_folder: Callable[..., Path], family: str, into: Path) -> Folders:
    plain = make_folder(family, 0)
    if family in PREDICTED:
        plain = with_predictor(plain, make_folder(family, 4), into / "plain")
    return {"plain": plain, "draft": make_folder(family, 2), "new": make_folder(family, 1), "eagle3": eagle3_head(plain, into / "head")}


def start(folders: Folders, chunk: int, memory: str, speculation: str, **settings: Any) -> LLM:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": chunk, **MEMORY[memory], **METHODS[speculation], **settings}
    if speculation in folders:
        settings["speculative_config"] = {**settings["speculative_config"], "model": folders[speculation]}
    return LLM(folders["plain"], **settings)


def check_trainer(folder: Path, kernels: Kernels, completions: Completions) -> None:
    """Asserts that the log-probabilities are those of the trainer's forward pass, bit for bit."""
    decoder = load_model(folder, kernels)
    tokenizer = LLM(folder).engine.tokenizer
    assert tokenizer is not None
    for prompt, outputs in zip(PROMPTS, completions, strict=True):
        before = tokenizer.encode(prompt)
        for output in outputs:
            tokens = torch.tensor([*before, *output.token_ids])
            count, first = len(tokens) - 1, len(before) - 1
            with torch.no_grad():
                hidden = decoder(tokens[:-1], torch.arange(count), PackedContext(torch.tensor([0, count], dtype=torch.int32), count))
                scored = decoder.token_logprobs(hidden, torch.arange(first, count), tokens[first + 1 :], 1.0, count)
            assert list(output.raw_logprobs) == scored.raw.tolist()


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_has_the_bits_of_the_trainer(make_folder: Callable[..., Path], tmp_path: Path, family: str, precision: Any) -> None:
    folders = folders_of(make_folder, family, tmp_path)
    for name, cells in (("cpu", CELLS), ("reference", BY_REFERENCE)):
        settings: dict[str, Any] = {"kernels": name, "precision": precision}
        kernels = in_precision(select(name), precision, torch.device("cpu"))  # type: ignore[arg-type]
        expected = None
        for cell in (cell for cell in cells if cell[2] != "mtp" or family in PREDICTED):
            with contextlib.closing(start(folders, *cell, **settings)) as llm:
                completions = before_and_after_an_update(llm, folders)
                if MEMORY[cell[1]]:
                    assert llm.engine.stats().num_preemptions > 0, "the cache is too large for a preemption"
            if expected is None:
                expected = completions
                assert expected[0] != expected[1]
                check_trainer(folders["plain"], kernels, expected[0])
                check_trainer(folders["new"], kernels, expected[1])
            assert completions == expected, (name, cell)
        for cell in RANKED if name == "cpu" else ():
            with contextlib.closing(start(folders, *cell, **settings, tensor_parallel_size=2)) as llm:
                assert expected is not None and generate(llm) == expected[0], ("two ranks", cell)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_cell_of_a_hybrid_has_the_bits_of_the_trainer(make_folder: Callable[..., Path], precision: Any, tmp_path: Path) -> None:
    """The prefix cache is on, with snapshots of the states of linear attention. The draft model is one without such layers."""
    folders = folders_of(make_folder, "qwen3_next", tmp_path) | {"draft": make_folder("qwen3", 2)}
    for name, cells in (("cpu", HYBRID_CELLS), ("reference", [HYBRID_CELLS[1], HYBRID_CELLS[5]])):
        settings: dict[str, Any] = {"kernels": name, "precision": precision}
        expected = None
        for cell in cells:
            with contextlib.closing(start(folders, *cell, **settings)) as llm:
                completions = before_and_after_an_update(llm, folders)
                assert llm.engine.stats().num_preemptions > 0 or not MEMORY[cell[1]], "the cache is too large for a preemption"
            expected = completions if expected is None else expected
            assert completions == expected, (name, cell)
        for cell in (HYBRID_CELLS[1], HYBRID_CELLS[5], HYBRID_CELLS[6]) if name == "cpu" else ():
            with contextlib.closing(start(folders, *cell, **settings, tensor_parallel_size=2)) as llm:
                assert before_and_after_an_update(llm, folders) == expected, ("two ranks", cell)
        assert expected is not None and expected[0] != expected[1]
        for folder, own in zip((folders["plain"], folders["new"]), expected, strict=True):
            check_trainer(folder, in_precision(select(name), precision, torch.device("cpu")), own)  # type: ignore[arg-type]


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


def test_a_cell_of_the_sink_family_has_the_bits_of_the_trainer(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folders = folders_of(make_folder, "gpt_oss", tmp_path)
    with contextlib.closing(start(folders, 16, "swap", "ngram")) as llm:
        completions = generate(llm)
        assert [generate(llm, [key])[0] for key in KEYS[:2]] == completions[:2]
    check_trainer(folders["plain"], select("cpu"), completions)
