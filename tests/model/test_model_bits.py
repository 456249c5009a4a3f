"""Decoding, chunked prefill, full prefill and the trainer's forward pass under grad have the same bits, in any batch. The check must fail
for a sum in another order and for a stale weight, which shows that it can fail."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kernels import Kernels, PackedWeight
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import Activation, ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.families import gpt_oss, mixtral
from tandem.model.huggingface.model_folder import load_tensors, to_huggingface
from tandem.model.initialise import initialise
from tandem.types.kv_cache import KV_CACHE_DTYPES, KVCacheDtype

SHAPES = {
    "qwen3": ModelShapes("qwen3", 99, 64, 3, 4, 2, 32, 96, 160, True, qk_norm=True),
    "qwen2 with windows": ModelShapes(
        "qwen2", 131, 72, 3, 6, 2, 16, 88, 160, False, attention_bias=True, layer_windows=(None, 19, 40)
    ),
    "llama, one key head, yarn": ModelShapes(
        "llama", 70, 48, 2, 3, 1, 24, 56, 160, False, attention_bias=True, output_bias=True, mlp_bias=True,
        rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=40),
    ),
    "mistral": ModelShapes("mistral", 91, 48, 2, 6, 2, 16, 88, 160, False, rope_theta=1e6, layer_windows=(21, 21)),
    "qwen3_moe, one dense layer": ModelShapes(
        "qwen3_moe", 99, 64, 3, 4, 2, 32, 96, 160, True, qk_norm=True, experts=ExpertShapes(13, 3, 40, False, (1,))
    ),
    "gpt_oss": ModelShapes(
        "gpt_oss", 83, 56, 2, 4, 2, 16, 72, 160, False, attention_bias=True, output_bias=True, layer_windows=(21, None), activation="clamped_swiglu",
        attention_sinks=True, experts=ExpertShapes(5, 2, 72, names=gpt_oss.NAMES, biased=True),
    ),
    "mixtral": ModelShapes("mixtral", 83, 56, 2, 4, 2, 16, 72, 160, False, experts=ExpertShapes(4, 2, 72, names=mixtral.NAMES)),
}  # fmt: skip
LENGTHS = (1, 17, 64, 65, 130, 33)
Steps = list[list[tuple[int, int]]]


def sequences_for(shapes: ModelShapes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, shapes.vocab_size, (n,), generator=generator) for n in LENGTHS]


def schedules() -> dict[str, Steps]:
    """Yields the ways in which an engine may compute the same tokens, as ``(sequence, tokens)`` for each step."""
    everyone = range(len(LENGTHS))
    draw = random.Random(3)
    mixed: Steps = []
    for _ in range(60):
        chosen = draw.sample(everyone, draw.randint(1, len(LENGTHS)))
        mixed.append([(s, draw.choice((1, 1, 1, 3, 7, 16, 31))) for s in chosen])
    mixed.append([(s, 1000) for s in everyone])
    return {
        "decode": [[(s, 1) for s in everyone]] * max(LENGTHS),
        "decode alone": [[(1, 1)]] * LENGTHS[1] + [[(s, 1000)] for s in (3, 0, 5, 2, 4)],
        "chunked prefill": [[(s, (13, 29, 5)[(s + i) % 3]) for s in everyone] for i in range(30)],
        "full prefill": [[(s, 1000) for s in reversed(everyone)]],
        "full prefill alone": [[(s, 1000)] for s in everyone],
        "prefill, then decode": [[(s, LENGTHS[s] // 2 + 1) for s in everyone], *([[(s, 1) for s in everyone]] * 70)],
        "mixed": mixed,
    }


def decoder_for(shapes: ModelShapes, kernels: Kernels) -> Decoder:
    """Random weights without special values; matrices large enough for distinct logits."""
    decoder = Decoder(shapes, kernels)
    initialise(decoder, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.15 * noise)
    return decoder


def copy_of(decoder: Decoder, kernels: Kernels) -> Decoder:
    copy = Decoder(decoder.shapes, kernels)
    load_tensors(copy, to_huggingface(decoder))
    return copy


Run = Callable[..., list[Tensor]]


def disagreements(trained: Sequence[Tensor], runs: dict[str, Sequence[Tensor]]) -> list[str]:
    """Returns the runs in which the logits [L, V] of a sequence differ from the trainer's in any bit."""
    return [
        name
        for name, logits in runs.items()
        if not all(torch.equal(ours, theirs) for ours, theirs in zip(logits, trained, strict=True))
    ]


CASES = [
    *((name, "auto") for name in SHAPES),
    *(("qwen3", name) for name in KV_CACHE_DTYPES[1:]),
    ("qwen2 with windows", "int8"),
    ("llama, one key head, yarn", "fp8_e4m3"),
]
FAST = [case for case in CASES if case not in (("qwen3", "bfloat16"), ("qwen3", "fp8_e4m3"))]
FAST_IN_THE_REFERENCE = [("mixtral", "auto")]
"""The reference kernels take six to ten seconds for each; the other cases prove the like with other models."""


@pytest.mark.parametrize(
    ("kernels", "architecture", "kv_cache_dtype"),
    [
        pytest.param(kernels, *case, marks=pytest.mark.full if case not in (FAST_IN_THE_REFERENCE if kernels == "reference" else FAST) else ())
        for kernels in ("reference", "cpu")
        for case in CASES
    ],
    indirect=["kernels"],
)
def test_engine_and_trainer_agree_bit_for_bit_however_the_tokens_come(
    architecture: str,
    kv_cache_dtype: KVCacheDtype,
    kernels: Kernels,
    packed_logits: Run,
    paged_logits: Run,
    record_property: Callable[[str, object], None],
) -> None:
    shapes = SHAPES[architecture]
    sequences = sequences_for(shapes)
    trainer = decoder_for(shapes, kernels)
    engine = copy_of(trainer, kernels)
    engine.pack()
    trainer.kv_cache_dtype = engine.kv_cache_dtype = kv_cache_dtype

    trained = packed_logits(trainer, sequences)
    assert all(logits.requires_grad for logits in trained)
    runs = {
        name: paged_logits(engine, sequences, steps, seed) for seed, (name, steps) in enumerate(schedules().items())
    }
    runs["trainer, one sequence at a time"] = [packed_logits(trainer, [s])[0] for s in sequences]
    runs["trainer, other order"] = packed_logits(trainer, sequences[::-1])[::-1]
    runs["packed weights, packed sequences"] = packed_logits(engine, sequences)
    runs["plain weights, paged cache"] = paged_logits(trainer, sequences, schedules()["mixed"], 99)
    torch.set_num_threads(2)
    runs["trainer, two threads"] = packed_logits(trainer, sequences)
    runs["engine, two threads"] = paged_logits(engine, sequences, schedules()["mixed"])
    assert disagreements(trained, runs) == []

    torch.cat(trained).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainer.parameters())

    exact = Decoder(shapes, ReferenceKernels(), dtype=torch.float64)
    load_tensors(exact, ((name, tensor.double()) for name, tensor in to_huggingface(trainer)))
    truth = torch.cat(packed_logits(exact, sequences))
    distance = (torch.cat(trained).double() - truth).abs().max().item()
    record_property("distance_to_float64", distance)
    print(f"{architecture}, {kernels.name}: logits within {distance:.1e} of float64, whose scale is {truth.std():.2f}")
    if kv_cache_dtype == "auto":
        assert distance < 2e-5
    else:
        # The reference keeps keys and values unrounded. Half a step of the format, relative to a head's largest element, is 2^-9, 2^-8
        # and 2^-5, and of 4 bits 1 / 14; a few layers of such errors stay within a few times that.
        relative = ((torch.cat(trained).double() - truth).norm() / truth.norm()).item()
        print(f"{kv_cache_dtype}: {relative:.1e} of the logits' norm")
        assert 1e-4 < relative < 5 * {"bfloat16": 2**-9, "int8": 2**-8, "fp8_e4m3": 2**-5, "int4": 1 / 14}[kv_cache_dtype]


@pytest.mark.parametrize("architecture", SHAPES)
def test_a_row_has_its_bits_whichever_other_rows_are_wanted(architecture: str, kernels: Kernels, paged_logits: Run) -> None:
    sequences = sequences_for(SHAPES[architecture])
    engine = decoder_for(SHAPES[architecture], kernels)
    engine.pack()
    whole = torch.cat(paged_logits(engine, sequences, schedules()["full prefill"]))
    for name in ("mixed", "chunked prefill", "decode alone"):
        part = torch.cat(paged_logits(engine, sequences, schedules()[name], 7, wanted=True))
        asked = ~part.isnan().any(1)
        assert 0 < asked.sum() < len(part), "some rows, and not all, must be asked for"
        assert torch.equal(part[asked], whole[asked]), name


class ReorderedSum:
    """The same kernels, except that the products of a single row are summed from last to first."""

    def __init__(self, inner: Kernels, reverse: bool) -> None:
        self.inner = inner
        self.reverse = reverse

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.reverse and len(x) == 1:
            return self.inner.linear(x.flip(1), weight.flip(1), bias)
        return self.inner.linear(x, weight, bias)

    def pack(self, weight: Tensor) -> PackedWeight:
        return PackedWeight(weight.detach().clone(), *weight.shape)

    def linear_packed(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        return self.linear(x, weight.data, bias)

    def gated_mlp_packed(
        self, x: Tensor, gate_up: PackedWeight, gate_up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None, activation: Activation = "silu"
    ) -> Tensor:
        assert activation == "silu"
        return self.linear_packed(self.inner.silu_mul(self.linear_packed(x, gate_up, gate_up_bias)), down, down_bias)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_check_sees_a_sum_in_another_order(
    reverse: bool, kernels: Kernels, packed_logits: Run, paged_logits: Run
) -> None:
    shapes = SHAPES["qwen3"]
    sequences = sequences_for(shapes)
    trainer = decoder_for(shapes, kernels)
    engine = copy_of(trainer, ReorderedSum(kernels, reverse))  # type: ignore[arg-type]
    engine.pack()
    with torch.no_grad():
        trained = packed_logits(trainer, sequences)
        runs = {name: paged_logits(engine, sequences, schedules()[name]) for name in ("decode alone", "full prefill")}
    assert disagreements(trained, runs) == (["decode alone"] if reverse else [])
    if reverse:
        difference = torch.cat(runs["decode alone"]) - torch.cat(trained)
        assert 0 < difference.abs().max() < 1e-4, "the fault must be one of rounding"


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2 with windows"])
def test_the_check_sees_a_stale_packed_weight(
    architecture: str, kernels: Kernels, packed_logits: Run, paged_logits: Run
) -> None:
    """The head is tied to the embedding in one of two models; in both, only the packed copy of the head is stale."""
    shapes = SHAPES[architecture]
    sequences = sequences_for(shapes)
    trainer = decoder_for(shapes, kernels)
    engine = copy_of(trainer, kernels)
    engine.pack()
    stale_head = engine._packed_head
    steps = {"full prefill": schedules()["full prefill"]}
    with torch.no_grad():
        trainer.head_weight[7, 3] += 1e-3
        trained = packed_logits(trainer, sequences)
        load_tensors(engine, to_huggingface(trainer))
        engine.pack()
        fresh = {name: paged_logits(engine, sequences, s) for name, s in steps.items()}
        engine._packed_head = stale_head
        stale = {name: paged_logits(engine, sequences, s) for name, s in steps.items()}
    assert disagreements(trained, fresh) == []
    assert disagreements(trained, stale) == ["full prefill"]


def test_an_in_place_change_reaches_a_packed_decoder_only_when_it_is_packed_again(
    kernels: Kernels, packed_logits: Run
) -> None:
    trainer = decoder_for(SHAPES["qwen3"], kernels)
    engine = copy_of(trainer, kernels)
    engine.pack()
    with torch.no_grad():
        for decoder in (trainer, engine):
            decoder.embed_tokens[5] *= 1.01
        tokens = [torch.tensor([5, 6, 7])]
        trained = packed_logits(trainer, tokens)
        assert disagreements(trained, {"stale": packed_logits(engine, tokens)}) == ["stale"]
        engine.pack()
        assert disagreements(trained, {"packed again": packed_logits(engine, tokens)}) == []
