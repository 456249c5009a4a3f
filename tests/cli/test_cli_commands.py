"""Each command does what its help says."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from helpers_cli import COMMAND, ROOT, Done, real

from tandem.cli.main import COMMANDS, main
from tandem.runtime.records.metrics import read_rows
from tandem.types import UserError


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example_that_its_parser_takes(command, name) -> None:
    done: Done = command(name, "--help")
    assert done.code == 0 and done.err == ""
    assert "example" in done.out and f"tandem {name}" in done.out.split("example", 1)[1]


def test_the_help_lists_every_command(command) -> None:
    done: Done = command("--help")
    assert done.code == 0 and re.findall(r"^    (\w+)", done.out, re.M) == list(COMMANDS)


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_greedy_completions_are_those_of_transformers(command, model) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["3142=", "Hello, world", "x", "a b c d e f g"]
    asked = [part for prompt in prompts for part in ("--prompt", prompt)]
    found = json_lines(command("generate", model, *asked, "--temperature", "0", "--max-tokens", "24", "--json").out)
    tokenizer, truth = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, completion in zip(prompts, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        whole = truth.generate(**ids, max_new_tokens=24, do_sample=False, use_cache=True)[0, ids.input_ids.shape[1] :].tolist()
        assert completion["prompt"] == prompt
        assert list(completion["token_ids"]) == whole
        assert completion["text"] == tokenizer.decode(whole, skip_special_tokens=True)


def test_prompts_come_from_standard_input_one_a_line(command, model) -> None:
    done = real("generate", model, "--temperature", "0", "--max-tokens", "4", stdin="12=\n\n345=\n")
    alone: list[Done] = [command("generate", model, "--temperature", "0", "--max-tokens", "4", "--prompt", p) for p in ("12=", "345=")]
    assert done.code == 0
    assert done.out == "".join(p + a.out for p, a in zip(("12=", "345="), alone, strict=True))


def test_several_completions_of_one_prompt_differ_and_the_seed_brings_them_back(command, model) -> None:
    given = ("generate", model, "--prompt", "31=", "--n", "6", "--max-tokens", "12", "--json")
    first, again, other = (json_lines(command(*given, "--seed", seed).out) for seed in ("1", "1", "2"))
    texts = [completion["text"] for completion in first]
    assert len(texts) == 6 and len(set(texts)) > 1
    assert texts == [completion["text"] for completion in again] != [completion["text"] for completion in other]


def test_json_holds_token_ids_and_why_a_completion_ended(command, model) -> None:
    (found,) = json_lines(command("generate", model, "--prompt", "7=", "--max-tokens", "3", "--temperature", "0", "--json").out)
    assert set(found) >= {"prompt", "text", "token_ids", "finish_reason", "index"}
    assert found["finish_reason"] == "length" and len(found["token_ids"]) == 3


def test_two_processes_with_a_part_of_the_model_each_give_the_same_text(command, model) -> None:
    given = ("generate", model, "--prompt", "7=", "--prompt", "12+3=", "--max-tokens", "6")
    assert command(*given, "--tensor-parallel-size", "2").out == command(*given).out


def questions(path: Path, answers: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in answers.items()), encoding="utf-8")
    return path


def test_accuracy_is_the_share_of_completions_that_generate_gives_and_a_person_would_count(command, model, tmp_path) -> None:
    prompts = [f"{7 * i % 23}+{i}=" for i in range(20)]
    asked = [part for prompt in prompts for part in ("--prompt", prompt)]
    completions = json_lines(command("generate", model, *asked, "--temperature", "0", "--max-tokens", "6", "--json").out)
    answers = {c["prompt"]: c["text"].strip() if i % 3 == 0 and c["text"].strip() else "no" for i, c in enumerate(completions)}
    right = sum(c["text"].strip() == answers[c["prompt"]] for c in completions)
    assert 0 < right < 20
    recipe = {
        "model": {"path": "elsewhere"},
        "task": {
            "name": "dataset", "path": str(questions(tmp_path / "train.jsonl", {f"q{i}": "x" for i in range(9)})),
            "eval_path": str(questions(tmp_path / "eval.jsonl", answers)),
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    given = ("evaluate", model, "--recipe", tmp_path / "recipe.yaml", "--greedy", "--max-tokens", "6", "--rollout.prompts_per_step=4")
    found = json.loads(command(*given, "--json").out)
    assert found["kind"] == "greedy" and found["count"] == 20 and found["faults"] == 0
    assert found["accuracy"] == pytest.approx(right / 20, abs=1e-12)
    assert found["mean_reward"] == pytest.approx(right / 20, abs=1e-12)
    assert Counter(e["completion"] for e in found["examples"]) <= Counter(c["text"] for c in completions)
    lines = command(*given).out.splitlines()
    assert lines[0].startswith(f"greedy accuracy {right / 20:.4f}") and "20 prompts" in lines[0]


def test_an_evaluation_computes_the_model_as_its_recipe_says(model, monkeypatch, tmp_path: Path) -> None:
    """The rotary frequencies of a model with LongRoPE depend on its context."""
    recipe = {"model": {"path": "another", "max_length": 24, "implementation": "tandem"}, "task": {"name": "sort"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    given = {}

    def refused(folder: str, **options: object) -> None:
        given.update(options)
        raise UserError("enough is known")

    monkeypatch.setattr("tandem.engine.llm.LLM", refused)
    for task, expected in ((("--task", "sort"), (None, "auto")), (("--recipe", str(tmp_path / "recipe.yaml")), (24, "tandem"))):
        assert main(["evaluate", str(model), *task, "--prompts", "1", "--max-tokens", "8"]) == 2
        assert (given["max_model_len"], given["model_impl"]) == expected


def test_a_sampled_evaluation_is_the_same_with_the_same_seed(command, model) -> None:
    given = ("evaluate", model, "--task", "sort", "--prompts", "8", "--max-tokens", "8", "--json")
    first, again, other = (command(*given, "--seed", seed).out for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_run_prints_plain_lines_and_commands_that_work_as_they_stand(command, finished_run) -> None:
    directory, out = finished_run
    assert "\x1b" not in out
    assert "create model" in out and "] sft" in out and "step 0: reward" in out and "final accuracy" in out
    commands = [shlex.split(line) for line in out.partition("try the model:\n")[2].splitlines() if line.startswith("  ")]
    assert [words[1] for words in commands] == ["generate", "evaluate"]
    for words in commands:
        # The tests run without an activated environment, so that ``tandem`` alone would not be found.
        assert (ROOT / words[0]).samefile(COMMAND)
        done: Done = command(*words[1:], *(("--prompts", "4") if words[1] == "evaluate" else ()))
        assert done.code == 0 and done.out, done.err
    (row,) = read_rows(directory / "metrics.jsonl")
    assert row["mismatch_kl"] == 0.0


def test_report_writes_the_page_again_from_the_runs_files(command, finished_run) -> None:
    directory, _ = finished_run
    page = directory / "report.html"
    before = page.read_text(encoding="utf-8")
    page.unlink()
    done: Done = command("report", directory)
    assert done.code == 0 and done.out.strip() == str(page)
    assert len(page.read_text(encoding="utf-8")) > 0.9 * len(before)


def test_report_of_two_runs_is_one_page_and_its_output_must_be_a_file(command, finished_run, tmp_path: Path) -> None:
    directory, _ = finished_run
    other = shutil.copytree(directory, tmp_path / "other")
    done: Done = command("report", directory, other, "-o", tmp_path / "both.html")
    assert done.code == 0 and done.out.strip() == str(tmp_path / "both.html")
    assert '"differences":[]' in (tmp_path / "both.html").read_text()
    os.mkfifo(tmp_path / "pipe")
    for path, problem in (("pipe", "no regular file"), (".", "no regular file"), ("none/x.html", "is not a folder; make it")):
        assert problem in command("report", directory, "-o", tmp_path / path).refusal()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert "is named twice" in command("report", directory, directory).refusal()
    assert "is not a run" in command("report", directory, tmp_path).refusal()


def lasting(directory: Path) -> list[dict]:
    """Returns the rows of a run without the keys that depend on time and machine."""
    passing = ("timing_s/", "perf/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(passing)} for row in read_rows(directory / "metrics.jsonl")]


def test_a_run_that_has_ended_resumes_to_the_same_end(command, finished_run) -> None:
    directory, out = finished_run
    weights, rows = (directory / "model" / "model.safetensors").read_bytes(), lasting(directory)
    done = real("resume", directory, "--inline")
    assert done.code == 0, done.err
    summary = next(line for line in out.splitlines() if line.startswith("target"))
    assert summary in done.out
    assert (directory / "model" / "model.safetensors").read_bytes() == weights
    assert lasting(directory) == rows


def test_doctor_names_the_torch_and_the_cores_that_are_here(command) -> None:
    done: Done = command("doctor")
    facts = {line[:16].strip(): line[16:].strip() for line in done.out.splitlines()}
    assert done.code == 0
    assert facts["torch"] == importlib.metadata.version("torch")
    assert f"{len(os.sched_getaffinity(0))} cores" in facts["machine"]
    assert {"memory", "shared memory", "disk", "kernels", "instruction set", "Python"} <= set(facts)


def test_a_dry_run_prints_the_plan_and_makes_nothing(command, recipe) -> None:
    before = sorted(recipe.parent.iterdir())
    done: Done = command("train", recipe, "--dry-run")
    assert done.code == 0 and "is valid" in done.out
    assert all(f"predicted {name}: " in done.out for name in ("trainer", "rollout", "segments", "disk"))
    assert sorted(recipe.parent.iterdir()) == before


def test_runs_without_a_name_take_the_next_free_one(recipe) -> None:
    from tandem.config.recipe import load_config
    from tandem.jobs.prepare import new_directory

    config = load_config(recipe)
    assert [new_directory(config.run, "recipe").name for _ in range(3)] == ["recipe", "recipe-2", "recipe-3"]


@pytest.mark.parametrize(
    "words", [("generate", "--prompt", "12="), ("serve",), ("evaluate", "--task", "sort"), ("evaluate", "--task", "perplexity", "--data", "text.txt")]
)
def test_a_model_with_a_flipped_bit_is_refused_where_verification_is_asked_for(command, model, tmp_path, monkeypatch, words) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("123=321")
    shutil.copytree(model, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done: Done = command(words[0], tmp_path / "model", *words[1:], "--verify")
    assert done.code == 1 and done.out == "" and len(done.err.splitlines()) == 1
    assert "model.safetensors' does not have the digest it was written with; restore the folder from a copy" in done.err


def test_a_model_that_is_as_it_was_written_is_verified_and_used_and_one_without_digests_is_named(command, model, tmp_path) -> None:
    given = ("--prompt", "12=", "--max-tokens", "2", "--verify")
    assert command("generate", model, *given).code == 0
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    done: Done = command("generate", tmp_path / "model", *given)
    assert done.code == 1 and "has no manifest.json and cannot be verified; leave out --verify" in done.err


def test_ctrl_c_while_the_command_is_imported_ends_in_one_line() -> None:
    program = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tandem.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "from tandem.__main__ import command\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.exit(command())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tandem: interrupted\n")
