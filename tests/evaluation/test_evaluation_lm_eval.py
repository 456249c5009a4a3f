"""Tasks of lm-eval on the engine against a plain model for the harness over transformers, with local data."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'tandem-rl[evaluate]'): its tasks are not run through the engine")

from tandem.cli.main import main
from tandem.engine.llm import LLM
from tandem.evaluation.lm_eval import run_tasks
from tandem.types import UserError

QUESTIONS = [
    {"question": "what jumps over the dog?", "choices": ["the fox", "a cat", "the sun"], "answer": 0},
    {"question": "what is lazy?", "choices": ["the tree", "the dog"], "answer": 1},
    {"question": "", "choices": ["begin with this", "or this"], "answer": 1},
    {"question": "a very long one " * 6, "choices": ["yes", "no", "it may be", "never"], "answer": 2},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one task of each kind: multiple choice, generation, and the likelihood of whole texts."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    shared: dict[str, Any] = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test", "metadata": {"version": 1.0},
    }  # fmt: skip
    several: list[dict[str, Any]] = [
        {"task": "local_choices", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
         "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        {"task": "local_generation", "output_type": "generate_until", "doc_to_text": "{{question}} answer", "doc_to_target": "{{choices[answer]}}",
         "generation_kwargs": {"until": ["\n", "?"], "max_gen_toks": 8, "do_sample": False}, "metric_list": [{"metric": "exact_match"}]},
        {"task": "local_rolling", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}} is the question",
         "metric_list": [{"metric": "byte_perplexity"}]},
    ]  # fmt: skip
    for task in several:
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**shared, **task}))
    return folder


def over_transformers(folder: Path) -> Any:
    """A model for the harness, written with transformers alone: one request at a time, no batch, no cache."""
    from lm_eval.api.model import TemplateLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    class Plain(TemplateLM):
        eot_token_id = tokenizer.eos_token_id
        prefix_token_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return tokenizer(string, add_special_tokens=add_special_tokens is not False).input_ids

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            found = []
            for _, context, continuation in requests:
                ids = torch.tensor([(context + continuation)[-64:]])
                with torch.no_grad():
                    logprobs = model(ids).logits.double().log_softmax(-1)[0, -len(continuation) - 1 : -1]
                wanted = torch.tensor(continuation)
                found.append((float(logprobs.gather(1, wanted[:, None]).sum()), bool((logprobs.argmax(-1) == wanted).all())))
            return found

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                ids, total = [self.prefix_token_id, *self.tok_encode(request.args[0], add_special_tokens=False)], 0.0
                # 63 tokens at a time, each part after the token before it; the last part has as much context as fits.
                for begin in range(1, len(ids), 63):
                    part = ids[begin : begin + 63]
                    before = ids[max(0, begin + len(part) - 64) : begin] if begin > 1 else ids[:1]
                    total += self._loglikelihood_tokens([(None, before, part)])[0][0]
                found.append(total)
            return found

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            found = []
            for request in requests:
                text, asked = request.args
                ids = torch.tensor([self.tok_encode(text)[-(64 - asked["max_gen_toks"]) :]])
                drawn = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked["max_gen_toks"], do_sample=False, pad_token_id=0)
                answer = tokenizer.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True)
                for stop in asked["until"]:
                    answer = answer.split(stop)[0]
                found.append(answer)
            return found

    return Plain()


NAMES = ["local_choices", "local_generation", "local_rolling"]


@pytest.mark.full
def test_figures_and_every_answer_are_those_of_the_harness_with_transformers(small_model: Path, tasks: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from tandem.evaluation.lm_eval import engine_model

    found = {}
    with LLM(small_model) as llm:
        for name, model in (("ours", engine_model(llm)), ("theirs", over_transformers(small_model))):
            found[name] = simple_evaluate(model, tasks=NAMES, task_manager=TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0)
        scores = {(s.task, s.metric): s.value for s in run_tasks(llm, NAMES, tasks)}
    for task in NAMES:
        for ours, theirs in zip(found["ours"]["samples"][task], found["theirs"]["samples"][task], strict=True):
            assert ours["doc"] == theirs["doc"]
            for a, b in zip(_flat(ours["resps"]), _flat(theirs["resps"]), strict=True):
                assert a == (pytest.approx(b, abs=1e-4) if isinstance(b, float) else b)
    wanted = found["theirs"]["results"]
    assert scores["local_choices", "acc"] == wanted["local_choices"]["acc,none"]
    assert scores["local_choices", "acc_norm"] == wanted["local_choices"]["acc_norm,none"]
    assert scores["local_rolling", "byte_perplexity"] == pytest.approx(wanted["local_rolling"]["byte_perplexity,none"], rel=1e-5)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [one for each in value for one in _flat(each)]
    return [value]


def test_command_prints_a_line_a_figure(small_model: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", str(small_model), "--task", "lm-eval:local_choices", "--tasks-folder", str(tasks), "--limit", "3"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("local")] == [["local_choices", "acc"], ["local_choices", "acc_norm"]]


@pytest.mark.full
def test_unknown_task_is_one_line(small_model: Path, tasks: Path) -> None:
    with LLM(small_model) as llm, pytest.raises(UserError, match="no task 'nix'") as caught:
        run_tasks(llm, ["nix"], tasks)
    assert len(str(caught.value).splitlines()) == 1
