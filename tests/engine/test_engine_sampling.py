"""Random numbers against plain integers, and sampled tokens against the closed form of their distribution."""

import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import with_kernels

from tandem.engine.core.request import random_key
from tandem.engine.llm import LLM
from tandem.engine.sample.logprobs import top_logprobs
from tandem.engine.sample.random_numbers import uniforms
from tandem.engine.sample.sampling_params import SamplingParams

WORD = (1 << 64) - 1


def splitmix64(seed: int, count: int) -> list[int]:
    """Vigna's reference implementation, transcribed."""
    state, out = seed & WORD, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        out.append(z ^ (z >> 31))
    return out


def test_uniforms_are_the_splitmix64_stream_of_their_key() -> None:
    # The first outputs for seed 1234567, as published with the generator.
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]
    for key in (0, -1, 1234567, -(1 << 63), (1 << 63) - 1):
        expected = [(z >> 11) * 2.0**-53 for z in splitmix64(key, 50)]
        assert uniforms(torch.full((50,), key), torch.arange(50)).tolist() == expected


def test_a_uniform_does_not_depend_on_the_rows_beside_it() -> None:
    keys = torch.tensor([random_key(0, request, index) for request in range(20) for index in range(5)])
    positions = torch.arange(100)
    together = uniforms(keys, positions)
    alone = torch.cat([uniforms(keys[i : i + 1], positions[i : i + 1]) for i in range(100)])
    assert torch.equal(together, alone)


def test_near_keys_and_positions_draw_independent_numbers() -> None:
    keys = torch.tensor([random_key(seed, request, index) for seed in range(4) for request in range(50) for index in range(5)])
    drawn = torch.stack([uniforms(keys, torch.full_like(keys, position)) for position in range(20)])
    assert bool((drawn >= 0).all() and (drawn < 1).all()) and len(drawn.unique()) == drawn.numel()
    counts = torch.histc(drawn.float(), bins=50, min=0, max=1)
    expected = drawn.numel() / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < 49 + 4 * math.sqrt(2 * 49)
    correlations = torch.corrcoef(drawn).fill_diagonal_(0).abs()
    assert float(correlations.max()) < 5 / math.sqrt(len(keys))


def filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Returns the sampling distribution of one row in float64: temperature, min-p, top-k, top-p, each applied to the result of the previous
    one."""
    p = torch.softmax(logits.double() / temperature, 0)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    if top_k:
        p = torch.where(p >= p.topk(top_k).values[-1], p, 0.0)
    p = p / p.sum()
    ordered, order = p.sort(descending=True)
    kept = ordered.cumsum(0) - ordered < top_p
    p = torch.zeros_like(p).scatter(0, order, torch.where(kept, ordered, 0.0))
    return p / p.sum()


@with_kernels(
    {
        "plain": (1.0, 0, 1.0, 0.0), "cold": (0.7, 0, 1.0, 0.0), "top-k": (2.0, 5, 1.0, 0.0), "top-p": (1.0, 0, 0.8, 0.0), "min-p": (1.5, 0, 1.0, 0.1),
        "all": (1.3, 20, 0.9, 0.02),
    },
    quick=["all"],
)  # fmt: skip
def test_first_tokens_follow_the_closed_form(
    make_llm: Callable[..., LLM], settings: tuple[float, int, float, float], kernels: str
) -> None:
    temperature, top_k, top_p, min_p = settings
    llm = make_llm(kernels=kernels, max_num_seqs=512, max_num_batched_tokens=512)
    params = SamplingParams(
        n=3000, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_tokens=1, seed=5, logprobs=40, detokenize=False
    )
    (answer,) = llm.generate("a prompt of some length", params)
    raw = answer.outputs[0].logprobs
    assert raw is not None and len(raw[0]) == 40
    logits = torch.tensor([raw[0][token].logprob for token in range(40)])
    expected = filtered(logits, temperature, top_k, top_p, min_p)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in answer.outputs]), minlength=40).double()
    assert not bool(counts[expected == 0].any())
    common = expected * 3000 >= 5
    observed = torch.cat((counts[common], counts[~common].sum().reshape(1)))
    hoped = torch.cat((expected[common], expected[~common].sum().reshape(1))) * 3000
    chi_square = float(((observed - hoped) ** 2 / hoped.clamp_min(1e-9)).sum())
    freedom = int(common.sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4
    for completion in answer.outputs[:200]:
        token = completion.token_ids[0]
        assert completion.raw_logprobs[0] == pytest.approx(float(logits[token]), abs=1e-5)
        assert completion.sampling_logprobs[0] == pytest.approx(float(expected[token].log()), abs=1e-4)


def test_top_logprobs_come_ranked_with_the_drawn_token_among_them() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 0.0, -1.0]])
    expected = logits.double().log_softmax(-1)
    tokens = torch.tensor([0, 1])
    raw = expected.gather(1, tokens.unsqueeze(1)).squeeze(1).float()
    first, second = top_logprobs(logits, tokens, raw, [2, 1])
    assert [(token, rank) for token, _, rank in first] == [(1, 1), (3, 2), (0, 4)]
    assert [value for _, value, _ in first] == pytest.approx([float(expected[0, t]) for t in (1, 3, 0)], abs=1e-6)
    assert [(token, rank) for token, _, rank in second] == [(0, 1), (1, 1)]
