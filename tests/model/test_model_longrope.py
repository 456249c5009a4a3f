"""LongRoPE: one table of rotary frequencies for all sequences of a run, chosen by its context, and what transformers computes with that table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.layout.parameters import parameter_count
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface.model_folder import load_model, read_shapes, save_model
from tandem.planner.model_sizes import read_model_sizes
from tandem.text.characters import make_character_tokenizer
from tandem.types import UserError

SHORT = 32
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 9.0, 16.0, 30.0]}
KEYS: dict[str, Any] = {
    "hidden_size": 64, "head_dim": 16, "tie_word_embeddings": True, "partial_rotary_factor": 0.75, "original_max_position_embeddings": SHORT,
    "sliding_window": 512,
}  # fmt: skip
"""Those of Phi-4-mini."""
SEQUENCES = [torch.randint(3, 40, (n,), generator=torch.Generator().manual_seed(n)) for n in (31, 2, 17)]
LONG = torch.randint(3, 40, (70,), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def peer(peer_model: Callable[..., Any], tmp_path: Path) -> Any:
    made = peer_model("phi3", vocab_size=40, rope_scaling={"type": "longrope", **FACTORS}, **KEYS)
    made.save_pretrained(tmp_path / "model")
    make_character_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789", tmp_path / "model")
    # The keys as Microsoft's folders have them, with some that change nothing.
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    further = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "rope_theta": 1e4}
    path.write_text(json.dumps({**config, **KEYS, **further, "rope_scaling": {"type": "longrope", **FACTORS}}))
    return made


@pytest.fixture
def always_long(peer: Any, peer_model: Callable[..., Any]) -> Any:
    """The model with its long frequencies for short sequences too."""
    factors = {"short_factor": FACTORS["long_factor"], "long_factor": FACTORS["long_factor"]}
    return peer_model("phi3", vocab_size=40, rope_scaling={"type": "longrope", **factors}, **KEYS)


def logits_of(decoder: Decoder, sequences: list[Tensor]) -> Tensor:
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    with torch.no_grad():
        return decoder.logits(decoder(torch.cat(sequences), positions, PackedContext(bounds, max(map(len, sequences)))))


def peer_logits(peer: Any, sequences: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([peer(s.unsqueeze(0)).logits[0] for s in sequences])


def test_a_run_of_short_sequences_has_the_short_frequencies_and_one_with_longer_ones_the_long(peer: Any, always_long: Any, tmp_path: Path) -> None:
    decoder = load_model(tmp_path / "model", select("cpu"))
    assert (decoder.positions, decoder.shapes.rotated_size) == (SHORT, 12)
    assert (logits_of(decoder, SEQUENCES) - peer_logits(peer, SEQUENCES)).abs().max() < 1e-4
    with pytest.raises(ValueError, match="a sequence of 70 tokens is longer than the model's 32 positions"):
        logits_of(decoder, [LONG])
    decoder.use_context(SHORT + 1)
    assert (logits_of(decoder, [LONG]) - peer_logits(peer, [LONG])).abs().max() < 1e-4
    short = logits_of(decoder, SEQUENCES)
    assert (short - peer_logits(always_long, SEQUENCES)).abs().max() < 1e-4
    assert (short - peer_logits(peer, SEQUENCES)).abs().max() > 1e-2
    # The company of a longer sequence changes no bit.
    assert torch.equal(logits_of(decoder, [*SEQUENCES, LONG])[: len(short)], short)
    decoder.use_context(SHORT)
    assert (logits_of(decoder, SEQUENCES) - peer_logits(peer, SEQUENCES)).abs().max() < 1e-4


@pytest.mark.parametrize("context", [None, 100])
def test_the_engine_draws_transformers_greedy_tokens_by_the_frequencies_of_its_context(
    context: int | None, peer: Any, always_long: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, truth = ([SEQUENCES[2].tolist()], peer) if context is None else ([s.tolist() for s in (*SEQUENCES, LONG)], always_long)
    with LLM(str(tmp_path / "model"), dtype="float32", max_model_len=context, kv_cache_tokens=512) as llm:
        assert llm.engine.settings.max_model_len == (context or SHORT)
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        likeliest = peer_logits(truth, [torch.tensor(prompt + tokens)]).argmax(-1)
        assert tokens == likeliest[len(prompt) - 1 : -1].tolist()
    told = [record.getMessage() for record in caplog.records if "longrope" in record.getMessage()]
    assert len(told) == (context is not None)
    assert all("max_model_len 100 is above the 32 tokens" in line and "set max_model_len to 32 or less" in line for line in told)


def test_kv_blocks_with_short_frequencies_are_not_those_with_long_ones(peer: Any, tmp_path: Path) -> None:
    layouts = []
    for context in (SHORT, 100):
        with LLM(str(tmp_path / "model"), dtype="float32", max_model_len=context, kv_cache_tokens=512, digest_weights=True) as llm:
            layouts.append(llm.engine.block_exchange().layout)
    with pytest.raises(UserError, match=f"positions is {layouts[1].positions} there and {SHORT} here"):
        layouts[0].check_equal(layouts[1])


def test_a_prompt_beyond_the_short_frequencies_is_told_what_to_raise(peer: Any, tmp_path: Path) -> None:
    told = r"max_model_len \(32\).* raise max_model_len"
    with LLM(str(tmp_path / "model"), dtype="float32", kv_cache_tokens=512) as llm, pytest.raises(UserError, match=told):
        llm.generate([{"prompt_token_ids": LONG.tolist()}], SamplingParams(max_tokens=2))


@pytest.mark.full
def test_two_ranks_have_the_frequencies_of_one(peer: Any, tmp_path: Path) -> None:
    asked, params = [{"prompt_token_ids": s.tolist()} for s in (*SEQUENCES, LONG)], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    drawn = []
    for size in (1, 2):
        with LLM(str(tmp_path / "model"), dtype="float32", max_model_len=100, kv_cache_tokens=512, tensor_parallel_size=size) as llm:
            drawn.append([(answer.outputs[0].token_ids, answer.outputs[0].logprobs) for answer in llm.generate(asked, params)])
    assert drawn[0] == drawn[1]


def test_the_folder_goes_there_and_back_and_is_planned(peer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = load_model(tmp_path / "model", select("reference"))
    decoder.use_context(100)
    save_model(decoder, tmp_path / "ours", eos_token_id=2)
    assert read_shapes(tmp_path / "ours") == read_shapes(tmp_path / "model") == read_model_sizes(tmp_path / "model")
    returned = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    for sequences in (SEQUENCES, [LONG]):
        assert torch.equal(peer_logits(returned, sequences), peer_logits(peer, sequences))
    # What transformers 4 demands of Phi-3's key, beside the context that is outside of it.
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["rope_scaling"].keys() == {"type", "short_factor", "long_factor"} and written["original_max_position_embeddings"] == SHORT
    assert parameter_count(read_model_sizes(tmp_path / "model")) == peer.num_parameters()
