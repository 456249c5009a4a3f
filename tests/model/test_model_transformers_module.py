"""Models that a module of transformers computes (``model.implementation: transformers``), against transformers itself: numbers, bits, folders, refusals."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.config.implementation import Implementation
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.kernels.mixed import in_precision
from tandem.layout.parameters import parameter_count
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import load_model, load_tensors, read_tensors, save_model, to_huggingface
from tandem.model.transformers_module.decoder import TransformersDecoder
from tandem.model.transformers_module.read import from_json, to_json
from tandem.trainer.optimizers.make import is_hidden, make_optimizer, matrices_of
from tandem.trainer.optimizers.muon import Muon, newton_schulz
from tandem.types import UserError

BY_TRANSFORMERS = Implementation("transformers")
TYPES: dict[str, dict[str, Any]] = {
    "arcee": {"head_dim": 16},
    "cohere": {"hidden_size": 64, "logit_scale": 0.7, "use_qk_norm": True},
    "dots1": {
        "hidden_size": 64, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    },
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "ernie4_5_moe": {"hidden_size": 64, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 40, "moe_layer_start_index": 1},
    "exaone4": {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 4},
    "glm": {"head_dim": 16, "attention_bias": True},
    "gpt2": {"hidden_size": 64},
    "gpt_neox": {"hidden_size": 64},
    "granite": {"hidden_size": 64, "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.3},
    "granitemoe": {"hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granitemoeshared": {"hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "helium": {"hidden_size": 64, "head_dim": 16},
    "nanochat": {"hidden_size": 64, "final_logit_softcapping": 0.6},
    "nemotron": {"hidden_size": 64, "attention_bias": True},
    "olmo": {"clip_qkv": 0.3},
    "mixtral": {"hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "persimmon": {"hidden_size": 64},
    "phi": {"hidden_size": 64, "qk_layernorm": True},
    "qwen2_moe": {"hidden_size": 64, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "seed_oss": {"head_dim": 16, "attention_bias": True},
    "stablelm": {"hidden_size": 64, "qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": 9},
    "vaultgemma": {
        "head_dim": 16, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 1.0, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
    },
}  # fmt: skip
"""By ``model_type``: keys of a ``config.json`` beside the sizes of ``peer_model``."""
QUICK = "gpt_neox"
EACH_TYPE = pytest.mark.parametrize("model_type", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in TYPES])
SEQUENCES = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]


@pytest.fixture(scope="module")
def make_tiny(peer_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """``make_tiny(model_type)`` returns a random model of transformers and its folder."""

    def make(model_type: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(model_type)
        peer = peer_model(model_type, **TYPES[model_type])
        peer.save_pretrained(folder)
        return peer, folder

    return make


@pytest.fixture(scope="module")
def peer_config() -> Callable[..., Any]:
    """``peer_config(model_type, **keys)`` returns a small configuration of transformers."""
    from transformers import AutoConfig

    small = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 80}
    return lambda model_type, **keys: AutoConfig.for_model(model_type, **{**small, **keys})


def packed_hidden(decoder: Decoder, sequences: list[Tensor]) -> Tensor:
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
    return decoder(torch.cat(sequences), torch.cat([torch.arange(len(s)) for s in sequences]), PackedContext(bounds, max(map(len, sequences))))


def peer_logits(peer: Any) -> Tensor:
    return torch.cat([peer(s.unsqueeze(0)).logits[0] for s in SEQUENCES])


@EACH_TYPE
def test_logits_gradients_and_the_written_folder_are_those_of_transformers(model_type: str, make_tiny: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    peer, folder = make_tiny(model_type)
    decoder = load_model(folder, select("reference", torch.float64), dtype=torch.float64, implemented_by=BY_TRANSFORMERS)
    peer = peer.double()
    if peer._can_set_experts_implementation():
        # torch's product by groups is not there in float64.
        peer.set_experts_implementation("eager")
    assert isinstance(decoder, TransformersDecoder) and parameter_count(decoder.shapes) == sum(p.numel() for p in peer.parameters())
    weights = torch.randn(sum(map(len, SEQUENCES)), 61, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = decoder.logits(packed_hidden(decoder, SEQUENCES)), peer_logits(peer)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    own = dict(decoder.network.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in peer.parameters() if p.requires_grad)
    assert all(p.grad is not None and not p.grad.any() for p in decoder.kept.parameters())
    for name, parameter in peer.named_parameters():
        if not parameter.requires_grad:
            continue
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-6 * largest)
    save_model(decoder, tmp_path / "saved", tensors=to_huggingface(decoder), like=folder)
    read, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True, dtype=torch.float64)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(tensor.equal(peer.state_dict()[name]) for name, tensor in read.state_dict().items())


@EACH_TYPE
def test_log_probabilities_of_some_tokens_are_the_same_with_and_without_gradient(model_type: str, make_tiny: Any) -> None:
    decoder = load_model(make_tiny(model_type)[1], select("auto"), implemented_by=BY_TRANSFORMERS)
    tokens, bounds = torch.cat(SEQUENCES), torch.tensor([0, *map(len, SEQUENCES)]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])
    rows = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))[: len(tokens) // 2]
    arguments = tokens, positions, PackedContext(bounds, max(map(len, SEQUENCES))), rows, tokens.roll(-1)[rows], 1.0
    trained = decoder.outputs(*arguments).logprobs
    with torch.no_grad():
        predicted = decoder.outputs(*arguments).logprobs
    assert trained is not None and predicted is not None and trained.raw.requires_grad and predicted.raw.equal(trained.raw)


@EACH_TYPE
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full), pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_token_has_the_same_bits_in_the_trainer_and_the_engine_however_tokens_come(
    model_type: str, precision: str, make_tiny: Any, packed_logits: Callable[..., list[Tensor]], paged_logits: Callable[..., list[Tensor]]
) -> None:
    _, folder = make_tiny(model_type)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    kernels = in_precision(select("auto", dtype), "bf16" if precision == "bf16" else "fp32", torch.device("cpu"))
    trained = load_model(folder, kernels, dtype=dtype, implemented_by=BY_TRANSFORMERS)
    served = load_model(folder, kernels, dtype=dtype, pack=True, implemented_by=BY_TRANSFORMERS)
    with torch.no_grad():
        expected = packed_logits(trained, SEQUENCES)
        chunks = [[(0, 5), (2, 16)], [(0, 7), (1, 1), (2, 3)], [(1, 1), (2, 64)], [(0, 64)]]
        one_by_one = [[(s, 1)] for s in range(3) for _ in SEQUENCES[s]]
        others = [
            [packed_logits(trained, [each])[0] for each in SEQUENCES], packed_logits(served, SEQUENCES), paged_logits(served, SEQUENCES, chunks),
            paged_logits(served, SEQUENCES, one_by_one), paged_logits(trained, SEQUENCES, chunks),
        ]  # fmt: skip
        hidden, targets = packed_hidden(trained, SEQUENCES), torch.cat(SEQUENCES).roll(-1)
        logprobs = trained.token_logprobs(hidden, torch.arange(len(hidden)), targets, 1.0, len(hidden)).raw
        assert logprobs.equal(kernels.logits_logprobs(torch.cat(others[1]), targets))
    assert [[a.equal(b) for a, b in zip(expected, other, strict=True)] for other in others] == [[True] * 3] * 5


def test_the_matrices_of_experts_in_one_parameter_are_those_of_the_folder(make_tiny: Any) -> None:
    decoder = load_model(make_tiny("qwen3_moe")[1], select("auto"), implemented_by=BY_TRANSFORMERS)
    stacked = {"layers.1.mlp.experts.gate_up_proj": (40, 40), "layers.1.mlp.experts.down_proj": (48,)}
    stacks = matrices_of(decoder, list(stacked)).stacks
    assert {name: stack.rows for name, stack in stacks.items()} == stacked
    in_folder = load_model(make_tiny("granitemoe")[1], select("auto"), implemented_by=BY_TRANSFORMERS)
    as_one = {"layers.1.block_sparse_moe.experts.gate_up_proj": (80, 80), "layers.1.block_sparse_moe.experts.down_proj": (64,)}
    assert {name: stack.rows for name, stack in matrices_of(in_folder, list(as_one)).stacks.items()} == as_one
    views, whole = dict(to_huggingface(decoder)), dict(decoder.named_parameters())["layers.1.mlp.experts.gate_up_proj"]
    assert views["model.layers.1.mlp.experts.5.up_proj.weight"].equal(whole[5, 40:])


ROUTERS = {
    "hunyuan_v1_moe": ("mlp.gate.wg",), "olmoe": ("mlp.gate",), "qwen2_moe": ("mlp.gate", "mlp.shared_expert_gate"),
}  # fmt: skip
"""Within a layer; ``gate`` of most types is no linear layer but a class of its own."""


@pytest.mark.parametrize("model_type", ROUTERS)
def test_optimizers_and_adapters_leave_routers_out_and_no_precision_of_products_rounds_them(model_type: str, make_tiny: Any) -> None:
    kernels = in_precision(select("auto"), "bf16", torch.device("cpu"))
    decoder = load_model(make_tiny(model_type)[1], kernels, implemented_by=BY_TRANSFORMERS)
    module = decoder.shapes.transformers
    assert module is not None and not {name.rpartition(".")[2] for name in ROUTERS[model_type]} & set(module.adaptable)
    names = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in ROUTERS[model_type]}
    own = dict(decoder.named_parameters())
    left_out = {name for name, parameter in own.items() if parameter.ndim > 1 and not is_hidden(decoder, name, parameter)}
    assert left_out == {*names, "network.lm_head.weight"}
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    for name, each in decoder.network.named_modules():
        if name.endswith(ROUTERS[model_type]) and isinstance(each, torch.nn.Linear):
            each.register_forward_hook(lambda linear, given, output: seen.append((linear.weight, given[0], output)))
    packed_hidden(decoder, SEQUENCES)
    assert len(seen) == {"hunyuan_v1_moe": 2, "olmoe": 0, "qwen2_moe": 2}[model_type]
    for weight, given, output in seen:
        assert output.equal(select("auto").linear(given.reshape(-1, weight.shape[1]), weight, None).view_as(output))


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_optimizers_update_routers_as_adamw_does(optimizer: Any, make_tiny: Any) -> None:
    routers = {}
    for name in ("adamw", optimizer):
        decoder = load_model(make_tiny("qwen2_moe")[1], select("auto"), implemented_by=BY_TRANSFORMERS)
        updated = make_optimizer(decoder, TrainerConfig(optimizer=name, learning_rate=1e-2))
        for step in range(2):
            decoder.zero_grad()
            draw = torch.Generator().manual_seed(step)
            for _, parameter in sorted(decoder.named_parameters()):
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            updated.step(1e-2)
        routers[name] = {key: p.detach() for key, p in decoder.named_parameters() if key.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))}
    assert len(routers["adamw"]) == 4 and all(tensor.equal(routers["adamw"][key]) for key, tensor in routers[optimizer].items())


GATED = {
    "glm": {"mlp.gate_up_proj.weight": (80, 80), "mlp.down_proj.weight": (48,)},
    "gpt2": {"attn.c_attn.weight": (64,), "mlp.c_fc.weight": (64,), "mlp.c_proj.weight": (256,)},
    "gpt_neox": {"attention.query_key_value.weight": (192,), "mlp.dense_h_to_4h.weight": (80,), "mlp.dense_4h_to_h.weight": (64,)},
    "granitemoe": {"block_sparse_moe.experts.gate_up_proj": (80, 80), "block_sparse_moe.experts.down_proj": (64,), "self_attn.q_proj.weight": (64,)},
    "granitemoeshared": {"shared_mlp.input_linear.weight": (48, 48), "shared_mlp.output_linear.weight": (64,)},
    "mixtral": {"mlp.experts.gate_up_proj": (80, 80), "mlp.experts.down_proj": (64,)},
}  # fmt: skip
"""By ``model_type``: the rows of each matrix in some parameters of a layer, as the class of transformers multiplies and divides them."""


@pytest.mark.parametrize("model_type", GATED)
def test_muon_orthogonalises_gate_and_up_apart_however_the_folder_stacks_them(model_type: str, make_tiny: Any) -> None:
    decoder = load_model(make_tiny(model_type)[1], select("auto"), implemented_by=BY_TRANSFORMERS)
    own = dict(decoder.named_parameters())
    before = {name: p.detach().clone() for name, p in own.items()}
    optimizer = make_optimizer(decoder, TrainerConfig(optimizer="muon", learning_rate=1e-2, weight_decay=0.0))
    for name, parameter in own.items():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    assert isinstance(optimizer, Muon)
    optimizer.step(1e-2)
    for name, rows in GATED[model_type].items():
        gradient, changed = own[f"layers.1.{name}"].grad, own[f"layers.1.{name}"].detach() - before[f"layers.1.{name}"]
        assert optimizer.matrices.stacks[f"layers.1.{name}"].rows == rows and gradient is not None
        # The first direction is a multiple of the gradient, and the polar factor does not depend on its length.
        parts = [newton_schulz(part) * (0.2 * max(part.shape[-2:]) ** 0.5) for part in gradient.split(rows, -2)]
        torch.testing.assert_close(changed, torch.cat(parts, -2) * -1e-2, rtol=1e-3, atol=1e-5)


def test_what_is_estimated_of_a_mixture_is_what_a_token_visits(make_tiny: Any) -> None:
    expected = {"qwen2_moe": (2 * 32 + 48, True), "olmoe": (3 * 80, True), "dots1": ((80 + 2 * 40 + 40) // 2, True)}
    for model_type, sizes in expected.items():
        shapes = read_shapes(make_tiny(model_type)[1], implemented_by=BY_TRANSFORMERS)
        assert (shapes.intermediate_size, shapes.gated_mlp) == sizes


def test_kept_numbers_are_those_of_their_parameters_after_these_have_other_memory(make_tiny: Any) -> None:
    decoder = load_model(make_tiny("dots1")[1], select("auto"), implemented_by=BY_TRANSFORMERS)
    before = packed_hidden(decoder, SEQUENCES)
    for parameter in decoder.kept.parameters():
        parameter.data = torch.linspace(5.0, -5.0, parameter.numel()).view(parameter.shape)
    assert not packed_hidden(decoder, SEQUENCES).equal(before)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_gradients_with_recomputed_layers_have_the_same_bits(recompute: Any, make_tiny: Any) -> None:
    decoder = load_model(make_tiny(QUICK)[1], select("auto"), implemented_by=BY_TRANSFORMERS)
    gradients = []
    for each in ("none", recompute):
        decoder.recompute = each
        decoder.zero_grad()
        first = packed_hidden(decoder, SEQUENCES).square().sum()
        # Another pass in between must not change what a layer is computed again with.
        packed_hidden(decoder, SEQUENCES[:1])
        first.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in decoder.named_parameters() if parameter.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and all(gradients[0][name].equal(gradients[1][name]) for name in gradients[0])


def test_a_twin_takes_the_place_of_the_weights_and_gives_them_back(make_tiny: Any, packed_logits: Callable[..., list[Tensor]]) -> None:
    _, folder = make_tiny(QUICK)
    decoder = load_model(folder, select("auto"), pack=True, implemented_by=BY_TRANSFORMERS)
    twin, before = decoder.twin(), packed_logits(decoder, SEQUENCES)
    load_tensors(twin, ((name, tensor * 1.5) for name, tensor in read_tensors(folder)), pack=True)
    changed = packed_logits(twin, SEQUENCES)
    decoder.exchange_weights(twin)
    assert all(a.equal(b) for a, b in zip(packed_logits(decoder, SEQUENCES), changed, strict=True))
    load_tensors(decoder, read_tensors(folder), pack=True)
    assert all(a.equal(b) for a, b in zip(packed_logits(decoder, SEQUENCES), before, strict=True))
    assert [name for name, _ in read_tensors(folder)] == sorted(name for name, _ in decoder.shapes.transformers.parameters)


@pytest.mark.full
def test_a_process_without_torch_reads_the_same_shapes(make_tiny: Any) -> None:
    folder = make_tiny(QUICK)[1]
    code = (
        "import json, sys; from tandem.model.transformers_module.read import read_module_shapes, to_json; "
        "shapes = read_module_shapes(sys.argv[1], False); assert 'torch' not in sys.modules; print(json.dumps(to_json(shapes)))"
    )
    printed = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout
    shapes = read_shapes(folder, implemented_by=BY_TRANSFORMERS)
    assert from_json(json.loads(printed)) == shapes == from_json(json.loads(json.dumps(to_json(shapes))))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "it has layers of type 'linear_attention', which keep a state in the place of keys and values"),
    ("t5", {}, "it is an encoder with a decoder, and only models that are a decoder alone are trained and served"),
    (
        "jetmoe", {"num_local_experts": 4},
        "its 'model.layers.0.mlp.input_linear.weight' is no matrix, and JetMoeForCausalLM does not let other code compute it as experts",
    ),
    ("bloom", {}, "BloomForCausalLM does not let other code compute its attention (_supports_attention_backend)"),
    ("gpt_oss", {"num_local_experts": 4}, "its attention has a term that the kernels do not have ('s_aux')"),
    ("deepseek_v3", {"first_k_dense_replace": 2}, "its heads have 192 numbers for keys and 128 for values, which the KV cache does not hold"),
    (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "its rotary embedding is scaled by 'dynamic', which depends on the longest sequence of a batch",
    ),
    ("qwen3_next", {}, "it has layers of type 'linear_attention', which keep a state in the place of keys and values"),
    (
        "ernie4_5", {"head_dim": 15, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.8}},
        "its forward pass cannot be followed (Attempting to broadcast a dimension of length 16 at -1! Mismatching argument at index 1 had "
        "torch.Size([1, 1, 5, 16]); but expected shape should be broadcastabl)",
    ),
    ("bert", {"is_decoder": False}, "its attention is not causal attention with or without a sliding window"),
]


@pytest.mark.parametrize(
    ("model_type", "keys", "says"),
    [pytest.param(*row, id=row[0], marks=() if row[0] in ("mamba", "llama") else pytest.mark.full) for row in REFUSED],
)
def test_a_model_that_cannot_be_computed_is_refused_in_one_line_before_its_weights_are_read(
    model_type: str, keys: dict[str, Any], says: str, tmp_path: Path, peer_config: Callable[..., Any]
) -> None:
    peer_config(model_type, **keys).save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        read_shapes(tmp_path, implemented_by=BY_TRANSFORMERS)
    assert str(refused.value) == f"model '{tmp_path}' cannot be computed by transformers (model.implementation) here: {says}"


def test_code_in_a_folder_runs_only_where_it_is_asked_for(tmp_path: Path, make_tiny: Any) -> None:
    _, folder = make_tiny("ernie4_5")
    marker = tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.MyConfig", "AutoModelForCausalLM": "own.MyModel"}}
    (folder / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import Ernie4_5Config, Ernie4_5ForCausalLM\n"
        "class MyConfig(Ernie4_5Config):\n    model_type = 'mine'\n"
        "class MyModel(Ernie4_5ForCausalLM):\n    config_class = MyConfig\n"
    )
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"set model\.trust_remote_code to true"):
        read_shapes(folder, implemented_by=BY_TRANSFORMERS)
    with pytest.raises(UserError, match=r"model\.implementation: transformers"):
        read_shapes(folder)
    assert not marker.exists()
    shapes = read_shapes(folder, implemented_by=Implementation("transformers", trust_remote_code=True))
    assert marker.exists() and shapes.transformers is not None and shapes.transformers.class_name == "MyModel"


CHANGED_LOGITS: dict[str, tuple[float, float | None] | str] = {
    "output.logits * 2.5": (0.4, None),
    "output.logits": (1.0, None),
    "3.0 * torch.tanh(output.logits / 3.0)": (1.0, 3.0),
    "3.0 * torch.tanh(0.5 * output.logits / 3.0)": (2.0, 3.0),
    "output.logits + 1": "changes its logits other than by a factor and a soft cap",
    "torch.relu(output.logits)": "changes its logits other than by a factor and a soft cap",
    "output.logits[..., :-1]": "changes its logits other than by a factor and a soft cap",
    "output.logits * output.logits.shape[0] * float(self.lm_head.weight.sum())": "cannot be followed",
}


@pytest.mark.parametrize("changed", CHANGED_LOGITS)
def test_logits_that_the_module_changes_are_a_factor_and_a_cap_or_refused(changed: str, tmp_path: Path, peer_config: Callable[..., Any]) -> None:
    peer_config("ernie4_5", head_dim=16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.MyConfig", "AutoModelForCausalLM": "own.MyModel"}}
    (tmp_path / "own.py").write_text(
        "import torch\nfrom transformers import Ernie4_5Config, Ernie4_5ForCausalLM\n"
        "class MyConfig(Ernie4_5Config):\n    model_type = 'mine'\n"
        "class MyModel(Ernie4_5ForCausalLM):\n    config_class = MyConfig\n    def forward(self, **given):\n        output = super().forward(**given)\n"
        f"        output.logits = {changed}\n        return output\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected, trusted = CHANGED_LOGITS[changed], Implementation("transformers", trust_remote_code=True)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            read_shapes(tmp_path, implemented_by=trusted)
    else:
        shapes = read_shapes(tmp_path, implemented_by=trusted)
        assert (shapes.multipliers.logits_scaling, shapes.logit_cap) == expected


def test_logits_that_a_module_changes_after_a_head_with_a_bias_are_refused(tmp_path: Path, peer_config: Callable[..., Any]) -> None:
    peer_config("phi").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.MyConfig", "AutoModelForCausalLM": "own.MyModel"}}
    (tmp_path / "own.py").write_text(
        "from transformers import PhiConfig, PhiForCausalLM\n"
        "class MyConfig(PhiConfig):\n    model_type = 'mine'\n"
        "class MyModel(PhiForCausalLM):\n    config_class = MyConfig\n    def forward(self, **given):\n        output = super().forward(**given)\n"
        "        output.logits = output.logits * 2.5\n        return output\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"its head has a bias, and it changes the hidden states before it or its logits after it$"):
        read_shapes(tmp_path, implemented_by=Implementation("transformers", trust_remote_code=True))


def test_a_folder_whose_code_or_tensors_change_is_described_again(make_tiny: Any) -> None:
    _, folder = make_tiny("ernie4_5")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.MyConfig", "AutoModelForCausalLM": "own.MyModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import Ernie4_5Config, Ernie4_5ForCausalLM\nfrom .part import IGNORED\n"
        "class MyConfig(Ernie4_5Config):\n    model_type = 'mine'\n"
        "class MyModel(Ernie4_5ForCausalLM):\n    config_class = MyConfig\n    _keys_to_ignore_on_load_unexpected = [IGNORED]\n"
    )
    trusted = Implementation("transformers", trust_remote_code=True)
    for ignored in ("one", "two"):
        (folder / "part.py").write_text(f"IGNORED = {ignored!r}\n")
        shapes = read_shapes(folder, implemented_by=trusted)
        assert shapes.transformers is not None and shapes.transformers.ignored == (ignored,)
    save_file({"further": torch.zeros(2)}, folder / "further.safetensors")
    with pytest.raises(UserError, match="its folder has a tensor 'further'"):
        read_shapes(folder, implemented_by=trusted)


def test_an_unknown_family_is_refused_with_the_nearest_one_and_the_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen22"}))
    with pytest.raises(UserError, match=r"; other decoders of transformers are computed, slower, with model\.implementation: .*\. Did you mean 'qwen2'\?"):
        read_shapes(tmp_path)
    with pytest.raises(UserError, match=r"transformers [0-9.]+ has no model_type 'qwen22'"):
        read_shapes(tmp_path, implemented_by=BY_TRANSFORMERS)
    llama = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 80, "vocab_size": 61}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **llama, "final_logit_softcapping": 3.0}))
    with pytest.raises(UserError, match=r"has no such term; remove the key if .* or set model.implementation to transformers"):
        read_shapes(tmp_path)
