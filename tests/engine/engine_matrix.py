"""The cells of the engine's matrix: {cold, warm} x {chunk sizes} x {a batch, alone} x {room, swap, recompute} x {with and without speculation} x {after an
update} x {fp32, int8, AWQ, quantized keys and values} x {one rank, two}. All of one model have the same tokens and log-probabilities."""

import contextlib
from pathlib import Path
from typing import Any

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.spec_decode.draft_model import DraftModel
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import WeightVersion

PROMPTS = ["q", "sort 4 1 9 2", "the quick brown fox jumps over the lazy dog", "a prompt of 16 ch", "x" * 48]
PARAMS = SamplingParams(n=2, max_tokens=40, seed=11, temperature=0.9, top_p=0.95, ignore_eos=True)
KEYS = list(range(len(PROMPTS)))
NUMBERS: dict[str, dict[str, Any]] = {"fp32": {}, "int8": {"quantization": "int8"}, "awq": {}, "int8 keys and values": {"kv_cache_dtype": "int8"}}
MEMORY: dict[str, dict[str, Any]] = {
    "roomy": {},
    "recompute": {"kv_cache_tokens": 128, "preemption_mode": "recompute"},
    "swap": {"kv_cache_tokens": 128, "preemption_mode": "swap", "swap_space": 2**-12},
}
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5, "disable_by_batch_size": 64}},
    "draft": {"speculative_config": {"method": "draft", "disable_by_batch_size": 64}},
}
Completions = list[list[CompletionOutput]]


def start(folders: dict[str, Path], numbers: str, **settings: Any) -> LLM:
    if settings.get("speculative_config", {}).get("method") == "draft":
        settings["speculative_config"] = {**settings["speculative_config"], "model": folders["draft"]}
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **NUMBERS[numbers], **settings}
    return LLM(folders["awq" if numbers == "awq" else "plain"], **settings)


def generate(llm: LLM, keys: list[int] = KEYS, params: SamplingParams = PARAMS) -> Completions:
    answers = llm.generate([PROMPTS[key] for key in keys], params, request_keys=keys)
    llm.engine.check_integrity()
    return [answer.outputs for answer in answers]


def before_and_after_an_update(
    llm: LLM, folders: dict[str, Path], alone: list[int] = KEYS, params: SamplingParams = PARAMS
) -> tuple[Completions, Completions]:
    """Returns the completions of ``llm``, equal cold, warm and (those of the keys ``alone``) alone, and after an update during running requests."""
    cold = generate(llm, params=params)
    assert generate(llm, params=params) == cold, "warm"
    assert [generate(llm, [key], params)[0] for key in alone] == [cold[key] for key in alone], "alone"
    engine = llm.engine
    assert engine.tokenizer is not None
    for key, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, engine.tokenizer.encode(prompt), params, key=key)
    for _ in range(12):
        engine.step()
    draft = dict(read_tensors(folders["draft"])) if isinstance(engine._runner.proposer, DraftModel) else None
    llm.update_weights(dict(read_tensors(folders["new"])), WeightVersion(0, 1), draft)
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_integrity()
    return cold, generate(llm, params=params)


def check(folders: dict[str, Path], numbers: str, ranks: int, cells: list[tuple[int, str, str]]) -> None:
    with contextlib.closing(start(folders, numbers)) as llm:
        expected = before_and_after_an_update(llm, folders)
    assert expected[0] != expected[1]
    for chunk, memory, speculation in cells:
        settings = {"max_num_batched_tokens": chunk, **MEMORY[memory], **SPECULATION[speculation], "tensor_parallel_size": ranks}
        with contextlib.closing(start(folders, numbers, **settings)) as llm:
            assert before_and_after_an_update(llm, folders) == expected, (numbers, ranks, chunk, memory, speculation)
