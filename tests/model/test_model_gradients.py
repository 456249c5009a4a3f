"""Gradients of the whole model in float64 are those of transformers."""

import pytest
import torch

from tandem.kernels.reference import ReferenceKernels
from tandem.model.decoder import PackedContext
from tandem.model.huggingface import load_model, to_huggingface

CASES = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def exact_norm(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The norm without the rounding to fp32 that transformers writes into it."""
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


@pytest.mark.parametrize("case", CASES)
def test_gradients_in_float64_are_those_of_transformers(case, peer_model, tmp_path, monkeypatch) -> None:
    model_type, config = CASES[case]
    peer = peer_model(model_type, **config).double()
    for module in peer.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", exact_norm)
    peer.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, ReferenceKernels(), dtype=torch.float64)
    # The peer gives its padding token, 0, no gradient.
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
        for parameter in decoder.parameters():
            parameter.copy_(parameter.grad)
    gradients = dict(to_huggingface(decoder))
    for name, parameter in peer.named_parameters():
        expected = parameter.grad
        assert (gradients[name] - expected).norm() <= 1e-8 * expected.norm(), name
