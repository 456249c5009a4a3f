"""Folders in fp8 by blocks, as DeepSeek-V3 and Qwen3-FP8 are published, against transformers' own decoding and the closed form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.jobs.convert import convert
from tandem.kernels import select
from tandem.model.decoder import PackedContext
from tandem.model.huggingface.model_config import read_json
from tandem.model.huggingface.model_folder import load_model, read_tensors, save_model
from tandem.model.quantization.formats import read_format
from tandem.text.characters import make_character_tokenizer
from tandem.types import UserError

LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4, "q_lora_rank": 28}
CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    # Blocks that are not full at the last rows and columns of nearly every matrix; transformers decodes whole blocks only.
    "deepseek_v3": (
        {
            **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        },
        (32, 32),
    ),
    "qwen3": ({"head_dim": 16, "hidden_size": 64, "intermediate_size": 96}, (16, 32)),
    # As Qwen publishes it: the gates of linear attention and of shared experts are plain, and a layer behind the model's own is in fp8 too.
    "qwen3_next": (
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0], "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
            "linear_value_head_dim": 10, "head_dim": 16,
        },
        (32, 32),
    ),
}  # fmt: skip


class Case(NamedTuple):
    """A folder in fp8, and what transformers computes with the decoded weights."""

    family: str
    folder: Path
    peer: Any


def in_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes, the scales and, as each number is defined, the weight that they stand for."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    codes, scales, stands_for = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            stands_for[part] = codes[part].float() * scales[i, j]
    return codes, scales, stands_for


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3", pytest.param("qwen3_next", marks=pytest.mark.full)])
def case(request: pytest.FixtureRequest, peer_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Case:
    from transformers import AutoModelForCausalLM

    sizes, block = CASES[request.param]
    path = tmp_path_factory.mktemp("fp8")
    peer_model(request.param, vocab_size=40, **sizes).save_pretrained(path / "exact")
    tensors, exact = {}, load_file(path / "exact" / "model.safetensors")
    for name, weight in list(exact.items()):
        if weight.ndim == 2 and ("_proj" in name or "kv_a" in name) and "in_proj_ba" not in name:
            tensors[name], tensors[f"{name}_scale_inv"], exact[name] = in_blocks(weight, block)
        else:
            tensors[name] = weight
    if request.param == "qwen3_next":
        further = "mtp.layers.0.self_attn.q_proj.weight"
        tensors[further], tensors[f"{further}_scale_inv"], _ = in_blocks(torch.ones(64, 48), block)
    save_file(exact, path / "exact" / "model.safetensors", {"format": "pt"})
    make_character_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789", path / "model")
    write(path / "model", tensors)
    published = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    config = {**read_json(path / "exact" / "config.json"), "quantization_config": published}
    (path / "model" / "config.json").write_text(json.dumps(config))
    read = path / "model" if request.param == "qwen3" else path / "exact"
    return Case(request.param, path / "model", AutoModelForCausalLM.from_pretrained(read, dtype=torch.float32).eval())


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Scales lie in another shard than their codes."""
    shards: dict[str, dict[str, Tensor]] = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for name, tensor in tensors.items():
        shards[f"model-0000{1 + name.endswith('up_proj.weight')}-of-00002.safetensors"][name] = tensor
    for shard, held in shards.items():
        save_file(held, path / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_trainer_and_engine_compute_what_transformers_computes_with_the_decoded_weights(case: Case, tmp_path: Path) -> None:
    assert read_format(case.folder) is None, "what is decoded as it is read is a plain folder for everything else"
    decoder = load_model(case.folder, select("cpu"))
    tokens = torch.randint(3, 40, (33,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens, torch.arange(33), PackedContext(torch.tensor([0, 33], dtype=torch.int32), 33)))
        theirs = case.peer(tokens.unsqueeze(0)).logits[0]
    assert theirs.std() > 0.3 and (ours - theirs).abs().max() < 1e-4
    with LLM(str(case.folder), dtype="float32", max_model_len=64, kv_cache_tokens=256) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": [5, 9, 30]}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    drawn = [5, 9, 30, *answer.outputs[0].token_ids]
    with torch.no_grad():
        assert drawn[3:] == case.peer(torch.tensor([drawn])).logits[0].argmax(-1)[2:-1].tolist()
    # What is written is plain, with the bits of the closed form.
    save_model(decoder, tmp_path / "written", case.folder, like=case.folder)
    assert "quantization_config" not in read_json(tmp_path / "written" / "config.json")
    exact = load_file(case.folder.parent / "exact" / "model.safetensors")
    assert all(torch.equal(tensor, exact[name]) for name, tensor in read_tensors(tmp_path / "written"))
    with pytest.raises(UserError, match="is quantised, which has no other layout"):
        convert(case.folder, tmp_path / "megatron", to="megatron")


def test_what_is_missing_or_has_another_shape_is_named(case: Case, tmp_path: Path) -> None:
    tensors = {name: tensor for shard in case.folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    name = "model.layers.0.mlp.down_proj.weight"

    def refusal(folder: str, block: tuple[int, int] | None = None, **changes: Tensor | None) -> str:
        path = tmp_path / folder
        path.mkdir()
        changed = {**tensors, **{f"{name}{'' if kind == 'codes' else '_scale_inv'}": tensor for kind, tensor in changes.items()}}
        write(path, {name: tensor for name, tensor in changed.items() if tensor is not None})
        config = read_json(case.folder / "config.json")
        config["quantization_config"]["weight_block_size"] = block or config["quantization_config"]["weight_block_size"]
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError) as caught:
            list(read_tensors(path))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert f"tensor '{name}_scale_inv' in fp8 is missing from the weights, which have '{name}'" in refusal("scales", scales=None)
    assert f"tensor '{name}' in fp8 is missing" in refusal("codes", codes=None)
    assert f"tensor '{name}_scale_inv' has shape [1, 1]; '{name}' of shape" in refusal("shape", scales=torch.ones(1, 1))
    assert "in blocks of [128, 128] requires" in refusal("block", (128, 128)), "of the first matrix that has other blocks"
    assert f"tensor '{name}' contains a value that is not finite" in refusal("finite", scales=tensors[f"{name}_scale_inv"] * float("nan"))
    assert "weight_block_size [16]; it must be two whole numbers" in refusal("one", [16])  # type: ignore[arg-type]
