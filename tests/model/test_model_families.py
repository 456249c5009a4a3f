"""A family is one declaration: no other code names it, and a new family is one module."""

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tandem
from tandem.config.model import NewModelConfig
from tandem.kernels import select
from tandem.model import families
from tandem.model.create_model import create_model
from tandem.model.family import all_families
from tandem.model.huggingface.model_folder import load_model, read_shapes, save_model
from tandem.model.new_model import shapes_of
from tandem.types import UserError

ROOT = Path(tandem.__file__).parent

# Seed-OSS (ByteDance, 2025): biases of queries, keys and values but not of the output, each with its own key.
SEED_OSS = """
from tandem.model.family import ConfigFlag, Family

FAMILY = Family(
    model_type="seed_oss",
    class_name="SeedOssForCausalLM",
    attention_bias=ConfigFlag("attention_bias", True),
    output_bias=ConfigFlag("attention_out_bias"),
    mlp_bias=ConfigFlag("mlp_bias"),
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=524288,
)
"""


@pytest.fixture
def seed_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library with an additional module in ``tandem.model.families``."""
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "seed_oss.py").write_text(SEED_OSS)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])


@pytest.mark.parametrize("config", [{}, {"attention_out_bias": True, "mlp_bias": True}, {"attention_bias": False}], ids=str)
def test_a_family_that_is_added_as_one_file_has_the_logits_of_transformers(
    config: dict[str, bool], seed_oss: None, peer_model: Callable, packed_logits: Callable[..., list[Tensor]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    peer = peer_model("seed_oss", head_dim=16, **config)
    peer.save_pretrained(tmp_path / "theirs")
    decoder = load_model(tmp_path / "theirs", select("reference"))
    tokens = torch.randint(0, 61, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = peer(tokens.unsqueeze(0)).logits[0]
        assert (packed_logits(decoder, [tokens])[0] - expected).abs().max() < 1e-4
    save_model(decoder, tmp_path / "ours", eos_token_id=2, pad_token_id=0)
    returned = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert returned.state_dict().keys() == peer.state_dict().keys()
    assert all(torch.equal(tensor, peer.state_dict()[name]) for name, tensor in returned.state_dict().items())
    with torch.no_grad():
        assert torch.equal(returned(tokens.unsqueeze(0)).logits[0], expected)


def test_a_family_that_is_added_as_one_file_is_created_from_a_recipe(seed_oss: None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = NewModelConfig("seed_oss", hidden_size=32, intermediate_size=48)
    create_model(config, 0, tmp_path / "model")
    model, names = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), ("q_proj.bias", "o_proj.bias")
    assert type(model).__name__ == "SeedOssForCausalLM"
    assert [any(name in found for found in model.state_dict()) for name in names] == [True, False]


def test_the_same_folder_is_refused_where_the_file_is_missing(peer_model: Callable, tmp_path: Path) -> None:
    peer_model("seed_oss", head_dim=16).config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"'seed_oss'; supported are {', '.join(all_families())}"):
        read_shapes(tmp_path)


@pytest.mark.parametrize("model_type", sorted(all_families()))
def test_class_names_are_those_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == all_families()[model_type].class_name
    assert AutoConfig.for_model(model_type).model_type == model_type


@pytest.mark.parametrize("model_type", sorted(all_families()))
def test_every_family_is_created_from_a_recipe(model_type: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4} if all_families()[model_type].experts else {}
    create_model(NewModelConfig(model_type, hidden_size=32, head_dim=8, intermediate_size=48, **experts), 0, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == model_type
    load_model(tmp_path / "model", select("reference"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NewModelConfig("qwen4"), "'model.create.architecture' is 'qwen4'.*llama, mistral, mixtral.*Did you mean 'qwen3'"),
        (NewModelConfig("llama", num_experts=4), "'model.create.num_experts' is 4, which is not read: llama .* no experts; .*mixtral, qwen2_moe, qwen3_moe"),
        (NewModelConfig("qwen3", moe_intermediate_size=24), "'model.create.moe_intermediate_size' is 24, which is not read"),
        (NewModelConfig("mixtral", moe_intermediate_size=24), "section 'model.create'.*mixtral.*experts.intermediate_size 24.*512"),
    ],
)
def test_a_model_that_no_family_has_is_refused_by_name(config: NewModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shapes_of(config, 99)


def test_no_module_but_a_family_s_own_compares_with_its_name() -> None:
    """Searches every comparison and membership test in ``tandem`` for the name of a family."""
    branches, families = [], set(all_families())
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        # A constant that is a name is in the text.
        for node in ast.walk(ast.parse(text)) if any(name in text for name in families) else ():
            if isinstance(node, ast.Compare):
                constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
                branches += [f"{path}:{node.lineno}" for name in constants & families]
    assert branches == []
