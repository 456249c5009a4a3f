"""Every family that is listed in ``tandem.model.families``, against transformers on a tiny random folder of its shape: a new family passes by a row here."""

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from tandem.backends.megatron.model_check import missing_block
from tandem.backends.vllm.model_check import check_model
from tandem.config.lora import LINEAR_ATTENTION_MODULES, LINEAR_MODULES, LoraConfig
from tandem.config.parallel import ParallelConfig
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.jobs.convert import convert
from tandem.kernels import select
from tandem.kernels.mixed import Precision, in_precision
from tandem.layout.expert_shapes import SHARED_GATE
from tandem.layout.mesh_check import check_layout
from tandem.layout.parameters import is_of_adapter, parameter_count
from tandem.layout.sharding import ShardSpec, shard_slices
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.families_document import with_table
from tandem.model.family import all_families
from tandem.model.huggingface.model_folder import load_model, load_tensors, read_tensors, save_model, to_huggingface
from tandem.model.huggingface.peft_folder import merged_tensors
from tandem.model.huggingface.safetensors_file import read_file, write_file
from tandem.model.layer import factor_of_norm
from tandem.model.quantization.calibration import END, chunks_of, inputs_of
from tandem.model.quantization.formats import read_format
from tandem.model.quantization.load import load_quantized
from tandem.model.quantization.quantize import QuantizeOptions, quantize_folder
from tandem.model.quantization.writing import Method, cannot
from tandem.planner.model_sizes import read_model_sizes
from tandem.text.characters import make_character_tokenizer
from tandem.types import UserError

LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4, "attention_bias": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.3}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
TINY: dict[str, dict[str, Any]] = {
    "cohere": {"head_dim": 16, "use_qk_norm": True, "logit_scale": 0.3, "attention_bias": True},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "deepseek_v2": {
        **LATENT, "num_hidden_layers": 3, "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
        "rope_parameters": YARN,
    },
    "deepseek_v3": {
        **LATENT, "num_hidden_layers": 3, "q_lora_rank": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "rope_parameters": YARN,
    },
    "gemma": {"head_dim": 16, "attention_bias": True},
    "gemma2": {
        "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 9, "query_pre_attn_scalar": 400, "final_logit_softcapping": 3.0, "layer_types": [
            "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"
        ], "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True, "head_dim": 16,
    },
    "gpt_oss": {
        "num_hidden_layers": 3, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
    },
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 0.8, "attention_bias": True,
    },
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9, "head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {"attention_bias": True},
    "olmo3": {
        "num_hidden_layers": 4, "sliding_window": 9, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "phi3": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen2_moe": {**EXPERTS, "num_hidden_layers": 3, "shared_expert_intermediate_size": 40},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "qwen3_next": {
        **EXPERTS, "num_hidden_layers": 4, "shared_expert_intermediate_size": 40, "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3,
    },
    "smollm3": {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9},
}  # fmt: skip
"""By ``model_type``: keys of a ``config.json`` that turn on what the family has beside the sizes of ``peer_model``."""
BY_OTHERS = ("cohere2", "deepseek_v2", "gemma", "gemma3_text", "glm4", "glm4_moe", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen2_moe", "qwen3")
"""Families whose terms are all in others, so that ``make test`` leaves them out."""
SEQUENCES = [torch.randint(3, 40, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]


class Tiny(NamedTuple):
    """A random model of ``family`` in transformers, and the folder that it was saved to, with a tokenizer."""

    family: str
    peer: Any
    folder: Path


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.full if name in BY_OTHERS else ()) for name in sorted(all_families())]
)
def tiny(request: pytest.FixtureRequest, peer_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    peer = peer_model(family, vocab_size=40, **TINY[family])
    make_character_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789", folder / "model")
    peer.save_pretrained(folder / "model")
    yield Tiny(family, peer, folder / "model")


def packed_hidden(decoder: Decoder, sequences: list[Tensor]) -> Tensor:
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return decoder(torch.cat(sequences), positions, PackedContext(bounds, max(map(len, sequences))))


def logits_of(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        return decoder.logits(packed_hidden(decoder, SEQUENCES))


def peer_logits(peer: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([peer(s.unsqueeze(0)).logits[0] for s in SEQUENCES])


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


def test_an_adapter_computes_what_transformers_computes_with_merged_weights(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    modules = LINEAR_MODULES if all_families()[tiny.family].experts is None else ("q_proj", "k_proj", "v_proj", "o_proj")
    if all_families()[tiny.family].latent is not None:
        modules = tuple(matrix.name for matrix in read_model_sizes(tiny.folder).attention_matrices)
    if read_model_sizes(tiny.folder).linear_attention is not None:
        modules += LINEAR_ATTENTION_MODULES
    decoder = load_model(tiny.folder, select("reference"), lora=LoraConfig(rank=3, alpha=6.0, target_modules=modules))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            if is_of_adapter(name):
                tensor.normal_(0.0, 0.1, generator=generator)
    adapter = {name: tensor for name, tensor in to_huggingface(decoder) if is_of_adapter(name)}
    save_model(decoder, tmp_path / "merged", tensors=merged_tensors(dict(read_tensors(tiny.folder)), adapter, decoder.shapes))
    theirs = peer_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval())
    assert (theirs - peer_logits(tiny.peer)).abs().max() > 1e-2
    assert (logits_of(decoder) - theirs).abs().max() < 1e-4


def test_a_folder_goes_there_and_back_and_its_parameters_are_counted(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = load_model(tiny.folder, select("reference"))
    save_model(decoder, tmp_path / "ours", eos_token_id=2, bos_token_id=1, pad_token_id=0)
    returned, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval(), tiny.peer.state_dict()
    assert type(returned) is type(tiny.peer)
    assert returned.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in returned.state_dict().items())
    # Where tensors lie in memory may change the last bits of transformers.
    assert (peer_logits(returned) - peer_logits(tiny.peer)).abs().max() < 1e-5
    for folder in (tiny.folder, tmp_path / "ours"):
        sizes = read_model_sizes(folder)
        assert sizes == decoder.shapes
        assert parameter_count(sizes) == tiny.peer.num_parameters()


def test_calibration_computes_what_the_decoder_computes(tiny: Tiny) -> None:
    decoder = load_model(tiny.folder, select("reference"))
    if decoder.shapes.latent is not None or decoder.shapes.linear_attention is not None:
        pytest.skip("latent and linear attention are not quantized with calibration")
    tokens = SEQUENCES[0]
    (chunk,) = chunks_of(decoder, [tokens])
    for index in decoder.layer_numbers:
        chunk = chunk._replace(residual=inputs_of(decoder, index, END, chunk))
    with torch.no_grad():
        norm = factor_of_norm(decoder.norm.weight, decoder.shapes.norms_from_one)
        hidden = decoder.kernels.rms_norm(chunk.residual, norm, decoder.shapes.rms_norm_eps, decoder.shapes.centred_norms)
        assert torch.equal(hidden, packed_hidden(decoder, [tokens]))


@pytest.mark.parametrize("method", ["int8", "gptq", "awq"])
def test_a_quantized_folder_is_near_to_the_float_one(tiny: Tiny, method: Method, tmp_path: Path) -> None:
    decoder = load_model(tiny.folder, select("reference"))
    quantize = lambda: quantize_folder(
        tiny.folder, tmp_path / method, QuantizeOptions(method, group_size=0), select("reference"), SEQUENCES[::2] * 4, lambda done, of: None
    )
    if (reason := cannot(decoder.shapes, method)) is not None:
        with pytest.raises(UserError, match=re.escape(f"has {reason}; choose another method")):
            quantize()
        return
    if method == "awq" and not (decoder.shapes.parallel_blocks or decoder.shapes.post_norms):
        pytest.skip("AWQ of blocks one behind the other has tests of its own")
    quantize()
    stored = read_format(tmp_path / method)
    assert stored is not None
    exact, quantized = logits_of(decoder), logits_of(load_quantized(tmp_path / method, stored, select("reference")))
    # Relative to the spread of the logits: 8 bits, and 4 bits of weights that have no structure to lose. In a mixture a few tokens change their experts.
    limit = {"int8": 0.08 if decoder.shapes.experts is None else 0.16, "gptq": 0.4, "awq": 0.45}[method]
    assert 0 < (quantized - exact).square().mean().sqrt() / exact.std() < limit


def test_four_bits_are_computed_as_transformers_computes_what_compressed_tensors_decodes(tiny: Tiny, tmp_path: Path) -> None:
    unpack_from_int32 = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    quantize_folder(tiny.folder, tmp_path / "rtn", QuantizeOptions("rtn", group_size=32), select("reference"), [], lambda done, of: None)
    packed = dict(read_file(tmp_path / "rtn" / "model.safetensors"))
    modules = [name.removesuffix("_packed") for name in packed if name.endswith("weight_packed")]
    shapes = read_model_sizes(tiny.folder)
    if shapes.experts is not None:
        # Three matrices of each expert, under its own number; routers and the gate of shared experts are plain.
        of_experts = [name for name in modules if ".experts." in name]
        mixtures = sum(shapes.experts_of(layer) is not None for layer in range(shapes.num_hidden_layers))
        assert len(of_experts) == 3 * shapes.experts.num_experts * mixtures
        assert not any(name.endswith((f"{shapes.experts.names.router}.weight", SHARED_GATE)) for name in modules)
    for weight in modules:
        codes = unpack_from_int32(packed.pop(f"{weight}_packed"), 4, torch.Size(packed.pop(f"{weight}_shape").tolist()))
        scales = packed.pop(f"{weight}_scale")
        packed[weight] = codes.float() * scales.repeat_interleave(32, 1)[:, : codes.shape[1]]
    plain = load_model(tiny.folder, select("reference"))
    if all_families()[tiny.family].is_renamed and shapes.experts is not None:
        load_tensors(plain, packed.items())
        save_model(plain, tmp_path / "decoded", like=tiny.folder)
    else:
        shutil.copytree(tiny.folder, tmp_path / "decoded")
        write_file(tmp_path / "decoded" / "model.safetensors", [*packed.items()])
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoded", dtype=torch.float32).eval()
    stored = read_format(tmp_path / "rtn")
    assert stored is not None
    ours, theirs = logits_of(load_quantized(tmp_path / "rtn", stored, select("reference"))), peer_logits(peer)
    assert theirs.std() > 0.1 and (ours - theirs).abs().max() < 1e-4
    assert (theirs - logits_of(load_model(tiny.folder, select("reference")))).abs().max() > 1e-2, "rounding changes the logits"


def test_a_conversion_to_megatron_and_back_has_the_same_file_or_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    shapes = read_model_sizes(tiny.folder)
    if not shapes.further_terms:
        convert(tiny.folder, tmp_path / "megatron", to="megatron")
        convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
        before, after = (dict(read_file(folder / "model.safetensors")) for folder in (tiny.folder, tmp_path / "back"))
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        return
    with pytest.raises(UserError, match=f"the {tiny.family} model has {shapes.further_terms[0]}, which Megatron's layout"):
        convert(tiny.folder, tmp_path / "megatron", to="megatron")
    assert missing_block(shapes) == shapes.further_terms[0]


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


@pytest.mark.parametrize("case", [("glm4_moe", "model.layers.3.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")])
def test_layers_that_predict_further_tokens_are_left_out(case: tuple[str, str], peer_model: Callable[..., Any], tmp_path: Path) -> None:
    family, further = case
    peer = peer_model(family, **TINY[family])
    peer.save_pretrained(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in read_file(tmp_path / "model.safetensors")}
    write_file(tmp_path / "model.safetensors", [*tensors.items(), (further, torch.zeros(3, 3))])
    assert [name for name, _ in to_huggingface(load_model(tmp_path, select("reference"))) if name not in tensors] == []


def test_a_stack_with_rows_for_other_heads_is_named(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    peer_model("phi3").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_key_value_heads": 4}))
    with pytest.raises(UserError, match=r"tensor 'model.layers.0.self_attn.qkv_proj.weight' has shape \[96, 48\]; config.json requires 144 rows"):
        load_model(tmp_path / "model", select("reference"))


def test_vllm_is_refused_for_a_folder_with_other_names(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    peer_model("gpt_oss", **TINY["gpt_oss"]).save_pretrained(tmp_path)
    recipe: Any = None
    with pytest.raises(UserError, match=r"is a gpt_oss, whose folder names tensors otherwise than published weights do; set rollout\.backend to tandem"):
        check_model(read_model_sizes(tmp_path), "cpu", recipe)


def test_the_document_has_the_table_of_the_declarations() -> None:
    document = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert with_table(document) == document, "run python -m tandem.model.families_document docs/models.md"


def test_two_ranks_hold_every_parameter_once_or_the_model_is_refused_by_name(tiny: Tiny) -> None:
    shapes = read_model_sizes(tiny.folder)
    ranks = [ShardSpec(rank, 2) for rank in range(2)]
    if shapes.linear_attention is not None:
        with pytest.raises(UserError, match=f"'parallel.context' is 2; this {tiny.family} model has layers with linear attention, whose states"):
            check_layout(shapes, ParallelConfig(context=2))
    if shapes.qk_norm_all_heads:
        with pytest.raises(ValueError, match=r"norms of queries and keys are over all heads, .* use 1"):
            ranks[0].check(shapes)
        with pytest.raises(UserError, match=f"'parallel.tensor' is 2; this {tiny.family} model has norms of queries and keys over all heads: leave it at 1"):
            check_layout(shapes, ParallelConfig(tensor=2))
        return
    check_layout(shapes, ParallelConfig(tensor=2))
    for name, tensor in read_tensors(tiny.folder):
        parts = [shard_slices(shapes, name, tuple(tensor.shape), rank) for rank in ranks]
        if parts[0] != parts[1]:
            axis = next(i for i, (a, b) in enumerate(zip(*parts, strict=True)) if a != b)
            assert torch.equal(torch.cat([tensor[part] for part in parts], axis), tensor), name
