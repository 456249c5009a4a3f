"""Muon against the polar factor in float64, torch's Muon, and AdamW for parameters that are not hidden matrices."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.optimizers.adamw import AdamW, OptimizerState
from tandem.trainer.optimizers.make import make_optimizer
from tandem.trainer.optimizers.muon import Muon, newton_schulz

CONFIG = TrainerConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.0)


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {"embed": (11, 8), "layers.0.a": (24, 8), "layers.0.b": (8, 20), "layers.0.norm": (8,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in made.items()}


def gradients(held, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in held.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


HIDDEN = ("layers.0.a", "layers.0.b")


@pytest.mark.parametrize("shape", [(6, 6), (5, 17), (40, 8)])
def test_newton_schulz_has_the_singular_vectors_of_the_polar_factor_and_singular_values_near_one(shape):
    generator = torch.Generator().manual_seed(1)
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(0, -2, min(shape), dtype=torch.float64)
    found = u.mT @ newton_schulz(u @ values.diag() @ vt) @ vt.mT
    assert (found - found.diagonal().diag()).abs().max() < 1e-12
    assert found.diagonal().min() > 0.65 and found.diagonal().max() < 1.15
    # The closed form: the scalar quintic on each singular value, starting with a norm of 1.
    wanted = values / values.norm()
    for _ in range(5):
        wanted = 3.4445 * wanted - 4.7750 * wanted**3 + 2.0315 * wanted**5
    torch.testing.assert_close(found.diagonal(), wanted, rtol=1e-10, atol=1e-12)


def test_muon_equals_torchs_on_hidden_matrices_and_adamw_on_the_rest():
    held, other, plain = parameters(), parameters(), parameters()
    optimizer = Muon(held.items(), CONFIG, HIDDEN)
    # torch's iterates in bf16, and adds gradients without the 1 - beta of the authors' code: the scale cancels.
    theirs = torch.optim.Muon([other[name] for name in HIDDEN], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(plain.items(), CONFIG)
    for step in range(4):
        for each, its in ((held, lambda: optimizer.step(0.01)), (other, theirs.step), (plain, lambda: adamw.step(0.01))):
            gradients(each, step)
            its()
    before = parameters()
    for name in HIDDEN:
        moved = (other[name] - before[name]).norm()
        assert (held[name] - other[name]).norm() < 0.02 * moved
    assert all(torch.equal(held[name], plain[name]) for name in ("embed", "layers.0.norm"))


def test_one_muon_step_is_the_published_update_in_float64():
    held = parameters(torch.float64)
    before = held["layers.0.a"].detach().clone()
    gradients(held, 3)
    Muon(held.items(), CONFIG, HIDDEN).step(0.02)
    gradient = held["layers.0.a"].grad
    # Nesterov's momentum after one step is a multiple of the gradient, which orthogonalisation removes.
    wanted = before * (1 - 0.02 * 0.1) - 0.02 * 0.2 * 24**0.5 * newton_schulz(gradient)
    torch.testing.assert_close(held["layers.0.a"].detach(), wanted, rtol=1e-12, atol=1e-12)


def test_stacked_projections_are_orthogonalised_part_by_part():
    held, apart = parameters(torch.float64), parameters(torch.float64)
    parts = {f"layers.0.a{i}": nn.Parameter(part.detach().clone()) for i, part in enumerate(apart["layers.0.a"].split([16, 8]))}
    gradients(held, 5)
    for part, gradient in zip(parts.values(), held["layers.0.a"].grad.split([16, 8]), strict=True):
        part.grad = gradient.clone()
    Muon(held.items(), CONFIG, HIDDEN, {"layers.0.a": (16, 8)}).step(0.01)
    Muon(parts.items(), CONFIG, parts).step(0.01)
    torch.testing.assert_close(held["layers.0.a"], torch.cat(list(parts.values())), rtol=1e-13, atol=1e-13)


def test_a_decoder_has_its_layers_matrices_under_muon_and_its_stacks_cut(make_model):
    model = make_model(torch.float32)
    optimizer = make_optimizer(model, CONFIG)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.01)
    kinds = {}
    for key in optimizer.state().moments:
        kind, _, name = key.partition("/")
        kinds.setdefault(name, set()).add(kind)
    for name, parameter in model.named_parameters():
        is_hidden = name.startswith("layers.") and parameter.ndim == 2
        assert kinds[name] == ({"momentum"} if is_hidden else {"exp_avg", "exp_avg_sq"})
    assert optimizer.matrices.stacks["layers.0.qkv_proj.weight"].rows == (64, 32, 32)
    assert optimizer.matrices.stacks["layers.1.gate_up_proj.weight"].rows == (48, 48)


def test_a_muon_state_read_back_goes_on_bit_for_bit_and_adamws_is_refused():
    held, other = parameters(), parameters()
    optimizer, second = Muon(held.items(), CONFIG, HIDDEN), Muon(other.items(), CONFIG, HIDDEN)
    for step in range(2):
        gradients(held, step)
        optimizer.step(0.01)
    second.load_state(optimizer.state())
    for name, parameter in other.items():
        parameter.data.copy_(held[name].data)
    for step in range(2, 4):
        for each, its in ((held, optimizer), (other, second)):
            gradients(each, step)
            its.step(0.01)
    assert second.updates == 4
    assert all(torch.equal(held[name], other[name]) for name in held)
    adamw = AdamW(other.items(), replace(CONFIG, optimizer="adamw"))
    adamw.step(0.01)
    with pytest.raises(ValueError, match=r"layers\.0\.a"):
        second.load_state(OptimizerState(adamw.state().moments, 1))
    assert second.updates == 4
