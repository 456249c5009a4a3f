"""Attention of other packages: used if selected, refused if it changes bits."""

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paged_sequences import Paged, bounds_of, exact, make
from torch import Tensor

from tandem.kernels import Kernels, select
from tandem.kernels.attention_backends import BACKENDS, broken_law, fast_attention, load_backend, with_attention
from tandem.types import UserError

CPU = torch.device("cpu")


def installed(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """A package with FlashAttention 3's interface, which computes with ``function``."""
    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, window_size: tuple[int, int], softmax_scale: float, **_: Any) -> Tensor:
    """torch's attention, sequence by sequence: correct, but its bits depend on the length."""
    parts = []
    for start, end in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False):
        distance = torch.arange(end - start).unsqueeze(1) - torch.arange(end - start)
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        own = [x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*own, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        parts.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 7])
def test_a_backend_that_is_asked_for_computes_packed_attention(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    installed(monkeypatch, lambda *given, **named: (torch_attention(*given, **named), "sums"))
    changed = with_attention(kernels, "flash3", torch.float32, CPU, deterministic=False)
    q, k, v = make([5, 40], 16, 4, 2)
    out = changed.packed_attention(q, k, v, bounds_of([5, 40]), 40, 0.25, window)
    expected = exact(q, k, v, bounds_of([5, 40]), 0.25, window)
    assert (out - expected).norm() / expected.norm() < 1e-6
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(changed.linear(x, weight, None), kernels.linear(x, weight, None))
    assert not torch.equal(out, kernels.packed_attention(q, k, v, bounds_of([5, 40]), 40, 0.25, window))


def test_attention_that_a_backend_does_not_compute_stays_with_the_kernels(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*given: Any, **named: Any) -> Tensor:
        raise AssertionError("called")

    installed(monkeypatch, unwanted)
    changed = with_attention(kernels, "flash3", torch.float32, CPU, deterministic=False)
    q, k, v = make([5, 40], 16, 4, 2)
    bounds = bounds_of([5, 40])
    for values, terms in ((v, {"cap": 2.0}), (v, {"sinks": torch.randn(4)}), (v[..., :12].contiguous(), {})):
        out, own = (each.packed_attention(q, k, values, bounds, 40, 0.25, None, **terms) for each in (changed, kernels))
        assert torch.equal(out, own)
        assert (out - kernels.packed_attention(q, k, v, bounds, 40, 0.25, None)[..., : values.shape[2]]).abs().max() > (1e-4 if terms else -1)


@pytest.mark.parametrize("asks", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_torchs_own_is_given_packed_sequences_and_the_keys_beside_a_querys_own(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_gqa(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, most: int, most_keys: int, *, scale: float, window_size: tuple[int, int]
    ) -> Tensor:
        assert torch.equal(starts, key_starts) and most == most_keys == 40 and window_size[1] == 0
        return torch_attention(q, k, v, starts, window_size, scale)

    def with_gqa(*given: Any, enable_gqa: bool, scale: float, window_size: tuple[int, int]) -> Tensor:
        assert enable_gqa
        return without_gqa(*given, scale=scale, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", with_gqa if asks else without_gqa)
    q, k, v = make([5, 40], 16, 4, 2)
    for window in (None, 7):
        out = load_backend("torch")(q, k, v, bounds_of([5, 40]), 40, 0.25, window)
        expected = exact(q, k, v, bounds_of([5, 40]), 0.25, window)
        assert (out - expected).norm() / expected.norm() < 1e-6
    assert fast_attention(64) == "torch" and fast_attention(60) is None and fast_attention(512) is None
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v: q)
    assert fast_attention(64) is None, "an older torch"


def test_a_backend_with_other_bits_is_refused_in_deterministic_mode(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch_attention)
    with pytest.raises(UserError, match=r"'flash3' is refused in deterministic mode: .*; set attention to auto, or deterministic to False"):
        with_attention(kernels, "flash3", torch.float32, CPU, deterministic=True)
    assert with_attention(kernels, "flash3", torch.float32, CPU, deterministic=False).name == kernels.name


def test_a_backend_that_is_installed_is_refused_on_a_cpu(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch_attention)
    with pytest.raises(UserError, match="attention 'flash3' needs a GPU and the device is 'cpu'; set attention to auto"):
        select(kernels.name, attention="flash3")  # type: ignore[arg-type]
    assert type(select(kernels.name)) is type(kernels)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 7])
def test_an_engines_whole_prompts_go_to_the_backend_and_everything_else_to_the_paged_kernels(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    calls = []

    def counted(*given: Any, **named: Any) -> Tensor:
        calls.append(named["max_seqlen_q"])
        return torch_attention(*given, **named)

    installed(monkeypatch, counted)
    changed = with_attention(kernels, "flash3", torch.float32, CPU, deterministic=False)
    lengths = [5, 40]
    qkv = make(lengths, 16, 4, 2)
    expected, out, own = exact(*qkv, bounds_of(lengths), 0.25, window), torch.empty(45, 4, 16), torch.empty(45, 4, 16)
    Paged(changed, lengths, 16, 2).step({1: 40, 0: 5}, qkv, 0.25, window, out)
    assert calls == [40] and (out - expected).norm() / expected.norm() < 1e-6
    # Chunks: the first pieces are whole sequences so far, the rest continues or decodes.
    paged, plain = Paged(changed, lengths, 16, 2), Paged(kernels, lengths, 16, 2)
    for chunks in ({1: 20}, {1: 19, 0: 4}, {0: 1, 1: 1}):
        paged.step(chunks, qkv, 0.25, window, out)
        plain.step(chunks, qkv, 0.25, window, own)
    assert calls == [40, 20] and (out - expected).norm() / expected.norm() < 1e-6
    assert torch.equal(out[:5], own[:5]) and torch.equal(out[25:], own[25:]) and not torch.equal(out[5:25], own[5:25])


def test_a_backend_with_our_bits_is_taken_in_deterministic_mode(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, **_: Any) -> Tensor:
        return kernels.packed_attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, None)

    installed(monkeypatch, ours)
    assert with_attention(kernels, "flash3", torch.float32, CPU, deterministic=True).name == kernels.name


def test_the_self_check_names_what_it_found(kernels: Kernels) -> None:
    def own(*given: Any) -> Tensor:
        return kernels.packed_attention(*given)

    def by_length(q: Tensor, *rest: Any) -> Tensor:
        return own(q, *rest) * (1 + len(q) * 2.0**-20)

    def by_longest(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *rest: Any) -> Tensor:
        return own(q, k, v, bounds, longest, *rest) * (1 + longest * 2.0**-20)

    def other(*given: Any) -> Tensor:
        return own(*given) * (1 + 2.0**-20)

    assert broken_law(kernels, own, torch.float32, CPU) == ""
    assert broken_law(kernels, by_length, torch.float32, CPU) == "the bits of a sequence depend on the other sequences in the batch"
    assert broken_law(kernels, by_longest, torch.float32, CPU) == "the bits of a token depend on later tokens"
    assert broken_law(kernels, other, torch.float32, CPU) == "the bits of a decoded token differ over the engine's cache"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_that_is_not_installed_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, BACKENDS[name].module, None)
    with pytest.raises(UserError, match=f"attention '{name}' cannot be imported .*; install .*, or set attention to auto"):
        load_backend(name)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UserError, match="attention is 'fast'; it must be one of auto, flash3"):
        load_backend("fast")


def test_triton_kernels_are_refused_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError, match="kernels triton: there is no CUDA device"):
        select("triton")
    assert select("auto", torch.bfloat16, "cuda").name == "reference"
