"""Gradients of the whole model in float64 are those of transformers."""

import pytest
import torch

from tandem.kernels.reference import ReferenceKernels
from tandem.model.decoder import PackedContext
from tandem.model.huggingface.model_folder import load_model, read_tensors, to_huggingface

CASES = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 9, "head_dim": 16}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}


def exact_norm(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The norm without the rounding to fp32 in transformers."""
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def exact_router(module: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The router without the rounding to fp32 in transformers."""
    logits = torch.nn.functional.linear(hidden, module.weight)
    gates, experts = logits.softmax(-1).topk(module.top_k, dim=-1)
    if getattr(module, "norm_topk_prob", True):
        gates = gates / gates.sum(-1, keepdim=True)
    return logits, gates, experts


@pytest.mark.parametrize("case", CASES)
def test_gradients_in_float64_are_those_of_transformers(case, peer_model, tmp_path, monkeypatch) -> None:
    model_type, config = CASES[case]
    peer = peer_model(model_type, **config).double()
    for module in peer.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", exact_norm)
        if type(module).__name__.endswith("TopKRouter"):
            monkeypatch.setattr(type(module), "forward", exact_router)
    peer.set_experts_implementation("eager")
    peer.save_pretrained(tmp_path / "weights")
    decoder = load_model(tmp_path / "weights", ReferenceKernels(), dtype=torch.float64)
    # transformers gives the padding token, 0, no gradient.
    sequences = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]

    theirs = sum(-peer(s.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, s[1:, None]).sum() for s in sequences)
    theirs.backward()
    inputs = [s[:-1] for s in sequences]
    bounds = torch.tensor([0, *map(len, inputs)]).cumsum(0).to(torch.int32)
    hidden = decoder(torch.cat(inputs), torch.cat([torch.arange(len(s)) for s in inputs]), PackedContext(bounds, 33))
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
