"""The engine on a device: the same bits with and without overlap, graphs, chunks and company, those of the trainer's forward, and transformers'
tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PackedContext
from tandem.model.decoder import Decoder
from tandem.model.families import qwen2_moe
from tandem.model.huggingface.model_folder import load_model, read_tensors, save_model
from tandem.model.initialise import initialise
from tandem.types import WeightVersion

pytestmark = pytest.mark.gpu
TRAITS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True}, "qwen3_moe": {"qk_norm": True, "experts": ExpertShapes(8, 2, 128)},
    "qwen3_next": {
        "qk_norm": True, "rotary_fraction": 0.25, "norms_from_one": True, "attention_gate": True,
        "linear_attention": LinearAttention((0, 1, 2), 4, 8, 128, 128, 4),
        "experts": ExpertShapes(8, 2, 128, names=qwen2_moe.NAMES, shared_intermediate_size=128, shared_gate=True),
    },
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [(7 * i * (p + 3)) % 2000 for i in range(1, length)]} for p, length in enumerate((3, 40, 700, 65, 1200))]
PARAMS = [
    SamplingParams(max_tokens=48, temperature=0.9, seed=i, top_p=0.95 if i % 2 else 1.0, top_k=50 * (i == 3), ignore_eos=True) for i in range(4)
] + [SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)]


@pytest.fixture(scope="module", params=TRAITS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets of weights of one model."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is found")
    shapes = ModelShapes(request.param, 2048, 512, 4, 8, 2, 64, 1536, 4096, tie_word_embeddings=True, **TRAITS[request.param])
    made = []
    for seed in range(2):
        decoder = Decoder(shapes, select("reference"))
        initialise(decoder, seed, standard_deviation=0.06)
        made.append(tmp_path_factory.mktemp("models") / str(seed))
        save_model(decoder, made[-1])
    return made


def llm_of(folder: Path, **settings: Any) -> LLM:
    settings = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 16, "max_model_len": 2048, "kv_cache_tokens": 16384, **settings}
    with torch.device("cpu"):
        return LLM(folder, **settings)


def generate(llm: LLM) -> list[list[CompletionOutput]]:
    with torch.device("cpu"):
        answers = llm.generate(PROMPTS, PARAMS, use_tqdm=False, request_keys=range(len(PROMPTS)))
        llm.engine.check_integrity()
    return [answer.outputs for answer in answers]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_around_a_request_changes_its_bits_and_the_trainer_has_them_too(folders: list[Path], dtype: str) -> None:
    expected = generate(llm_of(folders[0], dtype=dtype, async_scheduling=False))
    changes: list[dict[str, Any]] = [
        {}, {"enforce_eager": True}, {"max_num_batched_tokens": 100}, {"max_num_seqs": 2}, {"enable_prefix_caching": False},
        {"kv_cache_tokens": 2048, "preemption_mode": "swap", "swap_space": 2**-4},
    ]  # fmt: skip
    for change in changes:
        llm = llm_of(folders[0], dtype=dtype, **change)
        assert generate(llm) == expected, change
        assert generate(llm) == expected, f"{change}, warm and replayed"
    kernels, kind = select("triton"), getattr(torch, dtype)
    decoder = load_model(folders[0], kernels, dtype=kind, device="cuda")
    for prompt, outputs in zip(PROMPTS, expected, strict=True):
        tokens = prompt["prompt_token_ids"] + list(outputs[0].token_ids)
        count, start = len(tokens) - 1, len(prompt["prompt_token_ids"])
        context = PackedContext(torch.tensor([0, count], dtype=torch.int32), count)
        with torch.no_grad():
            hidden = decoder(torch.tensor(tokens[:-1]), torch.arange(count), context)
            scored = kernels.token_logprobs(hidden[start - 1 :], decoder.head_weight, torch.tensor(tokens[start:]), 1.0)
        assert scored.raw.tolist() == outputs[0].raw_logprobs


def test_greedy_tokens_are_those_of_transformers(folders: list[Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).to("cuda").eval()
    answers = generate(llm_of(folders[0], dtype="float32"))
    prompt = torch.tensor([PROMPTS[-1]["prompt_token_ids"]])
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, min_new_tokens=64, do_sample=False)
    assert list(answers[-1][0].token_ids) == theirs[0, prompt.shape[1] :].tolist()


def test_a_decoding_step_never_waits_for_the_device(folders: list[Path]) -> None:
    llm = llm_of(folders[0], enforce_eager=True)
    runner = llm.engine._runner
    generate(llm)
    index = torch.zeros(4, dtype=torch.int64) + runner.batch.on_device.padding
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            runner.decode(index, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs_are_replayed_and_made_anew_after_an_update(folders: list[Path]) -> None:
    llm = llm_of(folders[1])
    generate(llm)
    generate(llm)
    graphs = llm.engine._runner.graphs
    assert graphs is not None and graphs._graphs
    llm.update_weights(read_tensors(folders[0]), WeightVersion(0, 1))
    updated, expected = generate(llm), generate(llm_of(folders[0], async_scheduling=False))
    assert [c[0].token_ids for c in updated] == [c[0].token_ids for c in expected]
    assert [c[0].raw_logprobs for c in updated] == [c[0].raw_logprobs for c in expected]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "int4"])
def test_a_cache_of_codes_changes_no_bit_between_steps_and_chunks(folders: list[Path], kv_cache_dtype: str) -> None:
    expected = generate(llm_of(folders[0], kv_cache_dtype=kv_cache_dtype, async_scheduling=False))
    assert generate(llm_of(folders[0], kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=100)) == expected


def test_the_fast_mode_is_near_the_deterministic_one(folders: list[Path]) -> None:
    exact, fast = generate(llm_of(folders[0], dtype="float32")), generate(llm_of(folders[0], dtype="float32", deterministic=False))
    assert fast[-1][0].raw_logprobs[:4] == pytest.approx(exact[-1][0].raw_logprobs[:4], abs=1e-3)
