"""Megatron-Core's layout against a reader written here from the published layout, and round trips bit for bit."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.cli.main import main
from tandem.jobs.convert import convert
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes, SigmoidRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.families import mixtral, qwen2_moe
from tandem.model.huggingface.model_folder import read_tensors, save_model
from tandem.model.megatron.arguments import arguments_of, shapes_of
from tandem.model.megatron.layout import MegatronMesh
from tandem.types import UserError

DENSE = ModelShapes("qwen2", 131, 32, 4, 8, 4, 4, 48, 64, True, attention_bias=True)
NORMED = ModelShapes("qwen3", 131, 32, 4, 8, 2, 8, 48, 64, False, qk_norm=True)
LLAMA = ModelShapes("llama", 256, 32, 2, 4, 4, 8, 64, 64, False, attention_bias=True, output_bias=True, mlp_bias=True)
MIXTURE = ModelShapes("qwen3_moe", 131, 32, 4, 4, 2, 8, 48, 64, False, qk_norm=True, experts=ExpertShapes(4, 2, 24, dense_layers=(0,)))
MIXTRAL = ModelShapes("mixtral", 131, 32, 2, 4, 2, 8, 48, 64, False, experts=ExpertShapes(4, 2, 48, names=mixtral.NAMES))
QWEN2_MOE = ModelShapes(
    "qwen2_moe", 131, 32, 4, 4, 2, 8, 48, 64, False, attention_bias=True,
    experts=ExpertShapes(4, 2, 24, normalised=False, names=qwen2_moe.NAMES, shared_intermediate_size=40, shared_gate=True),
)
GLM = ModelShapes(
    "glm4_moe", 131, 32, 4, 4, 2, 8, 48, 64, False, attention_bias=True, qk_norm=True, rotary_fraction=0.5,
    experts=ExpertShapes(4, 2, 24, dense_layers=(0,), shared_intermediate_size=48, sigmoid=SigmoidRouting(2, 1, 1.7)),
)
DEEPSEEK_V2 = ModelShapes(
    "deepseek_v2", 131, 32, 4, 4, 4, 20, 48, 64, False, rotary_interleaved=True, latent=LatentAttention(16, 12, 8, 10),
    experts=ExpertShapes(4, 2, 24, normalised=False, shared_intermediate_size=48),
)
DEEPSEEK_V3 = ModelShapes(
    "deepseek_v3", 131, 32, 4, 4, 4, 20, 48, 64, False, rotary_interleaved=True, latent=LatentAttention(16, 12, 8, 10, 24),
    rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3),
    experts=ExpertShapes(8, 2, 24, dense_layers=(0, 1), shared_intermediate_size=24, sigmoid=SigmoidRouting(4, 2, 1.7)),
)
SMOLLM3 = ModelShapes("smollm3", 131, 32, 4, 4, 2, 8, 48, 64, True, unrotated_layers=(1, 3))
PHI3 = ModelShapes("phi3", 131, 32, 4, 4, 2, 8, 48, 64, False, rotary_fraction=0.75)
MISTRAL = ModelShapes("mistral", 131, 32, 4, 4, 2, 8, 48, 64, False, layer_windows=(9, 9, 9, 9))
WINDOWED = replace(NORMED, layer_windows=(None, 9, None, 9))
CASES = [
    (DENSE, MegatronMesh(2, 2)), (DENSE, MegatronMesh(4, 1)), (NORMED, MegatronMesh(2, 4)), (LLAMA, MegatronMesh(2, 2)), (LLAMA, MegatronMesh()),
    (MIXTURE, MegatronMesh(2, 2, 2)), (MIXTURE, MegatronMesh(1, 1, 4)), (MIXTRAL, MegatronMesh(2, 1, 2)),
    (MISTRAL, MegatronMesh(2, 2)),
    (QWEN2_MOE, MegatronMesh(2, 2, 2)), (GLM, MegatronMesh(2, 1, 4)), (DEEPSEEK_V2, MegatronMesh(4, 2, 2)), (DEEPSEEK_V3, MegatronMesh(2, 2, 4)),
    (DEEPSEEK_V3, MegatronMesh(1, 2, 1, 2)),
    # Interleaved pipelines.
    (DENSE, MegatronMesh(2, 2, 1, 2)), (MIXTURE, MegatronMesh(1, 2, 2, 2)), (replace(NORMED, num_hidden_layers=12), MegatronMesh(1, 2, 1, 3)),
    # Several ranks of a key-value head.
    (MISTRAL, MegatronMesh(4, 1)), (replace(NORMED, num_key_value_heads=1), MegatronMesh(4, 2)),
]  # fmt: skip


def model(folder: Path, shapes: ModelShapes, dtype: torch.dtype = torch.float32) -> Path:
    decoder = Decoder(shapes, select("reference", dtype), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    save_model(decoder, folder)
    return folder


def files(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns every rank's file by the name of its folder. The checkpoint was written by Tandem, so unpickling is safe."""
    return {path.parent.name: torch.load(path, weights_only=False) for path in folder.glob("*/mp_rank_*/model_optim_rng.pt")}


def published(folder: Path, shapes: ModelShapes, tp: int, pp: int, ep: int, vp: int) -> dict[str, torch.Tensor]:
    """Assembles the whole model from a Megatron checkpoint with Transformer Engine's names, by the rules of NVIDIA's converters."""
    found = {}
    groups, per_group, head = shapes.num_key_value_heads, shapes.num_attention_heads // shapes.num_key_value_heads, shapes.head_dim
    held = files(folder)

    def rank(t: int, place: tuple[int, int], e: int) -> dict[str, torch.Tensor]:
        name, (p, v) = f"mp_rank_{t:02d}", place
        if pp > 1:
            name += f"_{p:03d}"
        if ep > 1:
            name += f"_{e:03d}"
        return held[name]["model" if vp == 1 else f"model{v}"]

    def rows(name: str, p: tuple[int, int], e: int = 0) -> torch.Tensor:
        return torch.cat([rank(t, p, e)[name] for t in range(tp)], dim=0)

    def columns(name: str, p: tuple[int, int], e: int = 0) -> torch.Tensor:
        return torch.cat([rank(t, p, e)[name] for t in range(tp)], dim=1)

    def gate_and_up(name: str, p: tuple[int, int], e: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        gates, ups = [], []
        for t in range(tp):
            tensor = rank(t, p, e)[name]
            half = tensor.shape[0] // 2
            gates.append(tensor[:half])
            ups.append(tensor[half:])
        return torch.cat(gates), torch.cat(ups)

    found["model.embed_tokens.weight"] = rows("embedding.word_embeddings.weight", (0, 0))[: shapes.vocab_size]
    found["model.norm.weight"] = rank(0, (pp - 1, vp - 1), 0)["decoder.final_layernorm.weight"]
    if not shapes.tie_word_embeddings:
        found["lm_head.weight"] = rows("output_layer.weight", (pp - 1, vp - 1))[: shapes.vocab_size]
    for layer in range(shapes.num_hidden_layers):
        # ``get_transformer_layer_offset``: vp_rank * (layers // vp_size) + pp_rank * (layers // vp_size // pp_size).
        chunk, rest = divmod(layer, shapes.num_hidden_layers // vp)
        stage, local = divmod(rest, shapes.num_hidden_layers // vp // pp)
        p = (stage, chunk)
        m, h = f"decoder.layers.{local}.", f"model.layers.{layer}."
        if shapes.latent is not None:
            # MLASelfAttention with Transformer Engine: ``linear_*_down_proj`` is a duplicated TELinear, ``linear_*_up_proj`` a column-parallel one with a norm.
            a, s = f"{m}self_attention.linear_", f"{h}self_attn."
            ends = [("kv", "kv_a_proj_with_mqa", "kv_b_proj", "kv_a_layernorm")]
            if shapes.latent.q_lora_rank:
                ends.append(("q", "q_a_proj", "q_b_proj", "q_a_layernorm"))
            else:
                found[f"{s}q_proj.weight"] = rows(f"{a}q_proj.weight", p)
            for part, down, up, norm in ends:
                found[f"{s}{down}.weight"] = rank(tp - 1, p, 0)[f"{a}{part}_down_proj.weight"]
                found[f"{s}{up}.weight"] = rows(f"{a}{part}_up_proj.weight", p)
                found[f"{s}{norm}.weight"] = rank(tp - 1, p, ep - 1)[f"{a}{part}_up_proj.layer_norm_weight"]
            found[f"{h}input_layernorm.weight"] = rank(tp - 1, p, ep - 1)[f"{m}input_layernorm.weight"]
        else:
            found[f"{h}input_layernorm.weight"] = rank(tp - 1, p, ep - 1)[f"{m}self_attention.linear_qkv.layer_norm_weight"]
        for kind in () if shapes.latent is not None else ("weight", "bias") if shapes.attention_bias else ("weight",):
            q, k, v = [], [], []
            fused = rows(f"{m}self_attention.linear_qkv.{kind}", p)
            at = 0
            for _ in range(groups):
                q.append(fused[at : at + per_group * head])
                k.append(fused[at + per_group * head : at + (per_group + 1) * head])
                v.append(fused[at + (per_group + 1) * head : at + (per_group + 2) * head])
                at += (per_group + 2) * head
            assert at == fused.shape[0]
            for name, parts in (("q", q), ("k", k), ("v", v)):
                found[f"{h}self_attn.{name}_proj.{kind}"] = torch.cat(parts)
        found[f"{h}self_attn.o_proj.weight"] = columns(f"{m}self_attention.linear_proj.weight", p)
        if shapes.output_bias:
            found[f"{h}self_attn.o_proj.bias"] = rank(tp - 1, p, 0)[f"{m}self_attention.linear_proj.bias"]
        if shapes.qk_norm:
            found[f"{h}self_attn.q_norm.weight"] = rank(0, p, 0)[f"{m}self_attention.q_layernorm.weight"]
            found[f"{h}self_attn.k_norm.weight"] = rank(0, p, 0)[f"{m}self_attention.k_layernorm.weight"]
        if shapes.experts_of(layer) is None:
            found[f"{h}post_attention_layernorm.weight"] = rank(0, p, 0)[f"{m}mlp.linear_fc1.layer_norm_weight"]
            for kind in ("weight", "bias") if shapes.mlp_bias else ("weight",):
                gate, up = gate_and_up(f"{m}mlp.linear_fc1.{kind}", p)
                found[f"{h}mlp.gate_proj.{kind}"], found[f"{h}mlp.up_proj.{kind}"] = gate, up
            found[f"{h}mlp.down_proj.weight"] = columns(f"{m}mlp.linear_fc2.weight", p)
            if shapes.mlp_bias:
                found[f"{h}mlp.down_proj.bias"] = rank(0, p, 0)[f"{m}mlp.linear_fc2.bias"]
            continue
        block, names = ("block_sparse_moe", "w1 w3 w2") if shapes.architecture == "mixtral" else ("mlp", "gate_proj up_proj down_proj")
        found[f"{h}post_attention_layernorm.weight"] = rank(0, p, 0)[f"{m}pre_mlp_layernorm.weight"]
        found[f"{h}{block}.gate.weight"] = rank(0, p, 0)[f"{m}mlp.router.weight"]
        assert shapes.experts is not None
        for expert in range(shapes.experts.num_experts):
            e, place = divmod(expert, shapes.experts.num_experts // ep)
            one, two = (f"{m}mlp.experts.local_experts.{place}.linear_fc{i}.weight" for i in (1, 2))
            parts = (*gate_and_up(one, p, e), columns(two, p, e))
            for name, tensor in zip(names.split(), parts, strict=True):
                found[f"{h}{block}.experts.{expert}.{name}.weight"] = tensor
        if shapes.experts.sigmoid is not None:
            found[f"{h}mlp.gate.e_score_correction_bias"] = rank(0, p, ep - 1)[f"{m}mlp.router.expert_bias"]
        if shapes.experts.shared_intermediate_size:
            of = f"{h}mlp.shared_expert" + ("" if shapes.architecture == "qwen2_moe" else "s")
            found[f"{of}.gate_proj.weight"], found[f"{of}.up_proj.weight"] = gate_and_up(f"{m}mlp.shared_experts.linear_fc1.weight", p, ep - 1)
            found[f"{of}.down_proj.weight"] = columns(f"{m}mlp.shared_experts.linear_fc2.weight", p, ep - 1)
        if shapes.experts.shared_gate:
            found[f"{h}mlp.shared_expert_gate.weight"] = rank(0, p, 0)[f"{m}mlp.shared_experts.gate_weight"]
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize(("shapes", "mesh"), CASES, ids=lambda value: getattr(value, "architecture", None) or str(value))
def test_what_is_written_is_what_the_published_layout_reads_and_comes_back_bit_for_bit(shapes: ModelShapes, mesh: MegatronMesh, tmp_path: Path) -> None:
    source = model(tmp_path / "source", shapes, torch.bfloat16)
    wanted = dict(read_tensors(source))
    convert(source, tmp_path / "megatron", to="megatron", mesh=mesh)
    assert len(files(tmp_path / "megatron")) == mesh.tensor * mesh.pipeline * mesh.expert
    assert same(published(tmp_path / "megatron", shapes, mesh.tensor, mesh.pipeline, mesh.expert, mesh.virtual), wanted)
    convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
    assert same(load_file(tmp_path / "back" / "model.safetensors"), wanted)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize(
    "shapes", [DENSE, NORMED, MIXTURE, MIXTRAL, MISTRAL, WINDOWED, QWEN2_MOE, GLM, DEEPSEEK_V2, DEEPSEEK_V3, SMOLLM3, PHI3], ids=lambda s: s.architecture
)
def test_local_spelling_and_args_alone_are_enough_and_any_cut_becomes_any_other(shapes: ModelShapes, tmp_path: Path) -> None:
    source = model(tmp_path / "source", shapes)
    expert = 2 if shapes.experts else 1
    convert(source, tmp_path / "first", to="megatron", mesh=MegatronMesh(2, 2, expert), spelling="local")
    one = next(iter(files(tmp_path / "first").values()))["model"]
    assert "decoder.layers.0.input_layernorm.weight" in one and "decoder.layers.0.pre_mlp_layernorm.weight" in one
    shutil.rmtree(tmp_path / "first" / "huggingface")
    convert(tmp_path / "first", tmp_path / "second", to="megatron", mesh=MegatronMesh(1, 1, 1))
    convert(tmp_path / "second" / "release", tmp_path / "back", to="huggingface", config=None)
    assert same(dict(read_tensors(tmp_path / "back")), dict(read_tensors(source)))
    from tandem.model.huggingface.model_config import read_shapes

    assert read_shapes(tmp_path / "back") == read_shapes(source)


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({"window_size": None}, ()), ({"window_size": (-1, 0)}, ()), ({"window_size": (8, 0)}, (9, 9, 9, 9)),
        ({"window_size": [8, 0], "window_attn_skip_freq": 2}, (9, None, 9, None)),
        ({"window_size": (8, 0), "window_attn_skip_freq": [0, 0, 1, 1]}, (None, None, 9, 9)),
    ],
)  # fmt: skip
def test_sliding_windows_of_megatron_count_the_tokens_before(given: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """``TransformerConfig.window_size`` is (tokens to the left, tokens to the right), without the token itself."""
    arguments = arguments_of(NORMED, MegatronMesh(), torch.float32, 0)
    assert shapes_of(Namespace(**{**vars(arguments), **given})).layer_windows == windows


@pytest.mark.parametrize(
    ("shapes", "given", "message"),
    [
        (DEEPSEEK_V3, {"num_experts": None}, "latent attention without experts"), (DEEPSEEK_V3, {"moe_router_enable_expert_bias": False}, "without a bias"),
        (QWEN2_MOE, {"moe_shared_expert_gate": False}, "no supported family has this mixture"), (DEEPSEEK_V2, {"kv_lora_rank": None}, "do not describe"),
    ],
)  # fmt: skip
def test_args_of_a_network_that_no_family_has_are_refused_in_one_line(shapes: ModelShapes, given: dict[str, Any], message: str) -> None:
    arguments = arguments_of(shapes, MegatronMesh(), torch.float32, 0)
    with pytest.raises(UserError, match=message) as raised:
        shapes_of(Namespace(**{**vars(arguments), **given}))
    assert "\n" not in str(raised.value) and "--config" in str(raised.value)


def test_a_window_that_looks_ahead_is_refused() -> None:
    arguments = arguments_of(NORMED, MegatronMesh(), torch.float32, 0)
    with pytest.raises(UserError, match=r"window_size \(8, 8\)"):
        shapes_of(Namespace(**{**vars(arguments), "window_size": (8, 8)}))


def test_padding_of_the_vocabulary_and_a_tied_head_stand_where_megatron_wants_them(tmp_path: Path) -> None:
    convert(model(tmp_path / "source", DENSE), tmp_path / "megatron", to="megatron", mesh=MegatronMesh(2, 2))
    held = files(tmp_path / "megatron")
    embedding = torch.cat([held[f"mp_rank_{t:02d}_000"]["model"]["embedding.word_embeddings.weight"] for t in range(2)])
    assert embedding.shape[0] == 256 and embedding[131:].eq(embedding[130]).all()
    head = torch.cat([held[f"mp_rank_{t:02d}_001"]["model"]["output_layer.weight"] for t in range(2)])
    assert torch.equal(head, embedding)
    args = held["mp_rank_00_000"]["args"]
    assert (args.padded_vocab_size, args.num_query_groups, args.untie_embeddings_and_output_weights, args.add_qkv_bias) == (256, 4, False, True)
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release\n"


def test_file_with_grouped_experts_extra_states_and_objects_of_megatron_is_read_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    """In the layout of Transformer Engine's grouped layers and Megatron's args."""
    import sys
    import types

    source = model(tmp_path / "source", MIXTRAL)
    convert(source, tmp_path / "megatron", to="megatron", mesh=MegatronMesh(1, 1, 2))
    shutil.rmtree(tmp_path / "megatron" / "huggingface")
    (tmp_path / "megatron" / "SHA256SUMS").unlink()
    module = types.ModuleType("megatron.core.transformer.enums")
    exec("import enum\nclass AttnBackend(enum.Enum):\n    flash = 1\nclass AttnMask(enum.Enum):\n    causal = 1\n", module.__dict__)
    module.AttnBackend.__module__ = module.AttnMask.__module__ = module.__name__
    # As Python 3.11.0 to 3.11.3 pickle every enum.
    module.AttnMask.__reduce_ex__ = lambda member, protocol: (getattr, (module.AttnMask, member.name))
    names = [module.__name__.rsplit(".", n)[0] for n in range(3, -1, -1)]
    for path in (tmp_path / "megatron").glob("*/*/model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        content["args"].attention_backend, content["args"].attention_mask = module.AttnBackend.flash, module.AttnMask.causal
        del content["tandem_rank"]
        renamed = {}
        for name, tensor in content["model"].items():
            head, found, rest = name.partition("local_experts.")
            renamed[f"{head}{rest.split('.', 1)[1]}{rest.split('.', 1)[0]}" if found else name] = tensor
        renamed["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
        content["model"] = renamed
        try:
            sys.modules.update(dict.fromkeys(names, module))
            torch.save(content, path)
        finally:
            for name in names:
                del sys.modules[name]
    assert any("linear_fc1.weight1" in name for name in renamed)
    convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
    assert same(load_file(tmp_path / "back" / "model.safetensors"), dict(read_tensors(source)))


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


def rank_file(folder: Path, t: int = 0, p: int = 0) -> Path:
    return folder / "release" / f"mp_rank_{t:02d}_{p:03d}" / "model_optim_rng.pt"


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def swapped(a: Path, b: Path) -> None:
    a.rename(a.with_suffix(".x"))
    b.rename(a)
    a.with_suffix(".x").rename(b)


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def other_heads(folder: Path) -> None:
    for t in range(2):
        edited(rank_file(folder, t, 1), lambda c: c["model"]["output_layer.weight"].add_(1))


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: rank_file(f, 1, 1).unlink(), "is missing; the checkpoint has 2 x 2 x 1 ranks"),
    "cut short": (lambda f: rank_file(f, 1).write_bytes(rank_file(f, 1).read_bytes()[:-300]), "is damaged or truncated"),
    "no zip": (lambda f: rank_file(f, 1).write_bytes(b"nothing"), "is damaged or truncated"),
    "stages swapped": (lambda f: swapped(rank_file(f, 0, 0), rank_file(f, 0, 1)), "is the file of rank (0, 1, 0)"),
    "ranks swapped": (lambda f: swapped(rank_file(f, 0), rank_file(f, 1)), "the files are mixed up"),
    "other norm": (lambda f: edited(rank_file(f, 1), lambda c: c["model"][NORM].add_(1)), "differs between"),
    "other tied head": (other_heads, "differs from the other ranks"),
    "other iteration": (lambda f: edited(rank_file(f, 1), lambda c: c.update(iteration=7)), "is of iteration 7"),
    "lacks a tensor": (lambda f: edited(rank_file(f, 1), lambda c: c["model"].pop(QKV)), f"has no '{QKV}'"),
    "unknown tensor": (lambda f: edited(rank_file(f, 1), lambda c: c["model"].update(x=torch.zeros(1))), "has 'x', which is unknown"),
    "other shape": (lambda f: [edited(rank_file(f, t), lambda c: c["model"].update({QKV: torch.zeros(7, 32)})) for t in range(2)], "it is from another model"),
    "more stages": (lambda f: edited(rank_file(f), lambda c: c.update(model0={})), "has more stages of its pipeline than the 1"),
    "no stage": (lambda f: edited(rank_file(f), lambda c: c.pop("model")), "has no 'model'"),
    "harmful": (lambda f: edited(rank_file(f, 1), lambda c: c.update(x=Harmful(f / "ran"))), "which is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMS)
def test_damaged_missing_or_mixed_up_file_is_one_line(name: str, tmp_path: Path) -> None:
    harm, said = HARMS[name]
    convert(model(tmp_path / "source", DENSE), tmp_path / "megatron", to="megatron", mesh=MegatronMesh(2, 2))
    (tmp_path / "megatron" / "SHA256SUMS").unlink()
    harm(tmp_path / "megatron")
    with pytest.raises(UserError) as caught:
        convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "back").exists() and not (tmp_path / "megatron" / "ran").exists()


def test_one_flipped_bit_is_seen_by_the_digests_that_are_written_with_it(tmp_path: Path) -> None:
    convert(model(tmp_path / "source", DENSE), tmp_path / "megatron", to="megatron", mesh=MegatronMesh(2, 1))
    path = tmp_path / "megatron" / "release" / "mp_rank_01" / "model_optim_rng.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"does not have its digest in SHA256SUMS"):
        convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")


def test_command_says_what_it_did_and_refuses_what_cannot_be_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(model(tmp_path / "source", DENSE))
    assert main(["convert", source, str(tmp_path / "m"), "--to", "megatron", "--tensor", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == "megatron"
    for words, said in (
        (["--to", "megatron", "--tensor", "3"], "does not divide the model's 4 query groups"),
        (["--to", "megatron", "--pipeline", "3"], "does not divide the model's 4 layers"),
        (["--to", "megatron", "--expert", "2"], "the model has no experts"),
        (["--to", "megatron", "--virtual-pipeline", "2"], "an interleaved pipeline has at least 2 ranks"),
        (["--to", "megatron", "--pipeline", "2", "--virtual-pipeline", "3"], "does not divide the model's 2 layers on each rank"),
        (["--tensor", "2"], "add --to megatron"),
        (["--from", "megatron"], "contains no mp_rank_* folders"),
        (["--to", "nix"], "invalid choice: 'nix'"),
    ):
        assert main(["convert", source, str(tmp_path / "x"), *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert main(["convert", source, str(tmp_path / "m")]) == 2 and "is not overwritten" in capsys.readouterr().err


def test_file_of_ours_holds_no_class_but_namespace(tmp_path: Path) -> None:
    convert(model(tmp_path / "source", NORMED), tmp_path / "m", to="megatron")
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "m" / "release" / "mp_rank_00" / "model_optim_rng.pt")
    assert unknown == [f"{Namespace.__module__}.{Namespace.__qualname__}"]


def test_a_checkpoint_of_version_0_1_is_named_as_such_and_its_weights_are_read_as_a_hugging_face_folder(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text("{}")
    with pytest.raises(UserError, match=r"^the checkpoint '.*step-3' was written by an older version of Tandem; convert it with that version$"):
        convert(checkpoint, tmp_path / "to", to="huggingface")
    with pytest.raises(UserError, match=r"^'.*run' is a run of an older version of Tandem; convert its model or a checkpoint, for example '.*step-3'$"):
        convert(tmp_path / "run", tmp_path / "to", to="huggingface")
    for path in model(tmp_path / "model", DENSE).iterdir():
        path.rename(checkpoint / path.name)
    with pytest.raises(UserError, match="older version of Tandem; give --from huggingface"):
        convert(checkpoint, tmp_path / "to", of="tandem", to="huggingface")
    convert(checkpoint, tmp_path / "to", to="huggingface")
    saved, read = dict(read_tensors(checkpoint)), dict(read_tensors(tmp_path / "to"))
    assert saved.keys() == read.keys() and all(torch.equal(saved[name], read[name]) for name in saved)
