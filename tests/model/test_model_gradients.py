"""Gradients of the whole model in float64 are those of transformers where the routing is replayed (others: ``test_model_listed_gradients``)."""

import pytest
import torch

from tandem.kernels.reference import ReferenceKernels
from tandem.model.decoder import PackedContext
from tandem.model.huggingface.model_folder import load_model, read_tensors, to_huggingface

CASES = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}


def exact_norm(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The norm without the rounding to fp32 in transformers."""
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_routing_is_that_of_transformers_with_the_same_experts_chosen(case, peer_model, tmp_path, monkeypatch) -> None:
    """Log-probabilities, and gradients of all parameters, routers included, where tokens go to experts that the routers would not choose."""
    each, number = (3, 7) if case == "qwen3_moe" else (2, 4)
    generator = torch.Generator().manual_seed(4)
    # The experts of each of the 54 tokens before a last one, in 2 layers, with their order that of the recording.
    recorded = torch.rand(54, 2, number, generator=generator).argsort(-1)[:, :, :each]
    sequences_seen: dict[int, int] = {}
    starts = (0, 20, 21)

    def replaying_router(module: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Called for sequence after sequence; its last token, which is not in our batch, may go anywhere."""
        number_of = sequences_seen.setdefault(id(module), 0)
        sequences_seen[id(module)] += 1
        layer = module.weight.layer
        rows = recorded[starts[number_of] :][: len(hidden) - 1, layer]
        experts = torch.cat([rows, rows[-1:]])
        logits = torch.nn.functional.linear(hidden, module.weight)
        gates = logits.softmax(-1).gather(1, experts)
        if getattr(module, "norm_topk_prob", True):
            gates = gates / gates.sum(-1, keepdim=True)
        return logits, gates, experts

    check_gradients(case, replaying_router, peer_model, tmp_path, monkeypatch, recorded.to(torch.int16))


def check_gradients(case, router, peer_model, tmp_path, monkeypatch, routed_experts=None) -> None:
    model_type, config = CASES[case]
    peer = peer_model(model_type, **config).double()
    for module in peer.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", exact_norm)
        if type(module).__name__.endswith("TopKRouter"):
            monkeypatch.setattr(type(module), "forward", router)
    for number, layer in enumerate(peer.model.layers):
        for module in layer.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.weight.layer = number
    peer.set_experts_implementation("eager")
    peer.save_pretrained(tmp_path / "weights")
    decoder = load_model(tmp_path / "weights", ReferenceKernels(), dtype=torch.float64)
    # transformers gives the padding token, 0, no gradient.
    sequences = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]

    theirs = sum(-peer(s.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, s[1:, None]).sum() for s in sequences)
    theirs.backward()
    inputs = [s[:-1] for s in sequences]
    bounds = torch.tensor([0, *map(len, inputs)]).cumsum(0).to(torch.int32)
    hidden = decoder(torch.cat(inputs), torch.cat([torch.arange(len(s)) for s in inputs]), PackedContext(bounds, 33, routed_experts=routed_experts))
    targets = torch.cat([s[1:] for s in sequences])
    ours = -decoder.kernels.token_logprobs(hidden, decoder.head_weight, targets, 1.0).raw.sum()
    ours.backward()

    assert abs(ours.item() - theirs.item()) < 1e-10 * abs(theirs.item())
    with torch.no_grad():
        for parameter in [*decoder.parameters(), *peer.parameters()]:
            parameter.copy_(parameter.grad)
    gradients = dict(to_huggingface(decoder))
    # Saved as a folder, because transformers names experts' matrices differently in memory.
    peer.save_pretrained(tmp_path / "gradients")
    found = dict(read_tensors(tmp_path / "gradients"))
    assert found.keys() == gradients.keys()
    for name, expected in found.items():
        assert (gradients[name] - expected).norm() <= 1e-8 * expected.norm(), name
