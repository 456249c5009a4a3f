"""The gradients of every listed family, in float64 and by the kernels in fp32, against those of transformers without its roundings to fp32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from listed_families import SEQUENCES, TINY, Tiny, packed_hidden
from torch import Tensor, nn

from tandem.kernels import select
from tandem.model.huggingface.model_folder import load_model, read_tensors, to_huggingface


def exact_norm(module: Any, hidden: Tensor) -> Tensor:
    """The norm without the rounding to fp32 in transformers."""
    if type(module).__name__.endswith("LayerNorm"):
        return module.weight * nn.functional.layer_norm(hidden, hidden.shape[-1:], eps=module.variance_epsilon)
    if type(module).__name__.startswith(("Gemma", "Qwen3Next")):
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], 1 + module.weight, module.eps)
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def exact_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax of attention that transformers computes itself, without its rounding to fp32."""
    return scores.softmax(dim)


def exact_router(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router without the rounding to fp32 in transformers."""
    logits = nn.functional.linear(hidden, module.weight)
    gates, experts = logits.softmax(-1).topk(module.top_k, dim=-1)
    return logits, gates / gates.sum(-1, keepdim=True) if getattr(module, "norm_topk_prob", True) else gates, experts


def exact_gated_norm(module: Any, hidden: Tensor, gate: Tensor) -> Tensor:
    """The norm of linear attention's output without the rounding to fp32 in transformers."""
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon) * nn.functional.silu(gate)


def exact_delta_rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
    """The gated delta rule of one sequence by its definition, without the rounding to fp32 in transformers."""
    repeats = value.shape[2] // query.shape[2]
    q, k = ((x[0] / (x[0].square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, dim=1) for x in (query, key))
    state, outputs = torch.zeros(*k.shape[1:], value.shape[3], dtype=value.dtype), []
    for t in range(len(q)):
        state = torch.einsum("hij,h->hij", state, g[0, t].exp())
        state = state + torch.einsum("hi,hj,h->hij", k[t], value[0, t] - torch.einsum("hi,hij->hj", k[t], state), beta[0, t])
        outputs.append(torch.einsum("hi,hij->hj", q[t], state) * q.shape[2] ** -0.5)
    return torch.stack(outputs).unsqueeze(0), state.unsqueeze(0)


def exact_sigmoid_router(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router of DeepSeek-V3's kind without the rounding to fp32 in transformers."""
    logits = nn.functional.linear(hidden.view(-1, hidden.shape[-1]), module.weight)
    scores = logits.sigmoid()
    by_group = (scores + module.e_score_correction_bias).view(len(scores), module.num_group, -1)
    groups = by_group.topk(2, dim=-1).values.sum(-1).topk(module.topk_group, dim=-1).indices
    allowed = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter_(1, groups, True)
    experts = by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1).topk(module.top_k, dim=-1).indices
    gates = scores.gather(1, experts)
    return logits, gates / (gates.sum(-1, keepdim=True) + 1e-20) * module.routed_scaling_factor, experts


def exact_group_router(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router of DeepSeek-V2 without the rounding to fp32 in transformers."""
    logits = nn.functional.linear(hidden.view(-1, hidden.shape[-1]), module.weight)
    by_group = logits.softmax(-1).view(len(logits), module.num_group, -1)
    groups = by_group.amax(-1).topk(module.topk_group, dim=-1).indices
    allowed = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter_(1, groups, True)
    gates, experts = by_group.masked_fill(~allowed.unsqueeze(-1), 0.0).flatten(1).topk(module.top_k, dim=-1)
    return logits, gates * module.routed_scaling_factor, experts


def exact_rotation(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation of DeepSeek-V2 without the rounding to fp32 in transformers."""
    both = (torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * freqs_cis.unsqueeze(1).to(torch.complex128) for x in (q, k))
    q, k = (torch.view_as_real(x).flatten(3) for x in both)
    return q, k


def test_gradients_by_plain_torch_in_float64_and_by_the_kernels_in_fp32_are_those_of_transformers(
    tiny: Tiny, peer_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = peer_model(tiny.family, vocab_size=40, **TINY[tiny.family]).double()
    for module in peer.modules():
        if type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
            monkeypatch.setattr(type(module), "forward", exact_norm)
        if type(module).__name__.endswith("RMSNormGated"):
            monkeypatch.setattr(type(module), "forward", exact_gated_norm)
        # That of gpt-oss computes in the dtype of its inputs.
        if type(module).__name__.endswith("TopKRouter") and tiny.family != "gpt_oss":
            monkeypatch.setattr(type(module), "forward", exact_router)
        if type(module).__name__.endswith("TopkRouter"):
            is_v2 = type(module).__name__.startswith("DeepseekV2")
            monkeypatch.setattr(type(module), "forward", exact_group_router if is_v2 else exact_sigmoid_router)
    monkeypatch.setattr("transformers.models.deepseek_v2.modeling_deepseek_v2.apply_rotary_emb", exact_rotation)
    monkeypatch.setattr("transformers.models.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule", exact_delta_rule)
    monkeypatch.setattr(Tensor, "float", lambda x: x)
    peer.set_experts_implementation("eager")
    monkeypatch.setattr(nn.functional, "softmax", exact_softmax)
    decoder = load_model(tiny.folder, select("reference"), dtype=torch.float64)
    in_fp32 = load_model(tiny.folder, select("cpu"))
    theirs = sum(-peer(s.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, s[1:, None]).sum() for s in SEQUENCES)
    theirs.backward()
    inputs, targets = [s[:-1] for s in SEQUENCES], torch.cat([s[1:] for s in SEQUENCES])
    for model, near in ((decoder, 1e-9), (in_fp32, 1e-5)):
        ours = -model.token_logprobs(packed_hidden(model, inputs), torch.arange(len(targets)), targets, 1.0, len(targets)).raw.sum()
        ours.backward()
        assert abs(ours.item() - theirs.item()) < near * abs(theirs.item())
    with torch.no_grad():
        for parameter in [*decoder.parameters(), *in_fp32.parameters(), *peer.parameters()]:
            parameter.copy_(parameter.grad)
    # Saved as a folder, because transformers names some matrices differently in memory.
    peer.save_pretrained(tmp_path / "gradients")
    expected = dict(read_tensors(tmp_path / "gradients"))
    for gradients, near in ((dict(to_huggingface(decoder)), 1e-7), (dict(to_huggingface(in_fp32)), 1e-3)):
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            if name.endswith("e_score_correction_bias"):
                assert not gradients[name].any(), "the bias of the choice has no gradient"
                continue
            assert (gradients[name] - gradient).norm() <= near * gradient.norm(), name
