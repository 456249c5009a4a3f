"""Decoding steps in one call: the engine uses them where it can, and nothing of its outputs depends on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.core.request import Request, Sequence
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import SampledRows, select
from tandem.kernels.cpu.decode_step import CpuDecodeProgram, CpuRowRecorder
from tandem.model.decoder import Decoder
from tandem.types import RunError

PROMPTS = ["a", "the quick brown fox jumps over", "abc 123", "sphinx of black quartz", "zz"]
SETTINGS = [
    {"temperature": 1.0, "n": 2}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.05, "stop_token_ids": [3, 9, 17, 20, 21, 22]},
]  # fmt: skip
BATCHES: list[dict[str, Any]] = [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 16}, {"kv_cache_tokens": 128, "preemption_mode": "recompute"}]


def completions(folder: Path, extra: dict[str, Any], **settings: Any) -> list[Any]:
    llm = LLM(folder, kernels="cpu", **settings)
    params = [SamplingParams(max_tokens=20 + i, **chosen, **extra) for i, chosen in enumerate(SETTINGS)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(c.token_ids, c.raw_logprobs, c.sampling_logprobs, c.text, c.finish_reason) for output in outputs for c in output.outputs]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that was one call."""
    counted, run = list[int](), CpuDecodeProgram.run
    monkeypatch.setattr(CpuDecodeProgram, "run", lambda program, caches, index, *states: counted.append(len(index)) or run(program, caches, index, *states))
    return counted


@pytest.mark.parametrize("settings", BATCHES)
def test_outputs_are_those_of_steps_of_several_calls(
    make_folder: Callable[..., Path], settings: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder()
    ours = completions(folder, {}, **settings)
    assert len(steps) > 10
    steps.clear()
    monkeypatch.setattr(Decoder, "decode_program", lambda decoder, rows: None)
    monkeypatch.setattr(InputBatch, "use_recorder", lambda batch, kernels: None)
    assert completions(folder, {}, **settings) == ours and not steps


@pytest.mark.parametrize("extra", [{"logprobs": 2}, {"presence_penalty": 0.4}, {"min_tokens": 8}, {"logit_bias": {4: 2.0}}])
def test_steps_with_a_request_that_needs_more_than_a_draw_are_several_calls(make_folder: Callable[..., Path], extra: dict[str, Any], steps: list[int]) -> None:
    completions(make_folder(), extra)
    assert not steps


def batch_of(limits: list[int], stops: list[tuple[int, ...]]) -> InputBatch:
    """Rows of a prompt of 3 tokens each, in another order than that of the sequences."""
    batch, rows = InputBatch(8, 32), [5, 0, 7, 2][: len(limits)]
    sequences = []
    for i, (row, limit, stop) in enumerate(zip(rows, limits, stops, strict=True)):
        request = Request(str(i), None, [1] * 3, SamplingParams(), 0, i, i, stop_token_ids=stop, max_length=limit)
        sequences.append(Sequence(request, 0, i, row=row, blocks=[row]))
    batch.join(sequences, [3] * len(rows))
    return batch


def test_recording_in_one_call_leaves_the_rows_as_recording_in_torch_does() -> None:
    limits, stops = [6, 4, 30, 30], [(), (9,), (4, 8), (8,)]
    ours, expected = batch_of(limits, stops), batch_of(limits, stops)
    ours.use_recorder(select("cpu"))
    assert isinstance(ours._recorder, CpuRowRecorder) and expected._recorder is None
    ended = []
    for step, tokens in enumerate([[2, 3, 5, 6], [9, 9, 9, 9], [4, 4, 4, 4], [8, 8, 8, 8]]):
        rows = (7, 5, 2, 0) if step % 2 else (2, 7, 0, 5)
        values = -torch.rand(2, 4, generator=torch.Generator().manual_seed(step))
        sampled = SampledRows(torch.tensor(tokens), *values)
        ended.append(ours.record(ours.select(rows), sampled))
        assert sorted(ended[-1]) == sorted(expected.record(expected.select(rows), sampled))
        for one, other in ((ours.host.length, expected.host.length), (ours.host.last_token, expected.host.last_token)):
            assert torch.equal(one, other)
        for row in rows:
            count = step + 1
            assert torch.equal(ours.drawn_tokens[row, :count], expected.drawn_tokens[row, :count])
            assert torch.equal(ours.drawn_logprobs[:, row, :count], expected.drawn_logprobs[:, row, :count])
    assert ended == [[0], [0], [7, 0, 5], [7, 5, 2, 0]]


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_log_probability_that_is_not_finite_is_refused_before_anything_is_recorded(kernels: str, value: float) -> None:
    batch = batch_of([9, 9], [(), ()])
    batch.use_recorder(select(kernels))
    with pytest.raises(RunError, match="not finite"):
        batch.record(batch.select((0, 5)), SampledRows(torch.tensor([4, 5]), torch.tensor([-1.0, value]), torch.zeros(2)))
    assert batch.host.length[[0, 5]].tolist() == [3, 3]


def test_rows_with_log_probabilities_in_fp64_are_recorded_in_torch() -> None:
    batch = InputBatch(2, 16, torch.float64)
    batch.use_recorder(select("cpu"))
    assert batch._recorder is None
