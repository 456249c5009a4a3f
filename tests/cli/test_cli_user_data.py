"""A run on the user's own rows: verl's Parquet file with messages, and the mistakes of a first hour, each one line with the fix."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import real

from tandem.config.model import NewModelConfig
from tandem.model.new_model import write_tokenizer
from tandem.runtime.records.journal import Journal

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ASK = 'Let\'s think step by step and output the final answer after "####".'
Run = Callable[..., Any]


def verl_rows(count: int) -> list[dict[str, Any]]:
    """Rows as verl's preprocessing of GSM8K writes them."""
    return [
        {
            "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"What is {i}+1? {ASK}"}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)}, "extra_info": {"split": "train", "index": i, "answer": f"#### {i + 1}"},
        }
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_tokenizer(NewModelConfig(), tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    parquet.write_table(pyarrow.Table.from_pylist(verl_rows(30)), tmp_path / "train.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(verl_rows(40)[30:]), tmp_path / "test.parquet")
    return tmp_path / "train.parquet"


def given(rows: Path, recipe: Path) -> list[str]:
    task = {"name": "dataset", "path": str(rows), "eval_path": str(rows.with_name("test.parquet"))}
    return [
        "train", str(recipe), f"--task={json.dumps(task)}", f"--model.create.tokenizer={rows.parent / 'tokenizer'}", "--sft.corrupted_share=0",
        "--rewards.functions=[{function: task, name: correct}, {function: gsm8k, weight: 0.5}]",
    ]  # fmt: skip


def test_verls_parquet_file_is_a_run_as_it_is(command: Run, recipe: Path, rows: Path) -> None:
    done = command(*given(rows, recipe), "--dry-run")
    assert done.code == 0, done.err
    assert "first prompt: '<user>What is " in done.out and f"{ASK}\\n<assistant>', " in done.out.replace('\\\'', "'")
    assert "predicted time: " in done.out and "generation " in done.out and "tokens" in done.out.splitlines()[-1]
    shown = command("data", "check", rows, "--model", rows.parent / "tokenizer", "--rows", "1")
    assert shown.code == 0 and f"  | <user>What is 0+1? {ASK}\n  | <assistant>" in shown.out


@pytest.mark.full
def test_verls_parquet_file_trains_and_its_rewards_are_verls(recipe: Path, rows: Path) -> None:
    done = real(*given(rows, recipe), "--inline", "--run.name=mine")
    assert done.code == 0, done.err
    (run,) = (rows.parent / "runs").iterdir()
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        samples, scores, files = journal.samples(0), journal.scores(0), journal.get("input_files")
    assert samples is not None and scores is not None and len(samples) == len(scores) == 4
    assert all(score.components["correct"] == score.components["gsm8k"] for score in scores)
    assert set(map(Path, files)) == {rows, rows.with_name("test.parquet")}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: {**r, "prompt": r["prompt"][0]["content"] if r["extra_info"]["index"] == 4 else r["prompt"]}, "cannot be written"),
        (lambda r: {**r, "reward_model": {"style": "model"}}, "there is no answer for reward function 'correct'"),
        (lambda r: {**r, "reward_model": {"style": "rule", "ground_truth": {"target": ["1"]}}}, "train.parquet, row 1: the answer is \"{'target': ['1']}\""),
        (lambda r: {**r, "prompt": [{**r["prompt"][0], "role": "human"}]}, "train.parquet, row 1: message 1 has the role 'human'"),
        (lambda r: {**r, "images": [b"\x89PNG"]}, "train.parquet, row 1: column 'images' holds bytes"),
        (lambda r: {**r, "prompt": [{"role": "user", "content": "x" * 300}]}, "train.parquet, row 1: the prompt has"),
    ],
)
def test_a_mistake_in_a_table_is_one_line(command: Run, recipe: Path, rows: Path, change: Callable[[Any], Any], problem: str) -> None:
    import pyarrow
    import pyarrow.parquet

    changed = [change(row) for row in verl_rows(30)]
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(changed), rows)
    except pyarrow.ArrowException:
        # Arrow has no mixed columns; JSON lines have.
        assert problem == "cannot be written"
        rows.write_text("".join(json.dumps(row) + "\n" for row in changed))
        problem = "train.parquet' is not a Parquet file: its first bytes are b'{\"da'; name the file by what it holds"
    assert problem in command(*given(rows, recipe), "--dry-run").refusal()


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("--task.prompt_key=question",), "train.parquet, row 1: key 'question' is missing; the line has 'data_source', 'prompt'"),
        (("--task.answer_key=reward_model.answer",), "key 'reward_model.answer' is missing"),
        (("--task.path=nowhere/train.parquet",), "'nowhere/train.parquet' does not exist; name the file in 'task.path'; there is no folder 'nowhere'"),
        (("--task.split=test",), "is a file and has no split 'test'"),
        (("--task.chat=false",), "the prompts are messages, which only the chat template formats; leave task.chat out"),
        (("--task.prompt_template=Q: {prompt}",), "'task.prompt_template' is 'Q: {prompt}', which is not read: the prompts are messages"),
        (("--task.held_out_share=0.2",), "'task.held_out_share' is 0.2, which is not read: the prompts of task.eval_path are held out"),
        (("--rewards.functions=[{function: examples/rewards.py:exact_symbol}]",), "'exact_symbol' has the parameter 'answer', which is neither a column"),
        (("--rewards.functions=[{function: gsm8}]",), "reward function 'gsm8' is neither one of task, answer_matcher"),
        (("--rewards.functions=[{function: 'http://127.0.0.1:9/score'}]",), "nothing answers at 'http://127.0.0.1:9/score' (Connection refused); start it"),
        (("--task.name=jsonl",), "'task.name' is 'jsonl'; use sort, addition, programs, dataset, reasoning_gym:NAME or verifiers:NAME"),
        (("--task.path=openai/gsm8k", "--task.eval_path=null"), "run 'hf download --repo-type dataset openai/gsm8k --local-dir gsm8k'"),
    ],
)
def test_a_wrong_key_of_the_task_is_one_line(
    command: Run, recipe: Path, rows: Path, overrides: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert problem in command(*given(rows, recipe), *overrides, "--dry-run").refusal()
