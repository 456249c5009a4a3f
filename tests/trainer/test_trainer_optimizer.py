"""AdamW and clipping against closed forms and torch; learning-rate schedules against closed forms."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.lr_schedule import learning_rate
from tandem.trainer.optimizers.adamw import AdamW, OptimizerState
from tandem.types import UserError

CONFIG = TrainerConfig(learning_rate=0.01, beta1=0.9, beta2=0.99, epsilon=1e-6, weight_decay=0.1, max_grad_norm=1.0)


def parameters(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {"weight": (5, 7), "norm.weight": (7,), "bias": (5,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in made.items()}


def gradients(held, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in held.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def test_adamw_equals_the_published_update_over_several_steps():
    held = parameters()
    optimizer = AdamW(held.items(), CONFIG)
    wanted = {name: p.detach().clone() for name, p in held.items()}
    first = {name: torch.zeros_like(p) for name, p in wanted.items()}
    second = {name: torch.zeros_like(p) for name, p in wanted.items()}
    for step in range(1, 5):
        gradients(held, seed=step)
        rate = 0.01 * step
        for name, value in wanted.items():
            gradient = held[name].grad
            decay = 0.1 if value.ndim == 2 else 0.0
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.99 * second[name] + 0.01 * gradient**2
            unbiased = first[name] / (1 - 0.9**step), second[name] / (1 - 0.99**step)
            wanted[name] = value - rate * decay * value - rate * unbiased[0] / (unbiased[1].sqrt() + 1e-6)
        optimizer.step(rate)
        for name, value in wanted.items():
            torch.testing.assert_close(held[name].detach(), value, rtol=1e-13, atol=1e-14)


def test_adamw_equals_torch_without_its_fused_kernel_in_float32():
    held, other = parameters(torch.float32), parameters(torch.float32)
    optimizer = AdamW(held.items(), replace(CONFIG, weight_decay=0.0))
    reference = torch.optim.AdamW(other.values(), lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.0, foreach=False)
    for step in range(5):
        gradients(held, step)
        gradients(other, step)
        optimizer.step(0.01)
        reference.step()
    for name in held:
        torch.testing.assert_close(held[name], other[name], rtol=1e-6, atol=1e-7)


def test_adamw_has_the_bits_of_torch_with_its_fused_kernel_and_goes_on_with_them_from_a_saved_state():
    held, other = parameters(torch.float32), parameters(torch.float32)
    optimizer = AdamW(held.items(), CONFIG)
    decayed, plain = [other["weight"]], [other["norm.weight"], other["bias"]]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-6, fused=True)
    for step in range(6):
        if step == 3:
            saved = OptimizerState({name: value.clone() for name, value in optimizer.state().moments.items()}, optimizer.state().updates)
            optimizer = AdamW(held.items(), CONFIG)
            optimizer.load_state(saved)
        gradients(held, step)
        gradients(other, step)
        optimizer.step(0.01)
        reference.step()
    assert all(torch.equal(held[name], other[name]) for name in held)


def test_norms_and_biases_are_not_decayed():
    held = parameters()
    before = {name: p.detach().clone() for name, p in held.items()}
    for parameter in held.values():
        parameter.grad = torch.zeros_like(parameter)
    AdamW(held.items(), CONFIG).step(0.01)
    torch.testing.assert_close(held["weight"].detach(), before["weight"] * (1 - 0.01 * 0.1), rtol=1e-15, atol=0)
    assert torch.equal(held["norm.weight"], before["norm.weight"])
    assert torch.equal(held["bias"], before["bias"])


def test_clipping_scales_all_gradients_to_the_asked_global_norm():
    held = parameters()
    for parameter, value in zip(held.values(), (3.0, 4.0, 12.0), strict=True):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[0] = value
    # The norm of (3, 4, 12) is 13.
    assert AdamW(held.items(), CONFIG).clip() == 13.0
    found = [p.grad.view(-1)[0].item() for p in held.values()]
    assert found == pytest.approx([3 / 13, 4 / 13, 12 / 13], rel=1e-15)


@pytest.mark.parametrize("limit", [0.0, 13.0, 100.0])
def test_clipping_leaves_gradients_alone_that_are_within_the_norm_or_where_it_is_off(limit):
    held = parameters()
    gradients(held, 1)
    before = {name: p.grad.clone() for name, p in held.items()}
    AdamW(held.items(), replace(CONFIG, max_grad_norm=limit)).clip()
    assert all(torch.equal(held[name].grad, value) for name, value in before.items())


@pytest.mark.parametrize(("bad", "norm"), [(math.inf, math.inf), (math.nan, math.nan)])
def test_a_gradient_that_is_not_finite_is_seen_in_the_norm(bad, norm):
    held = parameters()
    gradients(held, 1)
    held["bias"].grad[2] = bad
    found = AdamW(held.items(), CONFIG).clip()
    assert found == norm or (math.isnan(found) and math.isnan(norm))


def test_the_bits_of_a_step_do_not_depend_on_the_number_of_threads():
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(3)
            held = {"weight": nn.Parameter(torch.randn(700, 301, generator=generator))}
            optimizer = AdamW(held.items(), CONFIG)
            for step in range(2):
                gradients(held, step)
                norm = optimizer.clip()
                optimizer.step(0.01)
            results.append((norm, held["weight"].detach().clone()))
    finally:
        torch.set_num_threads(before)
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_a_state_read_back_goes_on_bit_for_bit():
    held, other = parameters(torch.float32), parameters(torch.float32)
    optimizer = AdamW(held.items(), CONFIG)
    for step in range(3):
        gradients(held, step)
        optimizer.step(0.01)
    second = AdamW(other.items(), CONFIG)
    second.load_state(optimizer.state())
    for name, parameter in other.items():
        parameter.data.copy_(held[name].data)
    for step in range(3, 6):
        for each, its in ((held, optimizer), (other, second)):
            gradients(each, step)
            its.step(0.02)
    assert second.updates == 6
    assert all(torch.equal(held[name], other[name]) for name in held)


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    held = parameters()
    optimizer = AdamW(held.items(), CONFIG)
    gradients(held, 0)
    optimizer.step(0.01)
    before = {name: tensor.clone() for name, tensor in optimizer.state().moments.items()}
    missing = {name: tensor for name, tensor in before.items() if name != "exp_avg/bias"}
    for wrong in (
        missing,
        before | {"exp_avg/other": before["exp_avg/bias"]},
        before | {"exp_avg/bias": torch.zeros(6)},
    ):
        with pytest.raises(ValueError, match=r"exp_avg/(bias|other)"):
            optimizer.load_state(OptimizerState(wrong, 9))
    assert optimizer.updates == 1
    assert all(torch.equal(optimizer.state().moments[name], tensor) for name, tensor in before.items())


def test_warm_up_rises_in_a_straight_line_to_the_full_rate():
    config = TrainerConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(config, step, 6) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert learning_rate(TrainerConfig(learning_rate=0.3), 0, 1) == 0.3


def test_the_linear_schedule_falls_in_a_straight_line_and_stays_at_its_end():
    config = TrainerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.2)
    # From 1 at step 2 to 0.2 at step 6: 0.2 less each step.
    assert [learning_rate(config, step, 6) for step in range(2, 9)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_the_cosine_schedule_follows_half_a_cosine():
    config = TrainerConfig(learning_rate=2.0, schedule="cosine")
    # 2 * (1 + cos(pi t / 4)) / 2 = 1 + cos(pi t / 4).
    wanted = [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0, 0.0]
    assert [learning_rate(config, step, 4) for step in range(6)] == pytest.approx(wanted)


def test_the_wsd_schedule_stays_and_then_falls_in_its_last_steps():
    config = TrainerConfig(learning_rate=1.0, warmup_steps=2, schedule="wsd", decay_steps=4, min_lr_ratio=0.2)
    # Stable from step 2 to 6, then from 1 to 0.2 in 4 steps: 0.2 less each step.
    assert [learning_rate(config, step, 10) for step in range(12)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_a_wsd_schedule_longer_than_the_run_is_refused():
    for steps in (0, 9):
        with pytest.raises(UserError, match=r"trainer\.decay_steps"):
            TrainerConfig(schedule="wsd", warmup_steps=2, decay_steps=steps).check_schedule(10)
