"""``config.json``: supported values, defaults, and one-line refusals."""

import contextlib
import json
import re

import pytest

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.rotary import RopeScaling, Rotary
from tandem.layout.shapes import ModelShapes
from tandem.model.families import mixtral
from tandem.model.family import all_families
from tandem.model.huggingface.arithmetic_keys import NEUTRAL
from tandem.model.huggingface.model_folder import config_json, read_shapes
from tandem.types import UserError

BASE = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80,
}  # fmt: skip
WITHOUT_NULL = ("gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "smollm3")


def read(folder, **changes) -> ModelShapes:
    content = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(content))
    return read_shapes(folder)


WITHOUT_DEFAULT = {"deepseek_v2": {"num_experts_per_tok": 2}, "qwen3_next": {"num_hidden_layers": 4}}
"""By family, what a ``config.json`` must have because the defaults, with the three layers of this file, do not compute."""


@pytest.mark.parametrize("model_type", sorted(all_families()))
def test_missing_keys_take_the_defaults_of_transformers(model_type, tmp_path) -> None:
    from transformers import AutoConfig

    shapes = read(tmp_path, model_type=model_type, **WITHOUT_DEFAULT.get(model_type, {}))
    peer = AutoConfig.from_pretrained(tmp_path)
    # With latent attention transformers calls the rotated part of a head its size.
    assert shapes.head_dim == (getattr(peer, "qk_head_dim", None) or getattr(peer, "head_dim", None) or 12)
    assert shapes.max_position_embeddings == peer.max_position_embeddings
    assert shapes.rms_norm_eps == getattr(peer, all_families()[model_type].norm_eps_key)
    assert shapes.rope_theta == peer.rope_parameters.get("full_attention", peer.rope_parameters)["rope_theta"]
    assert shapes.tie_word_embeddings == peer.tie_word_embeddings
    window = peer.sliding_window if model_type in ("mistral", "olmo3", "gemma3_text", "cohere2") else None
    alternating = {"gemma2": (4096, None, 4096), "gpt_oss": (128, None, 128)}
    expected = alternating.get(model_type, () if window is None else (window,) * 3)
    assert shapes.layer_windows == expected
    assert (shapes.attention_bias, shapes.mlp_bias) == (model_type in ("qwen2", "qwen2_moe", "glm4", "gpt_oss"), False)
    assert shapes.attention_scale == getattr(peer, "attention_multiplier", shapes.head_dim**-0.5)


@pytest.mark.parametrize("keys", [{}, {"rope_theta": 5e5}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}], ids=str)
def test_the_rotary_embedding_of_gpt_oss_is_that_of_transformers(keys, tmp_path) -> None:
    from transformers import AutoConfig

    shapes = read(tmp_path, model_type="gpt_oss", **keys)
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (shapes.rope_theta, shapes.rope_scaling.kind) == (theirs["rope_theta"], theirs["rope_type"])
    for name in ("factor", "original_max_position_embeddings", "truncate") if theirs["rope_type"] == "yarn" else ():
        assert getattr(shapes.rope_scaling, name) == theirs[name]


def test_another_bound_of_the_gate_of_gpt_oss_is_refused(tmp_path) -> None:
    assert read(tmp_path, model_type="gpt_oss", swiglu_limit=7) == read(tmp_path, model_type="gpt_oss")
    with pytest.raises(UserError, match=r"has swiglu_limit 5.0; only 7.0 is supported"):
        read(tmp_path, model_type="gpt_oss", swiglu_limit=5.0)
    with pytest.raises(UserError, match=r"has swiglu_limit 7.0; a qwen3 model here has no such term"):
        read(tmp_path, swiglu_limit=7.0)


@pytest.mark.parametrize("keys", [{}, {"sliding_window": 16}, {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 2}], ids=str)
def test_windows_by_the_kind_of_layer_are_those_of_transformers(keys, tmp_path) -> None:
    from transformers import AutoConfig

    shapes = read(tmp_path, model_type="olmo3", num_hidden_layers=5, **keys)
    peer = AutoConfig.from_pretrained(tmp_path)
    assert [shapes.window(i) for i in range(5)] == [peer.sliding_window if kind == "sliding_attention" else None for kind in peer.layer_types]


def test_layers_with_a_window_have_frequencies_that_are_not_scaled(tmp_path) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    flat = read(tmp_path, model_type="olmo3", rope_theta=5e5, rope_scaling=yarn)
    kinds = {"full_attention": {**yarn, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    assert read(tmp_path, model_type="olmo3", rope_parameters=kinds) == flat
    assert flat.rope_scaling.kind == "yarn" and flat.window_rotary == Rotary(5e5, RopeScaling())
    assert read(tmp_path, model_type="olmo3").window_rotary is None
    with pytest.raises(UserError, match="'chunked_attention'; the kinds of layers are full_attention and sliding_attention"):
        read(tmp_path, model_type="olmo3", rope_parameters={**kinds, "chunked_attention": {}})


def test_layers_without_rotary_embedding_are_those_of_transformers(tmp_path) -> None:
    from transformers import AutoConfig

    for keys in ({}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [0, 1, 1, 0, 1, 1, 1, 0]}, {"use_sliding_window": True, "sliding_window": 16}):
        shapes = read(tmp_path, model_type="smollm3", num_hidden_layers=8, **keys)
        peer = AutoConfig.from_pretrained(tmp_path)
        assert [int(layer not in shapes.unrotated_layers) for layer in range(8)] == peer.no_rope_layers
        kinds = ["full_attention" if shapes.window(layer) is None else "sliding_attention" for layer in range(8)]
        assert kinds == peer.layer_types


def test_gemmas_caps_query_scale_and_bases_are_those_of_transformers(tmp_path) -> None:
    from transformers import AutoConfig

    for keys in (
        {"model_type": "gemma2"}, {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 144},
        {"model_type": "gemma3_text"}, {"model_type": "gemma3_text", "rope_local_base_freq": 500.0, "rope_theta": 7e5, "sliding_window_pattern": 2},
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 30.0},
    ):  # fmt: skip
        shapes = read(tmp_path, **{"rope_theta": "absent", "num_hidden_layers": 6, **keys})
        peer = AutoConfig.from_pretrained(tmp_path)
        assert (shapes.score_cap, shapes.logit_cap) == (peer.attn_logit_softcapping, peer.final_logit_softcapping)
        assert shapes.attention_scale == peer.query_pre_attn_scalar**-0.5
        assert ["full_attention" if shapes.window(layer) is None else "sliding_attention" for layer in range(6)] == peer.layer_types
        if keys["model_type"] == "gemma3_text":
            full, window = (peer.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
            assert shapes.window_rotary == Rotary(window["rope_theta"], RopeScaling())
            assert (shapes.rope_theta, shapes.rope_scaling.kind, shapes.rope_scaling.factor) == (full["rope_theta"], full["rope_type"], full.get("factor", 1.0))


def test_keys_of_other_families_that_turn_nothing_on_are_accepted(tmp_path) -> None:
    nothing = {"logits_scaling": 1.0, "n_shared_experts": 0, "clip_qkv": None, "scoring_func": "softmax", "n_group": 1, "mlp_multipliers": [1.0, 1.0]}
    nothing |= {"activation_sparsity_pattern": [0.0, 0.0]}
    assert read(tmp_path, **nothing) == read(tmp_path)


CHANGES = re.compile(
    r"soft_?cap|multiplier|(attention|attn|embedding|emb|logits?|value|route|residual)_scale$|scal(ing|e)_factor$|(post|sandwich)_norm$|_(alpha|beta)_factor$|"
    "clip|qk_norm|logit"
)
HARMLESS = {"block_ffn_dim_multiplier", "mtp_loss_scaling_factor", "num_logits_to_keep", "output_router_logits"}
"""A size, terms of losses, and what is returned."""


@pytest.mark.full
def test_every_key_of_a_decoder_of_transformers_whose_name_says_that_it_scales_caps_clips_or_normalises_is_known() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    keys = set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        # Some configurations need parts that they have no default of.
        with contextlib.suppress(Exception):
            keys |= {key for key in CONFIG_MAPPING[model_type]().to_dict() if CHANGES.search(key)}
    assert len(keys) > 40
    assert keys - HARMLESS - set(NEUTRAL) == set()


@pytest.mark.parametrize("model_type", sorted(all_families()))
def test_key_heads_default_as_in_transformers(model_type, tmp_path) -> None:
    from transformers import AutoConfig

    content = {"model_type": model_type, "num_attention_heads": 64, "hidden_size": 256, "head_dim": 4, **WITHOUT_DEFAULT.get(model_type, {})}
    if model_type == "qwen3_next":  # A quarter of each head is rotated, by twos.
        content["head_dim"] = 8
    # transformers refuses a null for these.
    for absent in ("absent",) if model_type in WITHOUT_NULL else ("absent", None):
        shapes = read(tmp_path, **content, num_key_value_heads=absent)
        # With latent attention each head has its own, whatever the number in transformers is.
        assert shapes.num_key_value_heads == (AutoConfig.from_pretrained(tmp_path).num_key_value_heads if shapes.latent is None else 64)


@pytest.mark.parametrize("style", ["rope_scaling of 4", "type of 4", "rope_parameters of 5"])
def test_both_key_styles_of_rotary_scaling_mean_the_same(style, tmp_path) -> None:
    fields = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    changes = {
        "rope_scaling of 4": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **fields}},
        "type of 4": {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **fields}},
        "rope_parameters of 5": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **fields}},
    }[style]
    shapes = read(tmp_path, model_type="llama", **changes)
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=512)
    assert (shapes.rope_theta, shapes.rope_scaling) == (5e5, expected)


def test_yarn_takes_its_context_from_the_positions_where_none_is_given(tmp_path) -> None:
    shapes = read(tmp_path, max_position_embeddings=4096, rope_scaling={"type": "yarn", "factor": 4.0})
    assert shapes.rope_scaling == RopeScaling("yarn", 4.0, original_max_position_embeddings=4096)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, ()),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, (None, 16, 16)),
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (16, None, 16),
        ),
        ({"layer_types": ["full_attention"] * 3}, ()),
    ],
)
def test_windows_follow_the_rules_of_the_checkpoint(changes, windows, tmp_path) -> None:
    assert read(tmp_path, **changes).layer_windows == windows


@pytest.mark.parametrize("most", [0, 2, 28])
def test_windows_of_qwen2_moe_are_those_of_transformers(most, tmp_path) -> None:
    from transformers import AutoConfig

    shapes = read(tmp_path, model_type="qwen2_moe", num_hidden_layers=5, use_sliding_window=True, sliding_window=16, max_window_layers=most)
    peer = AutoConfig.from_pretrained(tmp_path)
    assert [shapes.window(i) for i in range(5)] == [16 if kind == "sliding_attention" else None for kind in peer.layer_types]


def test_mistral_has_one_window_for_all_layers_and_a_null_turns_it_off(tmp_path) -> None:
    """Mistral 7B v0.1 has a number, v0.2 and later null; a missing key means transformers' default."""
    assert read(tmp_path, model_type="mistral", sliding_window=16).layer_windows == (16, 16, 16)
    assert read(tmp_path, model_type="mistral", sliding_window=None).layer_windows == ()
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(UserError, match="layer_types"):
        read(tmp_path, model_type="mistral", sliding_window=16, layer_types=kinds)


def test_a_folder_without_model_type_is_known_by_its_class(tmp_path) -> None:
    assert read(tmp_path, model_type="absent", architectures=["MistralForCausalLM"]).architecture == "mistral"
    with pytest.raises(UserError, match="model_type None"):
        read(tmp_path, model_type="absent", architectures=["MambaForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, ["model_type", "'gpt2'", "llama, mistral, mixtral"]),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, ["no_rope_layers [1, 0]", "each of 3 layers"]),
        ({"model_type": "granite", "residual_multiplier": 0}, ["residual_multiplier 0", "above 0"]),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, ["'gemma3'", "model_type 'gemma3_text'", "Gemma3ForCausalLM"]),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, ["hidden_activation 'gelu'", "'gelu_pytorch_tanh'", "gemma2"]),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, ["attn_logit_softcapping -1.0", "above 0"]),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ["use_bidirectional_attention True"]),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, ["rope_parameters", "full_attention and sliding_attention"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping 30.0", "qwen3 model", "no such term"]),
        ({"logits_scaling": 8.0}, ["logits_scaling 8.0"]),
        ({"model_type": "llama", "logits_soft_cap": 30.0}, ["logits_soft_cap 30.0", "llama model", "no such term"]),
        ({"lm_head_multiplier": 0.5}, ["lm_head_multiplier 0.5"]),
        ({"mlp_multipliers": [1.0, 0.5]}, ["mlp_multipliers [1.0, 0.5]"]),
        ({"embedding_scale": True}, ["embedding_scale True"]),
        ({"no_rope_layers": [1, 1, 0]}, ["no_rope_layers [1, 1, 0]"]),
        ({"n_shared_experts": 1}, ["n_shared_experts 1"]),
        ({"model_type": "mistral3"}, ["model_type", "'mistral3'", "Did you mean 'mistral'?"]),
        ({"model_type": "absent"}, ["model_type", "None"]),
        ({"model_type": "cohere", "logit_scale": 0}, ["logit_scale 0", "above 0"]),
        ({"model_type": "cohere", "use_parallel_block": False}, ["use_parallel_block False", "True"]),
        ({"model_type": "cohere2", "use_qk_norm": True}, ["use_qk_norm True", "cohere2 model"]),
        ({"model_type": "cohere2", "head_dim": 32}, ["head_dim 32", "hidden_size"]),
        ({"model_type": "cohere2", "sliding_window": None}, ["sliding_window None", "number of tokens"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"vocab_size": "absent"}, ["vocab_size"]),
        ({"vocab_size": "61"}, ["vocab_size", "'61'"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3"]),
        ({"head_dim": 11}, ["head_dim 11"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"model_type": "glm4_moe", "n_group": 3, "n_routed_experts": 8}, ["groups 3", "8 experts"]),
        ({"model_type": "glm4_moe", "n_group": 4, "n_routed_experts": 8, "num_experts_per_tok": 3}, ["groups_per_tok 1 of 4 groups of 2", "no 3 experts"]),
        ({"model_type": "glm4_moe", "first_k_dense_replace": 4}, ["first_k_dense_replace 4", "at most the 3 layers"]),
        ({"model_type": "glm4", "partial_rotary_factor": 1.5}, ["partial_rotary_factor 1.5", "at most 1"]),
        ({"model_type": "glm4", "head_dim": 16, "partial_rotary_factor": 0.2}, ["rotary_fraction 0.2 of 16 numbers is 3", "even"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "'dynamic'"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "short_factor None", "list of numbers"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1, 2], "long_factor": [1] * 6}}, ["short_factors", "are 2", "128 rotated", "need 64"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [0] * 6, "long_factor": [1] * 6}}, ["short_factor [0, 0", "above 0"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "long_factor": [1] * 6}}, ["long_factor", "not supported"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "full_attention"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor", "'2'"]),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            ["high_"],
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "mrope_section": [1]}}, ["mrope_section"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "3 layers"]),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, ["chunked_attention"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["layer_types", "use_sliding_window"]),
        ({"max_window_layers": -1}, ["max_window_layers", "-1"]),
    ],
)
def test_what_is_not_supported_is_named_in_one_line(changes, named, tmp_path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, **changes)
    message = str(error.value)
    assert "\n" not in message and "config.json" in message
    assert all(part in message for part in named), message


@pytest.mark.parametrize(("content", "named"), [(None, "no config.json"), ("{", "JSON"), ("[1]", "list")])
def test_a_folder_that_is_no_model_is_named(content, named, tmp_path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=named) as error:
        read_shapes(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_shapes_that_the_format_has_no_words_for_are_refused() -> None:
    common = dict(
        vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=8,
        max_position_embeddings=8, tie_word_embeddings=True,
    )  # fmt: skip
    for shapes in (
        ModelShapes("qwen2", **common),
        ModelShapes("qwen3", **common),
        ModelShapes("llama", **common, attention_bias=True),
        ModelShapes("llama", **common, layer_windows=(None, 4)),
        ModelShapes("qwen3", **common, qk_norm=True, layer_windows=(2, 4)),
        ModelShapes("mistral", **common, attention_bias=True),
        ModelShapes("mistral", **common, layer_windows=(None, 4)),
        ModelShapes("mixtral", **common, experts=ExpertShapes(4, 2, 16, names=mixtral.NAMES)),
        ModelShapes("mixtral", **common, experts=ExpertShapes(4, 2, 8)),
        ModelShapes("mixtral", **common),
    ):
        with pytest.raises(ValueError, match=r"cannot express"):
            config_json(shapes)
