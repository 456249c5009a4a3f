"""Policy losses, KL estimators, importance weights and aggregations against cases worked by hand and gradient
checks."""

import math

import pytest
import torch

from tandem.rl.algorithms.importance import truncated_importance
from tandem.rl.algorithms.kl import kl_estimate, mismatch_k3
from tandem.rl.algorithms.policy_loss import log_ratios, policy_loss
from tandem.trainer.losses.aggregate import GlobalCounts, row_weights, weighted_sum

LOG2 = math.log(2)


def real(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def rows(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_clipped_policy_loss_equals_the_case_worked_by_hand():
    # clip to [0.8, 1.3]. rho = 2, A = 1: -min(2, 1.3) = -1.3, clipped. rho = 1/2, A = 1: -min(0.5, 0.8) = -0.5.
    # rho = 2, A = -1: -min(-2, -1.3) = 2. rho = 1/2, A = -1: -min(-0.5, -0.8) = 0.8, clipped. rho = 1, A = 3: -3.
    found = policy_loss(real(LOG2, -LOG2, LOG2, -LOG2, 0.0), real(1, 1, -1, -1, 3), 0.2, 0.3, None)
    torch.testing.assert_close(found.values, real(-1.3, -0.5, 2.0, 0.8, -3.0))
    assert found.clipped.tolist() == [1, 0, 0, 1, 0]
    torch.testing.assert_close(found.kl, real(-LOG2, LOG2, -LOG2, LOG2, 0.0))


def test_clipped_rows_have_no_gradient_and_others_that_of_the_ratio():
    # d(-rho A)/d(log rho) = -rho A where the clip does not bind.
    log_ratio = real(LOG2, -LOG2, LOG2, -LOG2, 0.0, grad=True)
    policy_loss(log_ratio, real(1, 1, -1, -1, 3), 0.2, 0.3, None).values.sum().backward()
    torch.testing.assert_close(log_ratio.grad, real(0, -0.5, 2, 0, -3))


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    # rho = 8, A = -1: max(8, 1.2) = 8, bounded by 3. rho = 8, A = 1: -min(8, 1.2) = -1.2. rho = 2, A = -1: 2 < 3 stays.
    log_ratio = real(3 * LOG2, 3 * LOG2, LOG2, grad=True)
    found = policy_loss(log_ratio, real(-1, 1, -1), 0.2, 0.2, 3.0)
    torch.testing.assert_close(found.values.detach(), real(3, -1.2, 2))
    found.values.sum().backward()
    torch.testing.assert_close(log_ratio.grad, real(0, 0, 2))


def test_log_ratios_are_clamped_to_twenty_nats():
    found = log_ratios(real(-1, -90), real(-60, -1), real(1, 1), rows(0, 1), 2, "token")
    assert found.tolist() == [20, -20]


def test_the_sequence_ratio_is_the_mean_log_ratio_with_the_gradient_of_each_token():
    # Sequence 0: differences 0.3 and -0.1, mean 0.1. Sequence 1: 0.6 alone. GSPO-token, equation 15: the gradient of a
    # row is exp(mean) times that of its own log-probability.
    new, old = real(-0.7, -1.1, -0.4, grad=True), real(-1.0, -1.0, -1.0)
    found = log_ratios(new, old, real(1, 1, 1), rows(0, 0, 1), 2, "sequence")
    torch.testing.assert_close(found.detach(), real(0.1, 0.1, 0.6))
    found.exp().sum().backward()
    torch.testing.assert_close(new.grad, real(math.exp(0.1), math.exp(0.1), math.exp(0.6)))


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # D = log pi - log pi_ref = log 2: k1 = D; k2 = D^2 / 2, its gradient D; k3 = 1/2 - 1 + log 2, its gradient
        # 1 - 1/2.
        ("k1", LOG2, 1.0),
        ("k2", LOG2**2 / 2, LOG2),
        ("k3", LOG2 - 0.5, 0.5),
        ("k3+", LOG2 - 0.5, LOG2),
    ],
)
def test_kl_estimators_have_the_value_and_the_gradient_worked_by_hand(estimator, value, gradient):
    logprobs = real(-1.0, grad=True)
    found = kl_estimate(logprobs, real(-1.0 - LOG2), estimator)
    found.sum().backward()
    assert found.item() == pytest.approx(value, rel=1e-14)
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_itself_as_expectation(estimator):
    # Over a whole vocabulary of three the expectation under pi is a finite sum.
    policy, reference = real(0.5, 0.3, 0.2), real(0.2, 0.2, 0.6)
    exact = (policy * (policy / reference).log()).sum()
    found = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=0)


def test_k2_and_k3_plus_have_the_gradient_of_the_kl_in_expectation():
    logits, reference = real(0.3, -0.4, 1.1, grad=True), real(0.2, 0.2, 0.6)
    policy = logits.softmax(0)
    (wanted,) = torch.autograd.grad((policy * (policy.log() - reference.log())).sum(), logits)
    for estimator in ("k2", "k3+"):
        logprobs = logits.log_softmax(0)
        (found,) = torch.autograd.grad(
            (policy.detach() * kl_estimate(logprobs, reference.log(), estimator)).sum(), logits
        )
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradients_agree_with_differences(estimator):
    logprobs, reference = real(-0.2, -1.7, -3.0, grad=True), real(-0.9, -1.2, -2.5)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator), (logprobs,))


def test_mismatch_is_exactly_zero_for_equal_bits_and_k3_otherwise():
    values = torch.tensor([-0.1, -17.25, -3.3e-7])
    assert mismatch_k3(values, values.clone()).tolist() == [0.0, 0.0, 0.0]
    # D = log 2: exp(D) - 1 - D = 1 - log 2.
    assert mismatch_k3(real(-1.0), real(-1.0 - LOG2)).item() == pytest.approx(1 - LOG2, rel=1e-14)


def test_importance_weights_are_truncated_at_the_cap_and_carry_no_gradient():
    # pi_old / mu: 4 -> 2 (cap), 1/2, 1.
    old = real(-1 + 2 * LOG2, -1 - LOG2, -1, grad=True)
    found = truncated_importance(old, real(-1, -1, -1), real(1, 1, 1), rows(0, 0, 1), 2, "token", 2.0)
    torch.testing.assert_close(found, real(2, 0.5, 1))
    assert not found.requires_grad


def test_sequence_importance_is_the_product_over_the_sequence():
    # Sequence 0: 4 * 1/2 = 2 -> 1.5 (cap). Sequence 1: 1/4 * 2 = 1/2.
    old = real(2 * LOG2, -LOG2, -2 * LOG2, LOG2)
    found = truncated_importance(old, real(0, 0, 0, 0), real(1, 1, 1, 1), rows(0, 0, 1, 1), 2, "sequence", 1.5)
    torch.testing.assert_close(found, real(1.5, 1.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("loss_agg_mode", "wanted"),
    [
        # Sequence 0 has tokens 1, 2, 3, sequence 1 has 10; two sequences, four tokens, constant 5.
        ("token-mean", 16 / 4),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 5),
    ],
)
def test_aggregations_equal_the_case_worked_by_hand(loss_agg_mode, wanted):
    counts = GlobalCounts(tokens=4, sequences=2, length_constant=5)
    weights = row_weights(loss_agg_mode, real(1, 1, 1, 1), rows(0, 0, 0, 1), real(3, 1), counts)
    assert weighted_sum(real(1, 2, 3, 10), weights).item() == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize(
    "loss_agg_mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_shares_of_micro_batches_add_up_to_the_loss_of_the_whole(loss_agg_mode):
    counts = GlobalCounts(tokens=4, sequences=2, length_constant=5)
    values = real(1, 2, 3, 10)
    whole = weighted_sum(values, row_weights(loss_agg_mode, real(1, 1, 1, 1), rows(0, 0, 0, 1), real(3, 1), counts))
    first = weighted_sum(values[:3], row_weights(loss_agg_mode, real(1, 1, 1), rows(0, 0, 0), real(3), counts))
    second = weighted_sum(values[3:], row_weights(loss_agg_mode, real(1), rows(0), real(1), counts))
    assert (first + second).item() == pytest.approx(whole.item(), rel=1e-15)
