"""The load-balancing loss of a mixture of experts that a module of transformers computes, against transformers' own (``load_balancing_loss_func``)."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.config.implementation import Implementation
from tandem.config.lora import LoraConfig
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.expert_balance import balance_loss, check_balance
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import load_model
from tandem.model.joint_balance import JointBalance
from tandem.model.router_balance import ALONE
from tandem.model.transformers_module.read import from_json, to_json
from tandem.model.transformers_module.router_loss import NO_LOSS, observe_router_loss
from tandem.types import UserError

BY_TRANSFORMERS = Implementation("transformers")
TYPES: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {"hidden_size": 64, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 40, "moe_layer_start_index": 1, "num_hidden_layers": 3},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
    "granitemoe": {"hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "mixtral": {"hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 3},
    "phimoe": {"hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"hidden_size": 64, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
}  # fmt: skip
QUICK = "qwen3_moe"
TOKENS = torch.randint(3, 61, (40,), generator=torch.Generator().manual_seed(7))
COEFFICIENT = 0.7


@pytest.fixture
def peer_and_folder(peer_model: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Returns a function that makes a random model of a type, and its folder, whose ``config.json`` asks for the loss with ``COEFFICIENT``."""

    def make(model_type: str, **keys: Any) -> tuple[Any, Path]:
        asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
        peer = peer_model(model_type, **{**TYPES.get(model_type, {}), **asked, **keys})
        peer.save_pretrained(tmp_path / model_type)
        return peer, tmp_path / model_type

    return make


def forward(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return decoder.logits(decoder(tokens, torch.arange(len(tokens)), PackedContext(bounds, len(tokens))))


def balanced(folder: Path, ranks: Any = ALONE) -> Decoder:
    decoder = load_model(folder, select("reference", torch.float64), dtype=torch.float64, implemented_by=BY_TRANSFORMERS)
    module = decoder.shapes.transformers
    assert module is not None
    decoder.router_balance = JointBalance(module.num_experts, len(module.loss_routers), module.experts_per_token, module.router_loss, ranks)
    return decoder


def gradients(network: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in TYPES])
def test_gradients_with_the_loss_of_the_routers_are_those_of_transformers_loss(model_type: str, peer_and_folder: Any) -> None:
    peer, folder = peer_and_folder(model_type)
    peer = peer.double()
    peer.set_experts_implementation("eager")
    output = peer(TOKENS.unsqueeze(0), labels=TOKENS.unsqueeze(0))
    alone = torch.nn.functional.cross_entropy(output.logits[0, :-1], TOKENS[1:])
    assert float((output.loss - alone).detach()) == pytest.approx(COEFFICIENT * float(output.aux_loss.detach()), rel=1e-6)
    output.loss.backward()
    expected = gradients(peer)
    peer.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(peer(TOKENS.unsqueeze(0)).logits[0, :-1], TOKENS[1:]).backward()
    without = gradients(peer)
    decoder = balanced(folder)
    for recompute in ("none", "full", "selective"):
        decoder.recompute = recompute
        decoder.zero_grad(set_to_none=True)
        decoder.router_balance.begin(len(TOKENS))
        torch.nn.functional.cross_entropy(forward(decoder, TOKENS)[:-1], TOKENS[1:]).backward()
        own = gradients(decoder.network)
        largest = max(float(grad.abs().max()) for grad in expected.values())
        for name, grad in expected.items():
            # transformers sums the loss in fp32.
            torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=2e-6 * largest)
        assert any(not torch.allclose(without[name], grad, rtol=1e-2, atol=1e-4 * largest) for name, grad in expected.items())
        counted = decoder.router_balance.counts.values()
        assert all(int(counts.sum()) == len(TOKENS) * decoder.shapes.transformers.experts_per_token for counts in counted)


def test_the_losses_of_micro_batches_are_added_in_the_share_of_their_tokens(peer_and_folder: Any) -> None:
    peer, folder = peer_and_folder(QUICK)
    peer = peer.double()
    peer.set_experts_implementation("eager")
    parts = TOKENS.split([13, 27])
    for part in parts:
        (COEFFICIENT * len(part) / len(TOKENS) * peer(part.unsqueeze(0)).aux_loss).backward()
    expected = gradients(peer)
    decoder = balanced(folder)
    decoder.router_balance.begin(len(TOKENS), scale=8.0)
    for part in parts:
        (forward(decoder, part) * 0.0).sum().backward()
    own = gradients(decoder.network)
    for name, grad in expected.items():
        torch.testing.assert_close(own[name] / 8.0, grad, rtol=1e-4, atol=1e-8)
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-3


class OtherRank:
    """In place of a communicator of two ranks: adds what the other one was seen to give, in the order of the calls."""

    def __init__(self, other: list[torch.Tensor]) -> None:
        self.given: list[torch.Tensor] = []
        self._other = iter(other)

    def all_reduce(self, tensor: torch.Tensor, _: str) -> torch.Tensor:
        self.given.append(tensor.clone())
        return tensor + next(self._other, torch.zeros_like(tensor))


def test_ranks_have_together_the_loss_of_transformers_for_the_tokens_of_all(peer_and_folder: Any) -> None:
    peer, folder = peer_and_folder(QUICK)
    peer = peer.double()
    peer.set_experts_implementation("eager")
    halves = TOKENS.split([20, 20])
    (COEFFICIENT * peer(torch.stack(halves)).aux_loss).backward()
    expected, seen = gradients(peer), [[], []]
    for _ in range(2):
        # In the first round each rank sees its own tokens, in the second what the other gave in the first.
        sums: dict[str, torch.Tensor] = {}
        ranks = [OtherRank(seen[1]), OtherRank(seen[0])]
        for half, rank in zip(halves, ranks, strict=True):
            decoder = balanced(folder, ranks=rank)
            decoder.router_balance.begin(len(half))
            (forward(decoder, half) * 0.0).sum().backward()
            for name, grad in gradients(decoder.network).items():
                sums[name] = sums.get(name, 0.0) + grad
        seen = [rank.given for rank in ranks]
    for name, grad in expected.items():
        torch.testing.assert_close(sums[name], grad, rtol=1e-4, atol=1e-8)
    assert len(seen[0]) == 2, "the ranks add up the tokens of a step, and the choices of each forward pass once"


def test_log_probabilities_without_gradient_count_no_tokens_and_a_reference_has_no_loss(peer_and_folder: Any) -> None:
    decoder = balanced(peer_and_folder(QUICK)[1])
    decoder.router_balance.begin(len(TOKENS))
    with torch.no_grad():
        forward(decoder, TOKENS)
    assert not any(counts.any() for counts in decoder.router_balance.counts.values())


def test_the_recipe_then_config_json_say_the_coefficient_and_a_class_without_the_loss_is_refused(peer_and_folder: Any) -> None:
    _, folder = peer_and_folder(QUICK)
    shapes = read_shapes(folder, implemented_by=BY_TRANSFORMERS)
    assert from_json(json.loads(json.dumps(to_json(shapes)))) == shapes
    losses = [balance_loss(shapes, TrainerConfig(router_balance_loss=each)) for each in (None, 0.0, 0.25)]
    assert losses == [COEFFICIENT, 0.0, 0.25]
    for key, says in {"config.json": None, "trainer.router_balance_loss": 0.1}.items():
        with pytest.raises(UserError, match=rf"share_prompts' is true, .*\({key}\); set trainer\.share_prompts to false"):
            check_balance(shapes, TrainerConfig(share_prompts=True, router_balance_loss=says))
    check_balance(shapes, TrainerConfig(share_prompts=True, router_balance_loss=0.0))
    beside_adapter = TrainerConfig(lora=LoraConfig(), router_balance_loss=0.25)
    check_balance(shapes, beside_adapter)
    with pytest.raises(UserError, match=r"router_balance_loss' is 0\.25 and trainer\.lora leaves routers as they are; set trainer\.router_balance_loss to 0"):
        check_balance(read_shapes(folder), beside_adapter)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "output_router_logits": False}))
    assert balance_loss(read_shapes(folder, implemented_by=BY_TRANSFORMERS), TrainerConfig()) == 0.0
    # The family's own network reads no such key.
    assert balance_loss(read_shapes(folder), TrainerConfig()) == 0.0
    for other in ("dots1", "llama"):
        keys = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1} if other == "dots1" else {}
        without = read_shapes(peer_and_folder(other, **keys)[1], implemented_by=BY_TRANSFORMERS)
        check_balance(without, TrainerConfig())
        says = r"'trainer\.router_balance_loss' is 0\.1, and .*ForCausalLM has no load-balancing loss in transformers, or none .*; leave it out"
        with pytest.raises(UserError, match=says):
            check_balance(without, TrainerConfig(router_balance_loss=0.1))


def load_balancing_loss_func(*_: Any) -> None:
    """What a class that adds the loss names, as ``Unfollowed`` does, by its module."""


class Unfollowed(torch.nn.Module):
    """A class that adds the loss, and records the logits of its routers in no way that is known."""

    router_aux_loss_coef = COEFFICIENT

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.config, self.base_model = SimpleNamespace(output_router_logits=asks), self

    def forward(self) -> None:
        raise AssertionError


def test_a_folder_that_asks_for_a_loss_that_cannot_be_added_is_refused_until_the_recipe_does_without(peer_and_folder: Any) -> None:
    assert [observe_router_loss(Unfollowed(asks)) for asks in (True, False)] == [NO_LOSS._replace(asked=COEFFICIENT), NO_LOSS]
    shapes = read_shapes(peer_and_folder(QUICK)[1], implemented_by=BY_TRANSFORMERS)
    assert shapes.transformers is not None
    unfollowed = replace(shapes, transformers=replace(shapes.transformers, loss_routers=()))
    with pytest.raises(UserError, match=r"config\.json has 'output_router_logits', .*ForCausalLM cannot be added here; set trainer\.router_balance_loss to 0"):
        check_balance(unfollowed, TrainerConfig())
    check_balance(unfollowed, TrainerConfig(router_balance_loss=0.0))
