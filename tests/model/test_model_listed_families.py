"""Every family that is listed in ``tandem.model.families``, against transformers on a tiny random folder of its shape: what engine and trainer compute."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from listed_families import SEQUENCES, TINY, Tiny, logits_of, packed_hidden, peer_logits
from torch import Tensor

from tandem.config.lora import LINEAR_ATTENTION_MODULES, LINEAR_MODULES, LoraConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.kernels.mixed import Precision, in_precision
from tandem.layout.equal_beginnings import computes_beginnings_once
from tandem.layout.parameters import is_of_adapter
from tandem.model.decoder import Decoder
from tandem.model.family import all_families
from tandem.model.huggingface.model_folder import load_model, read_tensors, save_model, to_huggingface
from tandem.model.huggingface.peft_folder import merged_tensors
from tandem.planner.model_sizes import read_model_sizes

RANK, SCALE = 3, 2.0


def test_every_listed_family_has_a_row() -> None:
    assert sorted(TINY) == sorted(all_families())


@pytest.mark.parametrize("kernels_name", ["reference", "cpu"])
def test_logits_are_those_of_transformers(tiny: Tiny, kernels_name: Literal["reference", "cpu"]) -> None:
    theirs = peer_logits(tiny.peer)
    assert theirs.std() > 0.3 or theirs.abs().max() > 0.9
    decoder = load_model(tiny.folder, select(kernels_name))
    plain = logits_of(decoder)
    assert (plain - theirs).abs().max() < 1e-4
    decoder.pack()
    assert torch.equal(logits_of(decoder), plain)


def test_what_updates_compute_once_is_known_of_the_shapes(tiny: Tiny) -> None:
    decoder = load_model(tiny.folder, select("cpu"))
    assert decoder.computes_beginnings_once == computes_beginnings_once(decoder.shapes, TrainerConfig(), ParallelConfig())
    if decoder.computes_beginnings_once:
        decoder.recompute = "full"
        assert not decoder.computes_beginnings_once
        assert not computes_beginnings_once(decoder.shapes, TrainerConfig(recompute="full"), ParallelConfig())


@pytest.mark.full
def test_logits_in_bf16_are_as_near_to_those_in_fp32_as_transformers_own(tiny: Tiny, record_property: Callable[[str, object], None]) -> None:
    """Prints the differences to transformers, relative to the norm of its logits in fp32: the median of all tokens, as rounding sends some to other experts."""
    exact = peer_logits(tiny.peer)
    away = lambda logits: float(((logits.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
    theirs = away(peer_logits(copy.deepcopy(tiny.peer).to(torch.bfloat16)))
    differences = {}
    for precision in ("fp32", "bf16"):
        kernels = in_precision(select("cpu"), precision, torch.device("cpu"))  # type: ignore[arg-type]
        differences[precision] = away(logits_of(load_model(tiny.folder, kernels)))
        record_property(precision, differences[precision])
        print(f"{tiny.family}, {precision}: {differences[precision]:.1e} from transformers in fp32, which is {theirs:.1e} from itself in bf16")
    assert differences["fp32"] < 1e-5 and differences["bf16"] < 1.2 * theirs


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engine_and_trainer_agree_bit_for_bit(
    tiny: Tiny, precision: Precision, packed_logits: Callable[..., list[Tensor]], paged_logits: Callable[..., list[Tensor]]
) -> None:
    """Over a paged cache, in chunks, interleaved and token by token, with packed weights."""
    kernels = in_precision(select("cpu"), precision, torch.device("cpu"))
    trainer, engine = load_model(tiny.folder, kernels), load_model(tiny.folder, kernels, pack=True)
    trained = packed_logits(trainer, SEQUENCES)
    steps = ([(0, 40), (1, 40), (2, 40)], [(s, n) for n in (5, 7, 40) for s in (2, 0, 1)], [(s, 1) for _ in range(34) for s in (1, 0, 2)])
    for seed, schedule in enumerate(steps):
        # A step has each sequence once.
        paged = paged_logits(engine, SEQUENCES, [schedule[i : i + 3] for i in range(0, len(schedule), 3)], seed)
        assert all(torch.equal(a, b) for a, b in zip(paged, trained, strict=True))
    assert all(torch.equal(packed_logits(trainer, [s])[0], own) for s, own in zip(SEQUENCES, trained, strict=True))


def test_greedy_tokens_of_the_engine_are_those_of_transformers(tiny: Tiny) -> None:
    prompts = [s.tolist() for s in SEQUENCES]
    with LLM(str(tiny.folder), dtype="float32", max_model_len=80, kv_cache_tokens=512) as llm:
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        assert len(tokens) == 20
        with torch.no_grad():
            likeliest = tiny.peer(torch.tensor([prompt + tokens])).logits[0].argmax(-1)
        assert tokens == likeliest[len(prompt) - 1 : -1].tolist()


def with_adapter(tiny: Tiny, merged: Path) -> tuple[Decoder, dict[str, Tensor]]:
    """Returns a decoder with a random adapter on every matrix that may have one, and the adapter by name, and writes the folder ``merged``."""
    modules = LINEAR_MODULES if all_families()[tiny.family].experts is None else ("q_proj", "k_proj", "v_proj", "o_proj")
    if all_families()[tiny.family].latent is not None:
        modules = tuple(matrix.name for matrix in read_model_sizes(tiny.folder).attention_matrices)
    if read_model_sizes(tiny.folder).linear_attention is not None:
        modules += LINEAR_ATTENTION_MODULES
    decoder = load_model(tiny.folder, select("reference"), lora=LoraConfig(rank=RANK, alpha=SCALE * RANK, target_modules=modules))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            if is_of_adapter(name):
                tensor.normal_(0.0, 0.1, generator=generator)
    adapter = {name: tensor for name, tensor in to_huggingface(decoder) if is_of_adapter(name)}
    save_model(decoder, merged, tensors=merged_tensors(dict(read_tensors(tiny.folder)), adapter, decoder.shapes))
    return decoder, adapter


def test_an_adapter_computes_what_transformers_computes_with_merged_weights(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder, _ = with_adapter(tiny, tmp_path / "merged")
    theirs = peer_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval())
    assert (theirs - peer_logits(tiny.peer)).abs().max() > 1e-2
    assert (logits_of(decoder) - theirs).abs().max() < 1e-4


def test_gradients_of_an_adapter_are_those_of_merged_weights_in_transformers_by_the_chain_rule(tiny: Tiny, tmp_path: Path) -> None:
    """With W + s B A in place of W, the gradient of A is s B' G and that of B is s G A', where G is that of the merged matrix."""
    from transformers import AutoModelForCausalLM

    decoder, adapter = with_adapter(tiny, tmp_path / "merged")
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    sum(-peer(s.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, s[1:, None]).sum() for s in SEQUENCES).backward()
    inputs, targets = [s[:-1] for s in SEQUENCES], torch.cat([s[1:] for s in SEQUENCES])
    (-decoder.token_logprobs(packed_hidden(decoder, inputs), torch.arange(len(targets)), targets, 1.0, len(targets)).raw.sum()).backward()
    before = {name: tensor.detach().clone() for name, tensor in adapter.items()}
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for parameter in decoder.parameters():
            if parameter.grad is not None:
                parameter.copy_(parameter.grad)
    # Saved as a folder, because transformers names and stacks some matrices differently in memory.
    peer.save_pretrained(tmp_path / "gradients")
    merged, ours = dict(read_tensors(tmp_path / "gradients")), dict(to_huggingface(decoder))
    assert len(adapter) >= 4
    for name in adapter:
        module, _, side = name.partition(".lora_")
        a, b, gradient = before[f"{module}.lora_A.weight"], before[f"{module}.lora_B.weight"], merged[f"{module}.weight"].float()
        expected = SCALE * (b.t() @ gradient if side == "A.weight" else gradient @ a.t())
        assert expected.norm() > 0 and (ours[name] - expected).norm() <= 1e-3 * expected.norm(), name


@pytest.mark.parametrize(("family", "kind"), [("phi3", {"rope_type": "default"}), ("glm4", {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3})])
def test_a_part_of_each_head_that_is_rotated_is_that_of_transformers(
    family: str, kind: dict[str, Any], peer_model: Callable[..., Any], tmp_path: Path
) -> None:
    rope = {**kind, "rope_theta": 1e4, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75}
    peer = peer_model(family, vocab_size=40, head_dim=16, rope_parameters=rope)
    peer.save_pretrained(tmp_path / "model")
    decoder = load_model(tmp_path / "model", select("cpu"))
    assert decoder.shapes.rotated_size == 12
    assert (logits_of(decoder) - peer_logits(peer)).abs().max() < 1e-4
