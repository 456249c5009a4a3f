"""On-policy distillation: its advantages by hand, and its loss in expectation against the reverse KL to the teacher, enumerated over a vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.kernels.api import TokenLogprobs
from tandem.model.head_outputs import HeadOutputs
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.algorithms.distillation import distillation_advantages
from tandem.rl.algorithms.loss import make_policy_loss
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.micro_batch import collate
from tandem.types import FinishReason, Sample, Score, ScoreState, WeightVersion

VERSION = WeightVersion(1, 0)


def sample(name: str, tokens: tuple[int, ...], logprobs: tuple[float, ...], response_mask: tuple[bool, ...] = ()) -> Sample:
    return Sample(
        id=f"{name}/0", prompt_id=name, index=0, prompt_token_ids=(5, 6), token_ids=tokens, logprobs=logprobs, sampling_logprobs=logprobs,
        weight_versions=tuple(None if response_mask and not sampled else VERSION for sampled in response_mask or (True,) * len(tokens)),
        finish_reason=FinishReason.STOP, text="", response_mask=response_mask,
    )  # fmt: skip


def test_the_advantage_of_a_token_is_what_the_teacher_thinks_more_of_it() -> None:
    found = distillation_advantages(torch.tensor([-1.0, -0.5, -3.0]), torch.tensor([-0.25, -2.0, -90.0]))
    assert found.tolist() == [0.75, -1.5, -20.0]


def test_rewards_and_other_samples_have_no_part_in_it_but_a_fault_masks_its_sample() -> None:
    config = AlgorithmConfig(name="distillation", group_size=1)
    # The second token of the second sample is an observation.
    samples = [sample("a", (1, 2), (-1.0, -2.0)), sample("b", (3, 4, 5), (-0.5, 0.0, -1.0), (True, False, True)), sample("c", (1,), (-1.0,))]
    scores = [Score("a/0", ScoreState.NUMBER, 7.0), Score("b/0", ScoreState.NUMBER, 0.0), Score("c/0", ScoreState.INFRASTRUCTURE_FAULT, None)]
    teacher = {"a/0": (0.0, -9.0, -0.5, -3.0), "b/0": (0.0, -9.0, -1.5, -7.0, -0.25), "c/0": (0.0, -9.0, -0.5)}
    batch = make_batch(0, samples, scores, config, 8, teacher)
    assert [sequence.advantages for sequence in batch.sequences] == [(0, 0, 0.5, -1.0), (0, 0, -1.0, 0, 0.75), (0, 0, 0.5)]
    assert [sequence.loss_mask for sequence in batch.sequences] == [(0, 0, 1, 1), (0, 0, 1, 0, 1), (0, 0, 0)]


@pytest.mark.parametrize("policy_loss", ["clip", "cispo"])
def test_the_loss_has_the_gradient_of_the_reverse_kl_in_expectation(policy_loss: str) -> None:
    """Every token of a vocabulary of 5 at one state, each weighted by its probability, against autograd of the sum over the vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits, teacher = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    theirs = teacher.log_softmax(0)
    config = AlgorithmConfig(name="distillation", group_size=1, policy_loss=policy_loss)  # type: ignore[arg-type]

    student = logits.clone().requires_grad_()
    ours = student.log_softmax(0)
    (ours.exp() * (ours - theirs)).sum().backward()
    wanted = student.grad
    assert wanted is not None and wanted.abs().max() > 0.1

    found = torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        student = logits.clone().requires_grad_()
        ours = student.log_softmax(0)
        drawn = [sample("a", (token,), (ours[token].item(),))]
        batch = make_batch(0, drawn, [Score("a/0", ScoreState.NUMBER, 0.0)], config, 8, {"a/0": (0.0, 0.0, theirs[token].item())})
        rows = collate(batch.sequences, torch.float64)
        share = make_policy_loss(config, counts_of(batch.sequences), 1.0)(_outputs(ours[token]), rows)
        share.loss.backward()
        assert student.grad is not None
        found += ours[token].exp().item() * student.grad
        assert share.sums["kl"].item() == pytest.approx(math.expm1((theirs - ours)[token].item()) - (theirs - ours)[token].item())
    torch.testing.assert_close(found, wanted)


def _outputs(logprob: Tensor) -> HeadOutputs:
    one = logprob.reshape(1)
    return HeadOutputs(TokenLogprobs(one, one, torch.zeros(1, dtype=torch.float64)))
