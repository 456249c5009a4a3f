"""Sampling: the right distribution, vLLM's filters, and the log-probabilities that go with them."""

import math

import pytest
import torch
from torch import Tensor

from tandem.kernels import Kernels, SampledRows

VOCABULARY = 53


def draw(
    kernels: Kernels, logits: Tensor, uniform: Tensor, temperature: float = 1, top_k: int = 0, top_p: float = 1,
    min_p: float = 0,
) -> SampledRows:  # fmt: skip
    ones = torch.ones(len(logits))
    return kernels.sample_rows(
        logits, ones * temperature, ones.long() * top_k, ones * top_p, ones * min_p, uniform.double()
    )


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Returns the log-probabilities of one row [V] in float64, applying one rule after the other."""
    scaled = logits.double() / temperature
    scaled[scaled.softmax(0) < min_p * scaled.softmax(0).max()] = -math.inf
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i].item(), i))
    kept = [i for i in order if scaled[i] > -math.inf][: top_k or None]
    probabilities = scaled[kept].softmax(0).tolist()
    mass, nucleus = 0.0, []
    for token, probability in zip(kept, probabilities, strict=True):
        if mass >= top_p:
            break
        nucleus.append(token)
        mass += probability
    out = torch.full_like(scaled, -math.inf)
    out[nucleus] = scaled[nucleus].log_softmax(0)
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1, 0, 1, 0), (0.6, 0, 1, 0), (0.8, 5, 1, 0), (1.3, 0, 0.7, 0), (1, 0, 1, 0.1), (0.9, 9, 0.8, 0.02), (1, 1, 1, 0)],
)
def test_tokens_are_drawn_from_the_filtered_distribution_in_id_order(
    kernels: Kernels, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.randn(VOCABULARY) * 2
    count = 4001
    # Evenly spread uniforms invert the cumulative distribution exactly.
    uniform = (torch.arange(count).double() + 0.5) / count
    drawn = draw(kernels, row.expand(count, -1), uniform, temperature, top_k, top_p, min_p)
    expected = filtered(row, temperature, top_k, top_p, min_p)
    assert torch.equal(drawn.tokens, drawn.tokens.sort().values)
    frequency = torch.bincount(drawn.tokens, minlength=VOCABULARY) / count
    assert (frequency - expected.exp()).abs().max() < 1.01 / count
    assert torch.allclose(drawn.sampling.double(), expected[drawn.tokens], atol=2e-6)
    assert torch.allclose(drawn.raw.double(), row.double().log_softmax(0)[drawn.tokens], atol=2e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.9, 0), (0, 0.35, 0), (500, 1, 0), (500, 0.8, 0), (90, 0.8, 0), (0, 0.99, 0.02)]
)
def test_filters_of_a_large_vocabulary_with_many_equal_logits_are_exact(
    kernels: Kernels, top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.randn(1200).mul(4).round() / 4
    count = 2501
    uniform = (torch.arange(count).double() + 0.5) / count
    drawn = draw(kernels, row.expand(count, -1), uniform, 0.9, top_k, top_p, min_p)
    expected = filtered(row, 0.9, top_k, top_p, min_p)
    frequency = torch.bincount(drawn.tokens, minlength=len(row)) / count
    assert (frequency - expected.exp()).abs().max() < 1.01 / count
    assert torch.allclose(drawn.sampling.double(), expected[drawn.tokens], atol=3e-6)


def test_a_nucleus_of_equal_logits_is_the_lowest_ids(kernels: Kernels) -> None:
    uniform = torch.arange(5000) / 5000
    tokens = draw(kernels, torch.zeros(5000, 1000), uniform, top_p=0.2505).tokens
    assert tokens.unique().tolist() == list(range(251))


def test_a_nucleus_of_nothing_is_the_most_likely_token(kernels: Kernels) -> None:
    logits = torch.randn(20, 1000)
    assert torch.equal(draw(kernels, logits, torch.rand(20), top_p=1e-9).tokens, logits.argmax(1))


def test_greedy_takes_the_lowest_id_among_equals(kernels: Kernels) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 17] = logits[1, 30] = 5
    logits[2, 39] = 1
    drawn = draw(kernels, logits, torch.full((3,), 0.9), temperature=0)
    assert drawn.tokens.tolist() == [0, 17, 39]
    assert drawn.sampling.tolist() == [0, 0, 0]
    assert torch.allclose(drawn.raw, logits.log_softmax(1)[range(3), drawn.tokens], atol=1e-6)


def test_equal_logits_at_the_top_k_threshold_keep_the_lowest_ids(kernels: Kernels) -> None:
    uniform = torch.arange(100) / 100
    assert draw(kernels, torch.zeros(100, 30), uniform, top_k=3).tokens.unique().tolist() == [0, 1, 2]


def test_a_forbidden_token_is_never_drawn(kernels: Kernels) -> None:
    logits = torch.zeros(2, 20)
    logits[:, :3] = logits[:, 17:] = -math.inf
    drawn = draw(kernels, logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert drawn.tokens.tolist() == [3, 16]


def test_the_ends_of_the_unit_interval_stay_inside_the_vocabulary(kernels: Kernels) -> None:
    for width in (1, 15, 16, 17, 1000):
        logits = torch.randn(64, width) * 10
        for end in (0.0, 1 - 2**-53):
            drawn = draw(kernels, logits, torch.full((64,), end, dtype=torch.float64))
            assert drawn.tokens.min() >= 0
            assert drawn.tokens.max() < width
            assert drawn.sampling.isfinite().all()


def test_a_nucleus_larger_than_the_first_sorted_part_is_whole(kernels: Kernels) -> None:
    row = torch.randn(5000) * 0.1
    count = 500
    uniform = (torch.arange(count).double() + 0.5) / count
    drawn = draw(kernels, row.expand(count, -1), uniform, top_p=0.9)
    expected = filtered(row, 1, 0, 0.9, 0)
    assert expected.isfinite()[drawn.tokens].float().mean() > 0.999
    assert torch.allclose(drawn.sampling.double(), expected[drawn.tokens].clamp_min(-20), atol=1e-3)


def test_a_row_of_nan_says_so_and_names_a_real_token(kernels: Kernels) -> None:
    drawn = draw(kernels, torch.full((1, 20), math.nan), torch.tensor([0.5]))
    assert 0 <= drawn.tokens.item() < 20
    assert drawn.raw.isnan().all()
