"""Tensor parallelism: two ranks have the bits of one process, and a rank that dies or hangs ends the engine with an error that names it."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem import LLM, SamplingParams
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model, to_huggingface
from tandem.types import EngineDied, RunError, UserError, WeightVersion

PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5], list(range(3, 20)), list(range(39)), [7] * 16)]
PARAMS = SamplingParams(n=3, max_tokens=40, seed=11, temperature=0.9, top_p=0.95, ignore_eos=True)


def start(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"max_num_seqs": 16, "max_num_batched_tokens": 64, "tensor_parallel_size": 2, **settings})


def generate(llm: LLM) -> list[Any]:
    answers = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    return [answer.outputs for answer in answers]


def distance(ours: list[Any], theirs: list[Any]) -> float:
    """Returns the largest difference between log-probabilities of the same tokens."""
    pairs = [pair for mine, other in zip(ours, theirs, strict=True) for pair in zip(mine, other, strict=True)]
    assert all(mine.token_ids == other.token_ids for mine, other in pairs)
    return max(
        abs(a - b) for mine, other in pairs for a, b in zip(mine.raw_logprobs, other.raw_logprobs, strict=True)
    )


def full(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full) for name in names]


OTHERS = full(
    "qwen3", "llama", "mistral", "qwen3_moe", "granite", "smollm3", "phi3", "gemma2", "qwen2_moe", "glm4_moe", "gpt_oss", "cohere",
    "deepseek_v2", "deepseek_v3", "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("architecture", ["qwen2", "mixtral", *OTHERS])
def test_two_ranks_have_the_bits_of_one(make_folder, make_llm, ranks, architecture) -> None:
    expected = generate(make_llm(architecture))
    assert generate(ranks(make_folder(architecture))) == expected


SUMMED = full("qwen3", "mixtral", "granite", "smollm3", "gemma2", "qwen2_moe", "glm4_moe", "gpt_oss", "cohere", "deepseek_v2", "deepseek_v3", "qwen3_next")


@pytest.mark.parametrize("architecture", ["qwen2", *SUMMED])
def test_two_ranks_that_sum_partial_products_are_within_1e_5_of_one(make_folder, make_llm, ranks, architecture) -> None:
    llm = ranks(make_folder(architecture), deterministic=False)
    found = generate(llm)
    assert 0 < distance(found, generate(make_llm(architecture))) < 1e-5
    assert generate(llm) == found, "sums in rank order do not depend on who comes first"


@pytest.mark.full
def test_the_reference_kernels_are_within_1e_5_too(make_folder, make_llm, ranks) -> None:
    found = generate(ranks(make_folder("llama"), kernels="reference"))
    assert distance(found, generate(make_llm("llama", kernels="reference"))) < 1e-5


SWAPPED = {
    "kv_cache_tokens": 128, "swap_space": 2**-12, "preemption_mode": "swap",
    "speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "disable_by_batch_size": 64},
}


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 17}, pytest.param({"kv_cache_tokens": 128, "enable_prefix_caching": False}, marks=pytest.mark.full), SWAPPED],
    ids=str,
)
def test_chunks_copies_and_preemption_reach_every_rank(make_folder, make_llm, ranks, settings) -> None:
    assert generate(ranks(make_folder(), **settings)) == generate(make_llm())


def uneven(folder: Path, **changes: Any) -> Path:
    """A model with an odd vocabulary, biases everywhere and one key-value head."""
    shapes = ModelShapes(
        "llama", 43, 36, 2, 6, 1, 8, 44, 128, False, attention_bias=True, output_bias=True, mlp_bias=True
    )
    decoder = Decoder(replace(shapes, **changes), select("reference"))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator) + name.endswith("norm.weight"))
    save_model(decoder, folder)
    return folder


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_shared_key_value_head_an_odd_vocabulary_and_biases(tmp_path, deterministic) -> None:
    folder = uneven(tmp_path / "model")
    with contextlib.closing(start(folder, deterministic=deterministic)) as llm:
        found, expected = generate(llm), generate(LLM(folder, max_num_seqs=16, max_num_batched_tokens=64))
    assert distance(found, expected) < 1e-5
    assert (found == expected) is deterministic


@pytest.mark.full
def test_four_ranks_over_two_key_value_heads_have_the_bits_of_one(tmp_path) -> None:
    folder = uneven(tmp_path / "model", num_attention_heads=8, num_key_value_heads=2)
    with contextlib.closing(start(folder, tensor_parallel_size=4)) as llm:
        assert generate(llm) == generate(LLM(folder, max_num_seqs=16, max_num_batched_tokens=64))


def test_a_prompt_is_scored_by_every_rank(make_folder, make_llm, ranks) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    ours, theirs = (llm.generate(PROMPTS, params) for llm in (ranks(make_folder("llama")), make_llm("llama")))
    assert [answer.prompt_logprobs for answer in ours] == [answer.prompt_logprobs for answer in theirs]
    assert ours[1].prompt_logprobs[3] is not None


def test_every_rank_takes_new_weights_or_none_does(make_folder, make_llm, ranks) -> None:
    llm = ranks(make_folder("mixtral"))
    before = generate(llm)
    given = load_file(make_folder("mixtral", 1) / "model.safetensors")
    broken = {name: tensor for name, tensor in given.items() if "experts.2.w3" not in name}
    with pytest.raises(UserError, match=r"experts\.2\.w3"):
        llm.update_weights(broken, WeightVersion(0, 1))
    assert generate(llm) == before
    llm.update_weights(given, WeightVersion(0, 1))
    after = generate(llm)
    assert distance(after, generate(make_llm("mixtral", 1))) == 0
    assert {version for answer in after for c in answer for version in c.weight_versions} == {WeightVersion(0, 1)}
    llm.update_weights(load_file(make_folder("mixtral") / "model.safetensors"), WeightVersion(0, 0))
    assert generate(llm) == before


def test_random_weights_are_those_of_one_rank(make_folder, make_llm, ranks) -> None:
    expected = generate(make_llm(load_format="dummy", seed=5))
    assert generate(ranks(make_folder(), load_format="dummy", seed=5)) == expected


def pids_of(llm) -> list[int]:
    """Returns the processes of all ranks except the first."""
    return [worker.pid for worker in llm.engine._ranks._workers]


def test_a_killed_rank_ends_the_engine_with_its_name(make_folder) -> None:
    llm = start(make_folder())
    victim = pids_of(llm)[0]
    llm.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(3):
        llm.engine.step()
    threading.Timer(0.05, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises(EngineDied, match="tensor-parallel rank 1 died while 'step' ran: killed by SIGKILL"):
        for _ in range(10_000):
            llm.engine.step() if llm.engine.has_unfinished_requests else generate(llm)
    with pytest.raises(RunError, match="rank 1 died"):
        llm.generate(PROMPTS, PARAMS)
    llm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(victim, 0)


@pytest.mark.full
@pytest.mark.parametrize("wait_s", [0.0, 1.0], ids=["as it dies", "after its connections were closed"])
def test_of_four_ranks_the_one_that_died_is_named(wait_s: float, tmp_path, capfd) -> None:
    llm = start(uneven(tmp_path / "model", num_attention_heads=8, num_key_value_heads=2), tensor_parallel_size=4)
    os.kill(pids_of(llm)[1], signal.SIGKILL)
    # The others fail at their connection to it, and rank 0 waits for them.
    time.sleep(wait_s)
    with pytest.raises(EngineDied, match=r"^tensor-parallel rank 2 died while 'step' ran: killed by SIGKILL"):
        generate(llm)
    llm.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_closed_engine_writes_nothing_to_files_that_were_opened_after_it(make_folder, tmp_path) -> None:
    llm = start(make_folder())
    # As the traceback of an error does.
    held = [llm.engine]
    llm.close()
    with contextlib.ExitStack() as stack:
        # One of them has the descriptor by which the ranks met.
        for number in range(64):
            stack.enter_context((tmp_path / str(number)).open("wb"))
        held.clear()
        gc.collect()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 64


def test_a_stuck_rank_ends_the_engine_within_its_deadline(make_folder) -> None:
    llm = start(make_folder(), rank_timeout_s=20.0)
    ranks = llm.engine._ranks
    # The ranks have joined under the longer deadline; from now on one second is enough.
    object.__setattr__(ranks._settings, "deadline_s", 1.0)
    os.kill(pids_of(llm)[0], signal.SIGSTOP)
    with pytest.raises(EngineDied, match=r"tensor-parallel rank 1 was stuck in 'step': no result within 1 s; it was killed"):
        generate(llm)
    llm.close()


@pytest.mark.parametrize("end", ["kill", pytest.param("rank", marks=pytest.mark.full)])
def test_nothing_is_left_in_the_temporary_folder_whoever_is_killed(end: str, make_folder, tmp_path) -> None:
    code = (
        "import sys\nfrom tandem.engine.llm import LLM\n"
        "llm = LLM(sys.argv[1], tensor_parallel_size=2, max_num_seqs=2)\n"
        "print(*(worker.pid for worker in llm.engine._ranks._workers), flush=True)\n"
        "sys.stdin.readline()\n"
        "try:\n    llm.generate({\"prompt_token_ids\": [1, 2]})\nexcept Exception as error:\n    print(error, flush=True)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    engine = subprocess.Popen(
        [sys.executable, "-c", code, str(make_folder())], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert engine.stdin is not None and engine.stdout is not None
        rank = int(engine.stdout.readline())
        os.kill(engine.pid if end == "kill" else rank, signal.SIGKILL)
        said = engine.communicate("\n", timeout=60)[0]
        assert end == "kill" or "rank 1 died" in said
        assert list(tmp_path.iterdir()) == []
    finally:
        engine.kill()
        engine.wait()


def test_a_closed_engine_leaves_no_process_and_says_so(make_folder) -> None:
    llm = start(make_folder())
    pids = pids_of(llm)
    llm.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RunError, match="is closed"):
        generate(llm)


def test_a_broken_model_is_the_line_that_one_rank_gives(make_folder, tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in make_folder().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="broken or truncated"):
        start(folder)


def test_what_cannot_be_cut_is_refused_before_anything_starts(make_folder) -> None:
    folder = make_folder()
    for settings, message in (
        ({"tensor_parallel_size": 3}, "num_attention_heads 4 is not divisible by 3 tensor-parallel ranks; choose another size"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"rank_timeout_s": 0}, "rank_timeout_s is 0"),
    ):
        with pytest.raises(UserError, match=message):
            start(folder, **settings)
