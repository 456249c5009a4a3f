"""A trained model is what came in, with other weights: ids, generation config, tokenizer, chat template and dtype, as transformers reads them."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from tandem.config.load import build
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe
from tandem.jobs.start import train
from tandem.text.characters import make_character_tokenizer

SHAPE = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
GENERATION = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [2, 5], "pad_token_id": 0, "bos_token_id": 1}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers in bfloat16: its config has one end, its generation config two, and its tokenizer a chat template."""
    folder = tmp_path_factory.mktemp("given") / "model"
    folder.mkdir()
    make_character_tokenizer("ascii", folder)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=size + 9, bos_token_id=1, eos_token_id=2, pad_token_id=None, initializer_range=0.3, **SHAPE)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template, "model_max_length": 64}))
    return folder


def check_is_alike(exported: Path, given: Path, dtype: torch.dtype) -> None:
    """Compares everything but the weights as transformers reads it."""
    ours, theirs = (transformers.AutoConfig.from_pretrained(folder) for folder in (exported, given))
    for config in (ours, theirs):
        config.name_or_path = config.dtype = None
    assert ours.to_dict() == theirs.to_dict()
    ours, theirs = (transformers.GenerationConfig.from_pretrained(folder) for folder in (exported, given))
    assert ours.to_dict() == theirs.to_dict() and ours.eos_token_id == [2, 5] and ours.top_k == 20
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (exported, given))
    messages = [{"role": "user", "content": "12+3="}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False) == "12+3="
    assert ours("12+3=").input_ids == theirs("12+3=").input_ids and ours.special_tokens_map == theirs.special_tokens_map
    names = {path.name for path in given.iterdir()}
    assert {path.name for path in exported.iterdir()} == names | {"manifest.json"}
    for name in names - {"config.json", "model.safetensors"}:
        assert (exported / name).read_bytes() == (given / name).read_bytes(), name
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    before = transformers.AutoModelForCausalLM.from_pretrained(given, dtype="auto")
    assert model.dtype == dtype and before.dtype == torch.bfloat16
    assert any(not torch.equal(a.to(b.dtype), b) for a, b in zip(model.parameters(), before.parameters(), strict=True)), "it was trained"


def recipe(given: Path, folder: Path, **model: object) -> dict[str, object]:
    return {
        "model": {"path": str(given), **model},
        "task": {"name": "sort"},
        "trainer": {"learning_rate": 0.01},
        "run": {"max_steps": 1, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
    }


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_a_fine_tuned_model_is_like_the_one_that_came_in(asked: str, dtype: torch.dtype, given: Path, tmp_path: Path) -> None:
    sections = {**recipe(given, tmp_path, export_dtype=asked), "algorithm": {"name": "sft"}, "data": {"sequence_length": 64, "global_batch_size": 2}}
    train(build(PretrainRecipe, sections))
    check_is_alike(tmp_path / "run" / "model", given, dtype)


@pytest.mark.full
def test_a_model_of_reinforcement_learning_is_like_the_one_that_came_in_though_the_stage_between_keeps_every_bit(given: Path, tmp_path: Path) -> None:
    sections = recipe(given, tmp_path) | {
        "sft": {"steps": 2, "batch_size": 2, "warmup_steps": 1}, "rollout": {"max_tokens": 8, "prompts_per_step": 2}, "algorithm": {"group_size": 2},
        "evaluation": {"prompts": 2},
    }  # fmt: skip
    train(build(Recipe, sections), inline=True)
    check_is_alike(tmp_path / "run" / "model", given, torch.bfloat16)
    stage = json.loads((tmp_path / "run" / "sft" / "model" / "config.json").read_text())
    assert stage["dtype"] == "float32"


def test_a_value_that_the_dtype_cannot_have_is_an_error(tmp_path: Path) -> None:
    from tandem.kernels import select
    from tandem.layout.shapes import ModelShapes
    from tandem.model.decoder import Decoder
    from tandem.model.huggingface.model_folder import save_model
    from tandem.types import RunError

    shapes = ModelShapes(architecture="qwen3", vocab_size=32, rms_norm_eps=1e-6, qk_norm=True, **SHAPE)
    decoder = Decoder(shapes, select("reference"))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(1e30)
    with pytest.raises(RunError, match=r"has a value that torch.float16 cannot represent; set model.export_dtype to bfloat16 or float32"):
        save_model(decoder, tmp_path / "model", dtype=torch.float16)
    assert not (tmp_path / "model").exists()
    save_model(decoder, tmp_path / "model", dtype=torch.bfloat16)
