"""Every command that takes a model's folder takes a name of the Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers_cli import Done
from hub_server import Hub
from lora_adapters import write_adapter

from tandem.cli.main import main
from tandem.config.load import build
from tandem.config.model import NewModelConfig
from tandem.engine.llm import LLM
from tandem.model.create_model import create_model
from tandem.types import UserError

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
NAME = "me/tiny"


@pytest.fixture
def hub(empty_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The Hub with a tiny model; its folder is ``tmp_path/local``, and the working directory is empty."""
    create_model(build(NewModelConfig, SHAPE), 0, tmp_path / "local")
    empty_hub.add(NAME, tmp_path / "local")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return empty_hub


def outputs(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def test_commands_give_for_a_name_what_they_give_for_the_folder(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local, text = tmp_path / "local", tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 30)
    for words in (
        ("generate", "{}", "--prompt", "12+3=", "--temperature", "0", "--max-tokens", "8", "--json"),
        ("generate", local, "--tokenizer", "{}", "--prompt", "12+3=", "--temperature", "0", "--max-tokens", "8", "--json"),
        ("evaluate", "{}", "--task", "sort", "--prompts", "2", "--max-tokens", "4", "--json"),
    ):
        by_name, by_folder = (outputs(capsys, *(str(model) if word == "{}" else word for word in words)) for model in (f"hf://{NAME}", local))
        assert by_name == by_folder and by_name
    outputs(capsys, "quantize", NAME, tmp_path / "int8", "--method", "int8")
    outputs(capsys, "convert", f"{NAME}@main", tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()
    documents = tmp_path / "documents"
    documents.mkdir()
    text.rename(documents / "text.txt")
    outputs(capsys, "tokenize", documents, tmp_path / "tokens", "--tokenizer", NAME)
    assert sorted(set(hub.downloads())) == sorted(hub.downloads()), "each file was sent once"


def test_a_draft_model_may_be_on_the_hub_and_a_digest_of_it_is_verified(hub: Hub, tmp_path: Path) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7]}
    with LLM(NAME, speculative_config={"method": "draft", "model": f"hf://{NAME}"}, verify=True) as llm, LLM(tmp_path / "local") as plain:
        assert llm.generate(prompt, use_tqdm=False)[0].outputs[0].token_ids == plain.generate(prompt, use_tqdm=False)[0].outputs[0].token_ids


def test_an_adapter_may_be_on_the_hub(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_model(build(NewModelConfig, {**SHAPE, "num_hidden_layers": 2}), 0, tmp_path / "two")
    adapter = write_adapter(tmp_path / "adapter", {"q_proj": (16, 16), "down_proj": (16, 32)}, seed=1, rank=2)
    hub.add("me/adapter", adapter)
    words = ("generate", tmp_path / "two", "--prompt", "12+3=", "--temperature", "0", "--max-tokens", "12", "--json")
    by_name = outputs(capsys, *words, "--lora", "me/adapter")
    assert by_name == outputs(capsys, *words, "--lora", adapter) != outputs(capsys, *words)


def test_a_local_folder_of_that_name_takes_precedence(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty" / "me").mkdir()
    (tmp_path / "local").rename(tmp_path / "empty" / "me" / "tiny")
    assert outputs(capsys, "generate", NAME, "--prompt", "1", "--max-tokens", "1") and not hub.requests


@pytest.mark.full
def test_the_real_command_downloads_reads_the_token_and_works_offline(hub: Hub, tmp_path: Path) -> None:
    def run(**environment: str) -> Done:
        command = [str(Path(sys.executable).with_name("tandem")), "generate", NAME, "--prompt", "12+3=", "--temperature", "0"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)
        return Done(done.returncode, done.stdout, done.stderr)

    hub.repos[NAME].token = "hf_secret"
    assert "for a private model, set HF_TOKEN" in run().refusal()
    first = run(HF_TOKEN="hf_secret")
    assert first.code == 0 and first.err == "", first.err
    assert run(HF_HUB_OFFLINE="1") == first
    assert "hf download" in run(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "other")).refusal()


def test_names_that_mean_nothing_are_one_line(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    says = {
        ("generate", "me/tinny", "--prompt", "a"): "neither a folder here nor a model that",
        ("generate", NAME, "--prompt", "a", "--lora", NAME): "'me/tiny' has no adapter_config.json and adapter_model.safetensors; name a LoRA adapter",
        ("serve", "hf://tiny"): "does not name a model of the Hub",
        ("serve", NAME, "--tokenizer", "me/tinny"): "neither a folder here nor a model that",
        ("quantize", "me/tinny", "b", "--method", "int8"): "neither a folder here nor a model that",
        ("convert", "me/tinny", "b"): "neither a folder here nor a model that",
        ("evaluate", "me/tinny", "--task", "sort"): "neither a folder here nor a model that",
        ("tokenize", ".", "b", "--tokenizer", "me/tinny"): "neither a folder here nor a model that",
    }
    for words, expected in says.items():
        assert main(list(words)) == 2
        error = capsys.readouterr().err
        assert expected in error and len(error.splitlines()) == 1, words
    with pytest.raises(UserError, match="has no revision 'v9'"):
        LLM(NAME, revision="v9")


@pytest.mark.full
def test_a_server_is_started_by_name_and_served_under_it(hub: Hub, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tandem")), "serve", NAME, "--port", "0", "--threads", "1", "--revision", "main"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(line for line in process.stderr if "serving" in line).split(" at ")[1].split()[0]
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == NAME
            answer = httpx.post(f"{url}/v1/completions", json={"model": NAME, "prompt": "1", "max_tokens": 1})
            assert answer.status_code == 200 and json.loads(answer.text)["model"] == NAME
        finally:
            process.terminate()
