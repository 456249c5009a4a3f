"""The cells of the exactness matrix by family: chunk, memory, speculation, prefix cache, and who computes."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from draft_heads import eagle3_head, with_predictor
from engine_matrix import KEYS, MEMORY, PARAMS, PROMPTS, SPECULATION, Completions, before_and_after_an_update

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import Kernels, select
from tandem.kernels.mixed import Precision, in_precision
from tandem.model.attention import PackedContext
from tandem.model.huggingface.model_folder import load_model


class Cell(NamedTuple):
    """Every cell is computed by one process with the CPU kernels; where ``again`` says so, once more with the reference kernels or by two ranks."""

    chunk: int
    memory: str
    speculation: str
    prefix_cache: bool
    again: str | None


CELLS = [
    Cell(16, "roomy", "none", False, None), Cell(23, "recompute", "none", True, "ranks"), Cell(64, "swap", "none", True, "reference"),
    Cell(64, "roomy", "ngram", True, "reference"), Cell(23, "recompute", "ngram", True, None), Cell(16, "swap", "ngram", False, "ranks"),
    Cell(64, "roomy", "draft", True, "ranks"), Cell(16, "recompute", "draft", False, "reference"), Cell(23, "swap", "draft", False, None),
    Cell(23, "roomy", "eagle3", True, "reference"), Cell(64, "recompute", "eagle3", False, None), Cell(16, "swap", "eagle3", True, "ranks"),
    Cell(16, "roomy", "mtp", False, "reference"), Cell(64, "recompute", "mtp", False, "ranks"), Cell(23, "swap", "mtp", True, None),
]  # fmt: skip
"""A pairwise covering array over the fields of ``Cell``: any two levels of different factors meet in at least one cell, with the last row and, for models
without a layer of multi-token prediction, without it. So two ranks and the reference kernels meet every chunk, memory and speculation, and the prefix cache on
and off. All 270 combinations would take hours for each family."""
METHODS: dict[str, dict[str, Any]] = SPECULATION | {
    method: {"speculative_config": {"method": method, "num_speculative_tokens": 3, "disable_by_batch_size": 64}} for method in ("mtp", "eagle3")
}
FAMILIES = ("qwen3", "qwen3_moe", "mistral", "gpt_oss", "deepseek_v3")
"""A dense one, one with a mixture of experts, one with sliding windows, one with sinks, one with latent attention."""
PREDICTED = ("deepseek_v3", "qwen3_next")
"""Families whose folders have a layer of multi-token prediction."""
EXECUTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"kernels": "cpu"}, "reference": {"kernels": "reference"}, "ranks": {"kernels": "cpu", "tensor_parallel_size": 2},
}  # fmt: skip
SHORTER = replace(PARAMS, max_tokens=24)
"""Past the window of 20 tokens and a block of 16."""
TIGHT: dict[str, Any] = {"kv_cache_tokens": 96, "max_model_len": 96}
"""Room for the longest of the 10 sequences and little more, so that each cell with less than a roomy cache has to preempt."""
Folders = dict[str, Path]


def cells_of(family: str) -> list[Cell]:
    return [cell for cell in CELLS if cell.speculation != "mtp" or family in PREDICTED]


def folders_of(make_folder: Callable[..., Path], family: str, into: Path) -> Folders:
    """Returns the model, its draft model, other weights of it, and a head. The draft model of a hybrid is one without layers of linear attention."""
    plain = make_folder(family, 0)
    if family in PREDICTED:
        plain = with_predictor(plain, make_folder(family, 4), into / "plain")
    draft = make_folder("qwen3" if family == "qwen3_next" else family, 2)
    return {"plain": plain, "draft": draft, "new": make_folder(family, 1), "eagle3": eagle3_head(plain, into / "head")}


def start(folders: Folders, chunk: int, memory: str, speculation: str, **settings: Any) -> LLM:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": chunk, **MEMORY[memory], **METHODS[speculation], **settings}
    if memory != "roomy":
        settings |= TIGHT
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


def check_cells(folders: Folders, cells: Sequence[Cell], precision: Precision) -> None:
    """Asserts that all ``cells`` have the same tokens and bits of log-probabilities, before and after an update of weights, and that these are the trainer's.
    Two ranks have those of one process; the reference kernels have bits of their own."""
    of_kernels: dict[str, tuple[Completions, Completions]] = {}
    for number, cell in enumerate(cells):
        alone = [number % len(KEYS), (number + 2) % len(KEYS)]
        for execution in ("cpu", cell.again) if cell.again is not None else ("cpu",):
            settings = {"precision": precision, "enable_prefix_caching": cell.prefix_cache, **EXECUTIONS[execution]}
            with contextlib.closing(start(folders, cell.chunk, cell.memory, cell.speculation, **settings)) as llm:
                completions = before_and_after_an_update(llm, folders, alone, SHORTER)
                stats = llm.engine.stats()
                preempted = stats.num_swaps if cell.memory == "swap" else stats.num_preemptions
                assert (preempted > 0) == (cell.memory != "roomy"), (execution, cell)
                assert (stats.num_draft_tokens > 0) == (cell.speculation != "none"), (execution, cell)
                cached = [llm.generate(PROMPTS[-1], SamplingParams(max_tokens=1))[0].num_cached_tokens for _ in range(2)][1]
                assert (cached > 0) == cell.prefix_cache, (execution, cell)
            assert completions == of_kernels.setdefault(settings["kernels"], completions), (execution, cell)
    for name, (before, after) in of_kernels.items():
        assert before != after
        kernels = in_precision(select(name), precision, torch.device("cpu"))  # type: ignore[arg-type]
        check_trainer(folders["plain"], kernels, before)
        check_trainer(folders["new"], kernels, after)
