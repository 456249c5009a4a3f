"""LoRA on data: the curve is that of a plain loop over transformers' model with PEFT's linear layers, and a run that died or is divided between ranks has
the same results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from byte_model import write_byte_model
from data_runs import command, rows
from lora_adapters import adapt
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tandem.config.lora import LINEAR_ATTENTION_MODULES, LoraConfig
from tandem.config.recipe import load_config
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.jobs.replay.replay_step import replay
from tandem.jobs.start import resume, train
from tandem.layout.shapes import adapted_shapes
from tandem.model.drawn import new_adapter
from tandem.model.huggingface.model_config import read_shapes
from tandem.runtime.callback import Callback
from tandem.types import UserError

STEPS, SEED = 8, 3
LORA = LoraConfig(rank=4, alpha=12.0, target_modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
PAIRS = [{"prompt": f"{i}+{i}=", "completion": f"{i + i}"} for i in range(1, 9)]


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder and a dataset of eight examples."""
    folder = tmp_path_factory.mktemp("data")
    write_byte_model(folder / "model", "{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "source").mkdir()
    (folder / "source" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    tokenize(TokenizeSettings(str(folder / "source"), str(folder / "pairs"), str(folder / "model"), DocumentFormat(suffixes=(), examples=True), workers=1))
    return folder


def write_recipe(folder: Path, data: Path, parallel: dict[str, Any] | None = None, dtype: str = "float32", **lora: Any) -> Path:
    adapter = {"rank": LORA.rank, "alpha": LORA.alpha, "target_modules": list(LORA.target_modules), **lora}
    sections = {
        "algorithm": {"name": "sft"},
        "model": {"path": str(data / "model")},
        # Every step takes all examples, so their order does not matter.
        "data": {"train": [{"path": str(data / "pairs")}], "sequence_length": 24, "global_batch_size": len(PAIRS)},
        "trainer": {"learning_rate": 2.0e-2, "warmup_steps": 2, "weight_decay": 0.1, "micro_batch_tokens": 40, "dtype": dtype, "lora": adapter},
        "checkpoint": {"every_steps": 3, "keep": 2, "asynchronous": False},
        "run": {"max_steps": STEPS, "seed": SEED, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
        "parallel": parallel or {},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(load_config(write_recipe(folder, data)), progress=False)
    return folder / "run"


def summed_loss(model: Any, tokenizer: Any) -> torch.Tensor:
    """Returns the cross entropy per answer token, by transformers alone."""
    losses, count = [], 0
    for row in PAIRS:
        asked, answer = tokenizer(row["prompt"])["input_ids"], [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([asked + answer])).logits[0, len(asked) - 1 : -1]
        losses.append(F.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
        count += len(answer)
    return torch.stack(losses).sum() / count


def test_curve_and_adapter_are_those_of_a_plain_loop_over_transformers_with_the_linear_layers_of_peft(undisturbed: Path, data: Path) -> None:
    start = dict(new_adapter(adapted_shapes(read_shapes(data / "model"), LORA), SEED))
    plain = AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float64, attn_implementation="eager")
    model, tokenizer, found = adapt(plain, start, LORA.scale), AutoTokenizer.from_pretrained(data / "model"), rows(undisturbed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.999), weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = summed_loss(model, tokenizer)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2.0e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        assert found[step]["train/loss"] == pytest.approx(loss.item(), rel=1e-4), step
    assert found[-1]["train/loss"] < 0.7 * found[0]["train/loss"]
    adapter = load_file(undisturbed / "adapter" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in adapter} == start.keys()
    for name, tensor in adapter.items():
        module, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        assert torch.allclose(tensor.double(), getattr(model.get_submodule(module), side), atol=2e-4), name
    merged = AutoModelForCausalLM.from_pretrained(undisturbed / "model", dtype=torch.float64)
    with torch.no_grad():
        assert summed_loss(merged, tokenizer).item() == pytest.approx(summed_loss(model, tokenizer).item(), rel=1e-3)


class Crash(BaseException):
    """No ``Exception``, so that the run ends at once: after one of a callback it would be saved."""


class Crashing(Callback):
    def row(self, row: Any) -> None:
        if row["step"] == 5:
            raise Crash


@pytest.mark.full
def test_a_run_that_died_is_resumed_and_replayed_bit_for_bit_and_needs_its_base(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    base = tmp_path / "data" / "model"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs").symlink_to(data / "pairs")
    base.mkdir()
    for file in (data / "model").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    recipe = load_config(write_recipe(tmp_path, tmp_path / "data"))
    with pytest.raises(Crash):
        train(recipe, callbacks=[Crashing()], progress=False)
    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        resume(tmp_path / "run", progress=False)
    (base / "model.safetensors").write_bytes(weights)
    resume(tmp_path / "run", progress=False)
    assert rows(tmp_path / "run") == rows(undisturbed)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors", f"checkpoints/step-{STEPS}/rank-00000.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / name).read_bytes()
    (compared,) = replay(tmp_path / "run", 7)
    assert not compared.differences and compared.count > 4
    command("verify", str(tmp_path / "run"))


MESHES: list[dict[str, Any]] = [
    {"data": 2}, {"data": 2, "zero": 1}, {"data": 2, "zero": 2}, {"tensor": 2}, {"tensor": 2, "deterministic": False}, {"pipeline": 2}, {"context": 2},
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_train_the_adapter_of_one_process(mesh: dict[str, Any], undisturbed: Path, data: Path, tmp_path: Path) -> None:
    train(load_config(write_recipe(tmp_path, data, mesh)), progress=False)
    for ours, theirs in zip(rows(tmp_path / "run"), rows(undisturbed), strict=True):
        assert all(ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5) for name in ("train/loss", "actor/grad_norm"))
    expected = load_file(undisturbed / "adapter" / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors").items():
        assert torch.allclose(tensor, expected[name], atol=1e-4), name


HYBRID = LoraConfig(rank=4, alpha=12.0, target_modules=("q_proj", "v_proj", "o_proj", *LINEAR_ATTENTION_MODULES))


@pytest.fixture(scope="module")
def hybrid(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``data`` is, with a model of two layers of linear attention, one of softmax attention and experts, and the run of one process in it."""
    folder = tmp_path_factory.mktemp("hybrid")
    (folder / "pairs").symlink_to(data / "pairs")
    config = AutoConfig.for_model(
        "qwen3_next", vocab_size=len(AutoTokenizer.from_pretrained(data / "model")), hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=10, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, max_position_embeddings=64, initializer_range=0.1, eos_token_id=0, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).write_bytes((data / "model" / name).read_bytes())
    train(load_config(write_recipe(folder, folder, dtype="float64", target_modules=list(HYBRID.target_modules))), progress=False)
    return folder


@pytest.mark.full
def test_the_merged_model_of_a_hybrid_has_the_loss_of_its_adapter_in_transformers(hybrid: Path) -> None:
    tokenizer, adapter = AutoTokenizer.from_pretrained(hybrid / "model"), load_file(hybrid / "run" / "adapter" / "adapter_model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(hybrid / "model", dtype=torch.float32)
    with torch.no_grad():
        before = summed_loss(plain, tokenizer).item()
    adapted = adapt(plain.double(), {name.removeprefix("base_model.model."): tensor for name, tensor in adapter.items()}, HYBRID.scale)
    adapted.set_experts_implementation("eager")  # type: ignore[operator]
    merged = AutoModelForCausalLM.from_pretrained(hybrid / "run" / "model", dtype=torch.float32)
    with torch.no_grad():
        theirs, ours = summed_loss(adapted, tokenizer).item(), summed_loss(merged, tokenizer).item()
    assert rows(hybrid / "run")[0]["train/loss"] == pytest.approx(before, rel=1e-4)
    assert ours == pytest.approx(theirs, rel=1e-3) and ours < 0.7 * before


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", [{"tensor": 2}, {"tensor": 2, "deterministic": False}, {"pipeline": 2}, {"data": 2, "zero": 2}, {"data": 2, "expert": 2}], ids=str
)
def test_ranks_train_the_adapter_of_a_hybrid_as_one_process_does(mesh: dict[str, Any], hybrid: Path, tmp_path: Path) -> None:
    train(load_config(write_recipe(tmp_path, hybrid, mesh, "float64", target_modules=list(HYBRID.target_modules))), progress=False)
    for ours, theirs in zip(rows(tmp_path / "run"), rows(hybrid / "run"), strict=True):
        assert all(ours[name] == pytest.approx(theirs[name], rel=1e-9) for name in ("train/loss", "actor/grad_norm"))
    found, expected = (load_file(folder / "run" / "adapter" / "adapter_model.safetensors") for folder in (tmp_path, hybrid))
    assert found.keys() == expected.keys() and any("linear_attn.out_proj" in name for name in found)
    assert all(torch.allclose(tensor, expected[name], atol=1e-9) for name, tensor in found.items())
