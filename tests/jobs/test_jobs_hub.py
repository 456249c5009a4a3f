"""Runs whose model is on the Hub: the commit is recorded, and a resumed run depends on it."""

import shutil
from pathlib import Path

import pytest
import yaml
from hub_server import Hub

from tandem.config.load import build
from tandem.config.model import NewModelConfig
from tandem.config.recipe import load_config
from tandem.jobs.start import dry_run, resume, train
from tandem.jobs.verify.verify_run import parts_of
from tandem.model.create_model import create_model
from tandem.model.huggingface.hub import hub_model, local_folder
from tandem.runtime.records.journal import Journal
from tandem.types import RunError, UserError

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
NAME = "me/tiny"


@pytest.fixture
def first(empty_hub: Hub, tmp_path: Path) -> Hub:
    """The Hub with a tiny model."""
    create_model(build(NewModelConfig, SHAPE), 0, tmp_path / "first")
    empty_hub.add(NAME, tmp_path / "first")
    return empty_hub


def recipe_file(folder: Path, **sections: object) -> Path:
    recipe = {
        "algorithm": {"name": "sft"},
        "model": {"path": NAME},
        "task": {"name": "sort"},
        "data": {"sequence_length": 64, "global_batch_size": 4},
        "run": {"max_steps": 2, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
        **sections,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump({name: content for name, content in recipe.items() if content is not None}))
    return folder / "recipe.yaml"


def test_a_run_records_the_commit_and_resumes_from_it_though_the_branch_moves(first: Hub, tmp_path: Path) -> None:
    commit = first.repos[NAME].revisions["main"]
    # Another program has brought a file that no run reads.
    snapshot = local_folder(NAME)
    (snapshot / "other.bin").write_bytes(b"other")
    train(load_config(recipe_file(tmp_path)))
    run = tmp_path / "run"
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model"]["path"] == f"hf://{NAME}@{commit}"
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        start = journal.get("start_model")
    assert start["hub"] == f"hf://{NAME}@{commit}" and "model.safetensors" in start["files"] and "other.bin" not in start["files"]
    assert [finding for part in parts_of(run) for finding in part.verify()] == []
    # Another model is pushed, the cache is emptied, and the folder is moved: the run continues from what it began with.
    create_model(build(NewModelConfig, SHAPE), 1, tmp_path / "second")
    assert first.add(NAME, tmp_path / "second") != commit
    shutil.rmtree(tmp_path / "hf")
    shutil.move(run, tmp_path / "moved")
    resume(tmp_path / "moved", overrides=["--run.max_steps=3"])
    assert all(f"/{commit}" in path or "/api/" in path for _, path, _ in first.requests)
    snapshot = next((tmp_path / "hf").glob("hub/models--*/snapshots/*"))
    weights = (snapshot / "model.safetensors").resolve()
    weights.chmod(0o600)
    weights.write_bytes(b"\0" * weights.stat().st_size)
    found = [finding for part in parts_of(tmp_path / "moved") for finding in part.verify()]
    assert any("model.safetensors' does not have the digest" in finding.what for finding in found)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text((tmp_path / "first" / "config.json").read_text() + " ")
    with pytest.raises(RunError, match=r"config.json' has .* it belongs to the model that the run starts from"):
        resume(tmp_path / "moved", overrides=["--run.max_steps=4"])


def test_a_damaged_download_is_found_before_the_run_starts(first: Hub, tmp_path: Path) -> None:
    weights = (local_folder(NAME) / "model.safetensors").resolve()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(content)
    with pytest.raises(RunError, match=r"model.safetensors' does not have the digest that the Hub gave for it; remove it"):
        train(load_config(recipe_file(tmp_path)))


@pytest.mark.usefixtures("unmeasured_speed")
def test_a_dry_run_downloads_the_description_and_states_the_size(first: Hub, tmp_path: Path) -> None:
    commit = first.repos[NAME].revisions["main"]
    size = len(first.repos[NAME].commits[commit]["model.safetensors"]) / 2**20
    pod = {"algorithm": {"name": "grpo"}, "rollout": {"max_tokens": 16}, "data": None}
    for sections in ({}, pod):
        recipe = recipe_file(tmp_path, **sections)
        lines = dry_run(load_config(recipe), recipe).splitlines()
        assert lines[1] == f"model: {NAME} at commit {commit[:12]}, {size:.1f} MiB to download", lines
    assert "model.safetensors" not in first.downloads() and "config.json" in first.downloads()
    assert not (tmp_path / "run").exists()
    files = first.repos[NAME].commits[commit]
    first.repos[NAME].commit({name: content for name, content in files.items() if name != "model.safetensors"})
    with pytest.raises(UserError, match=r"has no model\.safetensors; Tandem reads weights in safetensors only"):
        dry_run(load_config(recipe_file(tmp_path)), "recipe.yaml")


def test_no_network_is_one_line_with_the_key_of_the_folder(first: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=rf"run 'hf download {NAME} --local-dir tiny' on a machine that can, .* give --model.path=FOLDER$"):
        train(load_config(recipe_file(tmp_path)))
    assert not (tmp_path / "run").exists()
    create = {"create": {**SHAPE, "tokenizer": NAME}}
    with pytest.raises(UserError, match=r"give --model.create.tokenizer=FOLDER$"):
        train(load_config(recipe_file(tmp_path, model=create)))


def test_the_tokenizer_of_a_new_model_may_be_on_the_hub(first: Hub, tmp_path: Path) -> None:
    train(load_config(recipe_file(tmp_path, model={"create": {**SHAPE, "tokenizer": NAME}})))
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["create"]["tokenizer"]
    assert saved == f"hf://{NAME}@{first.repos[NAME].revisions['main']}" and hub_model(saved) is not None
    assert (tmp_path / "run" / "model" / "tokenizer.json").read_bytes() == (tmp_path / "first" / "tokenizer.json").read_bytes()
    assert "model.safetensors" not in first.downloads()


@pytest.mark.full
def test_a_pod_whose_model_and_draft_model_are_on_the_hub_resumes_without_it(first: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = {"speculative_config": {"method": "draft", "model": f"hf://{NAME}"}}
    sections = {
        "algorithm": {"name": "grpo", "group_size": 2}, "data": None, "evaluation": {"prompts": 2, "final_prompts": 2},
        "rollout": {"max_tokens": 8, "prompts_per_step": 2, "engine": draft},
        "run": {"max_steps": 1, "directory": str(tmp_path), "name": "run"},
    }  # fmt: skip
    commit = first.repos[NAME].revisions["main"]
    train(load_config(recipe_file(tmp_path, **sections)))
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["model"]["path"] == saved["rollout"]["engine"]["speculative_config"]["model"] == f"hf://{NAME}@{commit}"
    first.repos.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resume(tmp_path / "run", overrides=["--run.max_steps=2"])
    assert [finding for part in parts_of(tmp_path / "run") for finding in part.verify()] == []
