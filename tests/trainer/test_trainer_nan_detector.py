"""The NaN detector locates a poisoned value and changes no bit."""

import math

import pytest
import torch

from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.nan_detector import BadGradient, NanDetector, Place
from tandem.trainer.step import LossShare, no_pipelining
from tandem.types import TrainSequence

RARE = 40
"""A token that stands in one place only."""


def sequences():
    generator = torch.Generator().manual_seed(4)
    found = []
    for number, length in enumerate((7, 9, 5, 12)):
        ids = torch.randint(0, RARE, (length,), generator=generator).tolist()
        if number == 3:
            ids[4] = RARE
        found.append(TrainSequence(f"s{number}", tuple(ids), 1, (0.0,) + (1.0,) * (length - 1)))
    return found


def micro_batches(dtype=torch.float64):
    found = sequences()
    return [collate(found[:2], dtype), collate(found[2:], dtype)]


def watched(model, loss=None):
    watch = NanDetector(model)
    passed = watch.forward_backward(micro_batches(model.dtype), loss or make_cross_entropy_loss(counts_of(sequences())), scale=2.0)
    return watch.findings, passed


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_watched_pass_has_the_bits_of_one_that_is_not(recompute, kernels, make_model):
    model, other = (make_model(torch.float32, kernels=kernels) for _ in range(2))
    model.recompute = other.recompute = recompute
    found, passed = watched(model)
    wanted = no_pipelining(other)(micro_batches(torch.float32), make_cross_entropy_loss(counts_of(sequences())), scale=2.0)
    assert passed == wanted and not (found.forward or found.backward or found.gradients)
    assert math.isclose(sum(found.losses), wanted.loss) and model.around_layer is None
    for (name, parameter), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert parameter.grad is not None and twin.grad is not None and torch.equal(parameter.grad, twin.grad), name


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_infinite_row_of_the_embedding_is_found_at_the_one_token_that_reads_it(recompute, make_model):
    model = make_model()
    model.recompute = recompute
    # Not tied to the head, which every row passes.
    model.lm_head = torch.nn.Linear(32, 41, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.embed_tokens[RARE, 3] = math.inf
    found, _ = watched(model)
    assert found.forward[0] == Place("the embedding", -1, 1, "s3", 4, math.inf)
    # Earlier tokens and other sequences are not affected.
    assert all((place.micro_batch, place.sequence, place.position) == (1, "s3", 4) for place in found.forward)
    assert [place.what for place in found.forward[-3:]] == ["layer 1, attention", "layer 1, MLP", "log-probabilities"]
    assert math.isfinite(found.losses[0]) and not math.isfinite(found.losses[1])
    assert found.gradients and all(gradient.micro_batch == 1 for gradient in found.gradients.values())


def test_weight_that_is_not_a_number_is_found_in_its_layer_and_half(make_model):
    model = make_model()
    with torch.no_grad():
        model.layers[1].down_proj.weight[5, 5] = math.nan
    found, _ = watched(model)
    first = found.forward[0]
    assert (first.what, first.layer, first.micro_batch, first.sequence, first.position) == ("layer 1, MLP", 1, 0, "s0", 0)
    assert math.isnan(first.value) and {place.layer for place in found.forward} == {1, 2}


def test_value_head_that_is_not_a_number_is_found_in_its_values(make_model):
    model = make_model(value_head="token", language_head=False, tie_word_embeddings=False)
    with torch.no_grad():
        model.score.weight[0, 2] = math.nan
    found, _ = watched(model, lambda outputs, rows: LossShare(outputs.values.square().sum(), {}, {}))
    assert {place.what for place in found.forward} == {"values"}
    assert (found.forward[0].layer, found.forward[0].sequence, found.forward[0].position) == (2, "s0", 0)


def test_gradient_that_overflows_in_one_micro_batch_is_found_where_the_backward_begins(make_model):
    model, plain = make_model(), make_cross_entropy_loss(counts_of(sequences()))

    def loss(logprobs, rows):
        share = plain(logprobs, rows)
        return share._replace(loss=share.loss * (math.inf if "s3" in rows.ids else 1.0))

    found, _ = watched(model, loss)
    assert not found.forward and math.isfinite(found.losses[0])
    assert (found.backward[0].what, found.backward[0].micro_batch) == ("layer 1, MLP", 1)
    norm = model.norm.weight
    assert found.gradients["norm.weight"] == BadGradient(1, norm.numel(), norm.numel())
