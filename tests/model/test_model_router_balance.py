"""Expert balancing: the loss is the published one, and the bias balances the load without changing the gates."""

import pytest
import torch

from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.families import mixtral
from tandem.model.initialise import initialise
from tandem.model.moe import load_balancing_loss
from tandem.model.router_balance import RouterBalance, biased_route

SHAPES = ModelShapes("mixtral", 61, 32, 2, 4, 2, 8, 24, 128, False, experts=ExpertShapes(6, 2, 24, names=mixtral.NAMES))
LAYERS = range(SHAPES.num_hidden_layers)


def forward(model, router_logits=None):
    tokens = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(23), torch.arange(17)])
    return model(tokens, positions, PackedContext(torch.tensor([0, 23, 40], dtype=torch.int32), 23), router_logits)


def model_of(kernels="reference", dtype=torch.float64):
    model = Decoder(SHAPES, select(kernels, dtype), dtype=dtype)
    initialise(model, 0, 0.2)
    return model


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_loss_that_is_attached_is_the_one_of_switch_transformers(recompute) -> None:
    """``load_balancing_loss`` itself is compared with transformers' elsewhere."""
    model, coefficient = model_of(), 0.3
    logits: list[torch.Tensor] = []
    (forward(model, logits).sum() + coefficient * sum(load_balancing_loss([x], 2) for x in logits)).backward()
    wanted = gradients(model)
    model.router_balance = RouterBalance(6, LAYERS, loss=coefficient)
    model.recompute = recompute
    model.router_balance.begin(40)
    forward(model).sum().backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
    assert all(int(counts.sum()) == 40 * 2 for counts in model.router_balance.counts.values()), "a token routed again is counted once"


def test_the_bias_chooses_and_the_gates_are_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, -1.0, 0.0, 1.0], dtype=torch.float64)
    routing = biased_route(logits, bias, 2, normalised=True)
    p = logits.softmax(-1)[0]
    assert routing.experts.tolist() == [[3, 0]]
    assert routing.gates[0].tolist() == pytest.approx([float(p[3] / (p[0] + p[3])), float(p[0] / (p[0] + p[3]))])


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_without_a_bias_the_choice_is_that_of_the_kernels(kernels) -> None:
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    for found, wanted in zip(biased_route(logits, torch.zeros(6), 2, True), select(kernels).route(logits, 2, True), strict=True):
        torch.testing.assert_close(found, wanted)


def test_biases_even_out_the_load_of_the_experts() -> None:
    model = model_of()
    model.router_balance = RouterBalance(6, LAYERS, bias_rate=0.02)
    overloads = []
    for _ in range(60):
        model.router_balance.begin(40)
        forward(model)
        overloads.append(model.router_balance.end(updated=True)["router/max_overload"])
    assert overloads[0] > 0.5
    assert sum(overloads[-10:]) / 10 < overloads[0] / 2
    assert model.router_balance.end(updated=False)["router/max_overload"] == overloads[-1]
    other = RouterBalance(6, LAYERS, bias_rate=0.02)
    other.load_state(model.router_balance.state())
    assert all(torch.equal(other.biases[i], model.router_balance.biases[i]) for i in LAYERS)
