"""Commands with a folder that only a module of transformers computes: each computes it by ``--model-impl transformers`` or says in one line that it cannot."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cli.main import main
from tandem.text.characters import make_character_tokenizer
from tandem.text.tokenizer import Tokenizer

TEXT = "0123 42, 7 and 1999"
BY_TRANSFORMERS = ("--model-impl", "transformers")


@pytest.fixture(scope="module")
def peer_and_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random GPT-NeoX of transformers, and its folder."""
    import transformers

    folder = tmp_path_factory.mktemp("gpt_neox")
    transformers.logging.disable_progress_bar()
    make_character_tokenizer("ascii", folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    tokenizer = Tokenizer.from_folder(folder)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_ids[0], "pad_token_id": tokenizer.pad_token_id}
    config = transformers.AutoConfig.for_model("gpt_neox", vocab_size=tokenizer.vocab_size, **sizes, **ends)
    peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    peer.save_pretrained(folder)
    return peer, folder


@pytest.mark.full
def test_the_perplexity_is_that_of_transformers(peer_and_folder: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer, folder = peer_and_folder
    (tmp_path / "text.txt").write_text(TEXT)
    assert main(["evaluate", str(folder), "--task", "perplexity", "--data", str(tmp_path / "text.txt"), *BY_TRANSFORMERS, "--json"]) in (0, None)
    measured = json.loads(capsys.readouterr().out)
    tokens = torch.tensor([Tokenizer.from_folder(folder).encode(TEXT)])
    with torch.no_grad():
        loss = float(peer(tokens, labels=tokens).loss)
    assert measured["loss"] == pytest.approx(loss, abs=1e-4) and measured["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)


@pytest.mark.full
def test_a_task_is_evaluated_and_data_are_checked(peer_and_folder: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = peer_and_folder
    assert main(["evaluate", str(folder), "--task", "sort", "--prompts", "2", "--max-tokens", "4", *BY_TRANSFORMERS]) in (0, None)
    assert "accuracy 0.0000" in capsys.readouterr().out
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1" * 70, "answer": "3"}) + "\n")
    assert main(["data", "check", str(rows), "--model", str(folder), *BY_TRANSFORMERS]) == 1
    assert "64" in capsys.readouterr().out


def test_a_command_that_does_not_compute_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    make_character_tokenizer("ascii", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    (folder / "model.safetensors").touch()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"algorithm": {"name": "sft"}, "model": {"path": str(folder), "implementation": "transformers"}, "task": {"name": "sort"}}))
    refusals = {
        ("emit", "--topology", "inference", "--model", str(folder)): "start a server of another with 'tandem serve FOLDER --model-impl transformers'",
        ("weights", "check", "--model", str(folder)): "the weights of these alone are checked; name a folder of one",
        ("weights", "check", "--model", str(recipe)): "has model.implementation 'transformers', whose weights are not checked",
        ("evaluate", str(folder), "--task", "sort"): "(--model-impl transformers)",
        ("evaluate", str(folder), "--task", "sort", "--trust-remote-code"): "--model-impl is 'auto', which runs no code of a model's folder; set it to",
    }
    for command, says in refusals.items():
        assert main(list(command)) == 2
        told = capsys.readouterr().err
        assert says in told and told.count("\n") == 1
