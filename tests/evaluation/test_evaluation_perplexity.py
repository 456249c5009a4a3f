"""Perplexity through the engine against transformers, window by window."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.cli.main import main
from tandem.engine.llm import LLM
from tandem.evaluation.perplexity import perplexity
from tandem.types import UserError

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 4, "a short one.", "x", "what is this? " * 3]


def truth(folder: Path, texts: list[str], context: int, stride: int) -> tuple[float, int]:
    """Returns (sum of -log p, tokens) as in transformers' guide to perplexity: windows of ``context`` tokens, each predicting the tokens
    that the previous ones have not."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        done = 0
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + context, ids.shape[1])
            window, labels = ids[:, begin:end], ids[:, begin:end].clone()
            labels[:, : max(done - begin, 1)] = -100
            counted = int((labels != -100).sum())
            if counted:
                with torch.no_grad():
                    logits = model(window).logits.double()
                total += torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum").item()
                count += counted
            done = end
            if end == ids.shape[1]:
                break
    return total, count


@pytest.mark.parametrize(("context", "stride"), [(0, 0), (32, 0), (32, 8), (17, 5)])
def test_perplexity_is_that_of_transformers_over_the_same_windows(context: int, stride: int, small_model: Path) -> None:
    with LLM(small_model) as llm:
        found = perplexity(llm, TEXTS, context, stride)
    total, count = truth(small_model, TEXTS, context or 64, stride or (context or 64) - 1)
    assert found.tokens == count == sum(map(len, TEXTS)) - len(TEXTS)
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / sum(map(len, TEXTS)), rel=1e-6)


def test_command_reads_text_and_json_lines_alike(small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain.txt").write_text(TEXTS[0])
    (tmp_path / "lines.jsonl").write_text(json.dumps({"content": TEXTS[0]}) + "\n")
    answers: list[Any] = []
    for arguments in (("plain.txt",), ("lines.jsonl", "--text-key", "content")):
        assert main(["evaluate", str(small_model), "--task", "perplexity", "--data", str(tmp_path / arguments[0]), *arguments[1:], "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1] and answers[0]["tokens"] == len(TEXTS[0]) - 1
    assert main(["evaluate", str(small_model), "--task", "perplexity", "--data", str(tmp_path / "plain.txt")]) == 0
    assert f"perplexity {answers[0]['perplexity']:.4f}" in capsys.readouterr().out


def test_limit_is_the_number_of_documents_that_are_read(small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    given = ["evaluate", str(small_model), "--task", "perplexity", "--data", str(tmp_path / "lines.jsonl"), "--limit", "2", "--json"]
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    total, tokens = truth(small_model, TEXTS[:2], 64, 63)
    assert (found["documents"], found["tokens"]) == (2, tokens) and found["loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--task", "perplexity"), "needs a text"),
        (("--task", "perplexity", "--data", "{data}", "--limit", "0"), "--limit is 0; it must be at least 1"),
        (("--task", "sort", "--limit", "3"), "--prompts is the number of prompts of a task"),
        (("--task", "perplexity", "--data", "nix.txt"), "'nix.txt' is not a file"),
        (("--task", "perplexity", "--data", "{data}", "--context", "65"), "between 2 and the model's 64"),
        (("--task", "perplexity", "--data", "{data}", "--context", "8", "--stride", "8"), "between 1 and 7, or 0"),
        (("--task", "perplexity", "--data", "{data}", "--rollout.top_p=0.5"), "sets a key of a recipe"),
        (("--task", "perplexity", "--data", "{short}"), "nothing to predict"),
        (("--task", "sort", "--data", "{data}"), "--data is for --task perplexity"),
        (("--task", "lm-eval:"), "names no task"),
    ],
)
def test_mistake_is_one_line(arguments: tuple[str, ...], said: str, small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.txt").write_text(TEXTS[0])
    (tmp_path / "short.txt").write_text("x")
    places = {"{data}": str(tmp_path / "data.txt"), "{short}": str(tmp_path / "short.txt")}
    status = main(["evaluate", str(small_model), *(places.get(a, a) for a in arguments)])
    captured = capsys.readouterr()
    assert status == 2 and said in captured.err and len(captured.err.splitlines()) == 1


def test_unknown_character_is_named(small_model: Path) -> None:
    with LLM(small_model) as llm, pytest.raises(UserError, match="U\\+00E9"):
        perplexity(llm, ["café"])
