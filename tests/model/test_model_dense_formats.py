"""All layers of a quantized decoder are one call too, with the bits of the kernels called one by one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_programs import DENSE, LENGTHS, QWEN3, OneByOne, packed, steps
from torch import Tensor

from tandem.kernels import Kernels, QuantizedWeight, select
from tandem.model import decoder as decoder_module
from tandem.model.quantization.scheme import Scheme, Stored, round_to_nearest, scheme_named

W4A8 = Scheme("int4", 32, symmetric=False, inputs="int8")
FORMATS = {
    "int8": scheme_named("int8"),
    "int8, inputs unchanged": Scheme("int8", 32),
    "int4": Scheme("int4", 32, symmetric=False),
    "w4a8": W4A8,
    "fp8": scheme_named("fp8"),
    "fp8 by blocks": Scheme("float8_e4m3", 32, inputs="float8_e4m3", input_group=32),
    "nf4": scheme_named("nf4"),
    "bf16": scheme_named("bf16"),
}


def rounded(weight: Tensor, scheme: Scheme, ordered: bool = False) -> QuantizedWeight:
    if not ordered:
        return round_to_nearest(weight, scheme)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(weight)))
    return round_to_nearest(weight[:, order], scheme)._replace(order=order)


def as_folder(name: str) -> Callable[[int, Tensor], Stored]:
    """The matrices of each layer in one format, in order of importance, or each in another one, of which the second is not quantized."""
    if name == "each another":
        return lambda place, weight: (rounded(weight, FORMATS["int8"]), weight, rounded(weight, FORMATS["int4"], True), rounded(weight, W4A8))[place % 4]
    kind, is_ordered, _ = name.partition(" by importance")
    return lambda place, weight: rounded(weight, FORMATS[kind], bool(is_ordered))


NAMES = [*FORMATS, "int4 by importance", "w4a8 by importance", "each another"]


@pytest.mark.parametrize("shapes", ["norms of queries and keys", "biases, windows, one key head"])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_layers_in_one_call_have_the_bits_of_the_kernels_one_by_one(
    name: str, shapes: str, cpu_kernels: Kernels, paged_logits: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 67, (length,), generator=generator) for length in LENGTHS]
    alone = packed(DENSE[shapes], OneByOne(cpu_kernels), as_folder(name))
    expected = torch.cat(paged_logits(alone, sequences, steps(), 7, wanted=True))
    monkeypatch.setattr(decoder_module, "run_layer", None)
    program = packed(DENSE[shapes], cpu_kernels, as_folder(name))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ours = torch.cat(paged_logits(program, sequences, steps(), 7, wanted=True))
        assert torch.equal(ours.isnan(), expected.isnan())
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())
    assert expected.nan_to_num().std() > 0.05, "logits that are all alike would say nothing"


@pytest.mark.parametrize("name", ["int8", "int4", "w4a8", "fp8"])
def test_quantized_layers_in_one_call_are_those_of_plain_torch(
    name: str, paged_logits: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token alone, and of up to nine beside each other: sums of the attention and of decoded weights are in another order there, by which an
    input can be rounded to the code beside it."""
    sequences = [torch.randint(0, 67, (length,), generator=torch.Generator().manual_seed(length)) for length in (1, 9, 5)]
    together = [[(0, 1)], [(1, 9)], [(2, 2)], [(2, 3)]]
    reference = packed(QWEN3, select("reference"), as_folder(name))
    expected = torch.cat(paged_logits(reference, sequences, together))
    monkeypatch.setattr(decoder_module, "run_layer", None)
    ours = torch.cat(paged_logits(packed(QWEN3, select("cpu"), as_folder(name)), sequences, together))
    torch.testing.assert_close(ours, expected, rtol=0, atol=0.06 * float(expected.std()))


@pytest.mark.parametrize("name", ["int8", "w4a8", "int4"])
def test_threads_that_share_each_product_of_a_wide_layer_have_the_bits_of_one(name: str, paged_logits: Callable[..., list[Tensor]]) -> None:
    kernels, shapes = select("cpu"), replace(QWEN3, hidden_size=640, intermediate_size=1100, num_attention_heads=10, head_dim=64)
    sequences = [torch.arange(3), torch.arange(9), torch.arange(5)]
    computed = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        computed.append(torch.cat(paged_logits(packed(shapes, kernels, as_folder(name)), sequences, [[(0, 1)], [(0, 2), (1, 9)], [(2, 1)], [(2, 4)]])))
    assert torch.equal(*computed)


def test_codes_that_are_decoded_for_inputs_in_int8_are_multiplied_one_by_one(
    paged_logits: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, run_layer = list[int](), decoder_module.run_layer

    def noted(batch: Any, weights: Any, *state: Any) -> tuple[Tensor, Tensor]:
        ran.append(weights.attention.index)
        return run_layer(batch, weights, *state)

    monkeypatch.setattr(decoder_module, "run_layer", noted)
    by_groups = Scheme("int8", 32, inputs="int8")
    paged_logits(packed(QWEN3, select("cpu"), lambda place, weight: round_to_nearest(weight, by_groups)), [torch.arange(3)], [[(0, 3)]])
    assert ran == [0, 1]
