"""Reward functions and datasets from Python are written into the run, which then needs the program no more."""

import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.config.load import build
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.config.rewards import RewardFunctionConfig
from tandem.jobs.python_inputs import PythonInputs, python_inputs, written_for_checks
from tandem.jobs.start import resume, train
from tandem.jobs.uploads import restore
from tandem.jobs.verify.input_files import check_input_files, verify_input_files
from tandem.runtime.callback import Callback
from tandem.runtime.import_path import load_function
from tandem.runtime.process.temporary import sweep_temporary
from tandem.runtime.records.journal import Journal
from tandem.storage.digests import bytes_digest
from tandem.types import RunError, UserError

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(30)]


def recipe(folder: Path, **task: Any) -> Recipe:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
    return build(
        Recipe,
        {
            "model": {"create": shape}, "task": {"name": "sort", **task},
            "sft": {"steps": 1, "warmup_steps": 0, "batch_size": 2, "max_accuracy": 1.0, "corrupted_share": 0.0},
            "rollout": {"prompts_per_step": 2, "max_tokens": 8}, "algorithm": {"group_size": 2}, "evaluation": {"prompts": 4, "final_prompts": 4},
            "run": {"max_steps": 1, "directory": str(folder / "runs"), "name": "mine"}, "machine": {"threads": 1},
            "checkpoint": {"upload": str(folder / "copies")},
        },
    )  # fmt: skip


def written(inputs: PythonInputs, folder: Path) -> Recipe:
    given: AnyRecipe = inputs.write(folder)
    assert isinstance(given, Recipe)
    return given


def rows_of(dataset: Any, folder: Path, **task: Any) -> Any:
    given = written(python_inputs(recipe(folder, **task), None, dataset), folder / "inputs")
    assert given.task.name == "dataset" and given.task.path is not None
    return [json.loads(line) for line in Path(given.task.path).read_text(encoding="utf-8").splitlines()]


def test_a_kill_during_the_checks_leaves_no_folder_that_the_next_run_does_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with written_for_checks(python_inputs(recipe(tmp_path), None, None)):
        assert not any(scratch.iterdir()), "a recipe alone needs no folder"
    child = os.fork()
    if child == 0:
        with written_for_checks(python_inputs(recipe(tmp_path), None, ROWS)):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(scratch.iterdir())) == 1
    sweep_temporary()
    assert not any(scratch.iterdir())


def test_datasets_of_every_kind_become_the_same_rows(tmp_path: Path) -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.DataFrame(ROWS)
    for dataset in (ROWS, tuple(ROWS), frame, datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS).data.table, iter_list(ROWS)):
        assert rows_of(dataset, tmp_path) == ROWS, type(dataset)
    frame.loc[0, "level"] = float("nan")
    assert rows_of(frame, tmp_path)[0]["level"] is None
    shuffled = datasets.Dataset.from_list(ROWS).shuffle(seed=3)
    assert rows_of(shuffled, tmp_path) == shuffled.to_list() != ROWS


def iter_list(rows: list[Any]) -> list[Any]:
    """As other libraries have them: numbers of numpy, tuples."""
    numpy = pytest.importorskip("numpy")
    return [{**row, "level": numpy.int64(row["level"])} for row in rows]


def test_a_dataset_with_splits_brings_its_own_evaluations_and_a_path_is_kept(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:20]), "test": datasets.Dataset.from_list(ROWS[20:])})
    given = written(python_inputs(recipe(tmp_path), None, splits), tmp_path / "inputs").task
    assert [json.loads(line) for line in Path(str(given.eval_path)).read_text().splitlines()] == ROWS[20:]
    task = written(python_inputs(recipe(tmp_path, chat=True, system_prompt="S"), None, "openai/gsm8k"), tmp_path / "none").task
    assert (task.path, task.chat, task.system_prompt) == ("openai/gsm8k", True, "S") and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        ([], "dataset is empty"),
        (3, "dataset is a int; it must be a datasets.Dataset, a list of dicts, a pandas DataFrame, a path or a name on the Hub"),
        ([{"prompt": "a"}, "b"], "dataset[1] is a str; a row is a dict"),
        ([{"prompt": "a", "image": object()}], "dataset[0] cannot be written as JSON: a value is a object; leave that column out"),
        ({"test": ROWS}, "dataset is a mapping with 'test'; it needs 'train'"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_one_line(dataset: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        python_inputs(recipe(tmp_path), None, dataset)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_stream_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    with pytest.raises(UserError, match=r"IterableDataset, which has no length; give the rows that you want, for example list\(dataset.take"):
        python_inputs(recipe(tmp_path), None, datasets.Dataset.from_list(ROWS).to_iterable_dataset())


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of the user's, imported as the program would."""
    (tmp_path / "rewards_of_a_test.py").write_text("def brevity(completions, **kwargs):\n    return [-float(len(text)) for text in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    import rewards_of_a_test

    yield rewards_of_a_test
    sys.modules.pop("rewards_of_a_test")


def functions_of(rewards: Any, folder: Path) -> tuple[RewardFunctionConfig, ...]:
    return written(python_inputs(recipe(folder), rewards, None), folder / "inputs").rewards.functions


def test_functions_are_named_by_file_where_they_are_in_one_and_written_by_value_where_not(module: Any, tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    threshold = 3

    def closure(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(text) > threshold) for text in completions]

    rewards = [module.brevity, (closure, 0.5), lambda completions, **kwargs: [7.0] * len(completions), partial(closure), "math", ("json:dumps", 0.0)]
    functions = functions_of(rewards, tmp_path)
    place = tmp_path / "inputs"
    assert [function.function for function in functions] == [
        f"{tmp_path}/rewards_of_a_test.py:brevity", f"{place}/closure.pkl:closure", f"{place}/reward_2.pkl:reward_2", f"{place}/closure_2.pkl:closure_2",
        "math", "json:dumps",
    ]  # fmt: skip
    assert [function.weight for function in functions] == [1.0, 0.5, 1.0, 1.0, 1.0, 0.0]
    threshold = 100
    loaded = [load_function(function.function, "reward function")[0](completions=["ab", "abcd"]) for function in functions[:4]]
    assert loaded == [[-2.0, -4.0], [0.0, 1.0], [7.0, 7.0], [0.0, 1.0]]
    (single,) = functions_of(module.brevity, tmp_path)
    assert single.label == "brevity"


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([], "rewards is an empty list"),
        ([3], "rewards[0] is a int; it must be a function, 'module:function', an address, or a pair with a weight"),
        ([(len, "1")], "rewards[0] is a pair whose second is '1'; it must be the weight"),
        ([dict], "rewards[0] is a type 'dict'; it must be a function"),
        (["mth"], "reward function 'mth' is neither one of"),
        ([partial(max, key=threading.Lock())], "which cannot be written to the run: cannot pickle"),
    ],
)
def test_a_reward_that_cannot_be_used_is_one_line(rewards: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        functions_of(rewards, tmp_path)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_without_cloudpickle_a_lambda_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UserError, match=r"pip install 'tandem-rl\[notebook\]', or put the function in a file and import it"):
        functions_of([lambda completions: [1.0]], tmp_path)


def test_a_model_as_a_reward_is_told_to_be_served(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UserError, match=r"rewards\[0\] is a model \(Linear\); serve it behind HTTP and give its address"):
        functions_of([torch.nn.Linear(1, 1)], tmp_path)


def longest_answer() -> Callable[..., list[float]]:
    limit = 8
    return lambda completions, answer, **kwargs: [float(answer[i][:1] in text and len(text) <= limit) for i, text in enumerate(completions)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with a reward by value and rows from Python, in a folder that was moved afterwards."""
    pytest.importorskip("cloudpickle")
    folder = tmp_path_factory.mktemp("python")
    result = train(recipe(folder), rewards=[longest_answer()], dataset=ROWS, inline=True)
    assert result.steps == 1
    return (folder / "runs" / "mine").rename(folder / "moved")


def test_a_run_from_python_is_recorded_with_digests_and_without_paths_of_its_own_folder(run: Path) -> None:
    text, stage = (run / "config.yaml").read_text(), (run / "sft" / "config.yaml").read_text()
    assert "run://inputs/train.jsonl" in text and "run://inputs/reward_0.pkl:reward_0" in text and "run://../inputs/train.jsonl" in stage
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        assert set(journal.get("input_files")) == {"inputs/train.jsonl", "inputs/reward_0.pkl"}
    assert main(["verify", str(run)]) == 0
    assert pickle.loads((run / "inputs" / "reward_0.pkl").read_bytes())(["1"], answer=["12"]) == [1.0]


@pytest.mark.parametrize("name", ["train.jsonl", "reward_0.pkl"])
def test_a_changed_input_of_a_run_is_named_by_verify_and_refused_by_resume(run: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "inputs" / name
    # One that still loads.
    path.write_bytes(path.read_bytes().replace(b'"1"', b'"2"') if name == "train.jsonl" else pickle.dumps(len))
    capsys.readouterr()
    assert main(["verify", str(copy)]) == 1
    assert f"inputs/{name}' does not have the digest that it had when the run began" in capsys.readouterr().out
    with pytest.raises(RunError, match=rf"{name}' does not have the digest that it had when the run began.*restore it from a copy, or start a new run"):
        resume(copy, inline=True, overrides=["run.max_steps=2"])


@pytest.mark.full
def test_a_run_from_python_is_restored_from_its_copies(run: Path, tmp_path: Path) -> None:
    restore(tmp_path / "restored", str(run.parent / "copies"))
    assert sorted(path.name for path in (tmp_path / "restored" / "inputs").iterdir()) == ["reward_0.pkl", "train.jsonl"]
    assert main(["verify", str(tmp_path / "restored")]) == 0
    assert resume(tmp_path / "restored", inline=True, overrides=["run.max_steps=2", "checkpoint.upload="]).steps == 2


@pytest.mark.full
def test_a_run_from_python_is_resumed_and_replayed_without_the_program(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["resume", str(copy), "--inline", "--run.max_steps=2"]) == 0
    assert main(["replay", str(copy), "--step", "1", "--inline"]) == 0


def test_a_changed_data_file_is_refused_a_mended_function_is_told_and_the_same_file_elsewhere_is_neither(tmp_path: Path) -> None:
    run, said = tmp_path / "run", []
    run.mkdir()

    class Told(Callback):
        def message(self, text: str) -> None:
            said.append(text)

    rows, source = tmp_path / "rows.jsonl", tmp_path / "rewards.py"
    for file in (rows, source):
        file.write_text("a")
    a, b = bytes_digest(b"a"), bytes_digest(b"b")
    with Journal(run / "journal.sqlite") as journal:
        check_input_files({str(rows): a, str(source): bytes_digest(b"s")}, journal, Told())
        check_input_files({str(tmp_path / "moved.jsonl"): a, str(source): bytes_digest(b"s")}, journal, Told())
        assert said == []
        with pytest.raises(RunError, match=r"rows.jsonl' is not the file that this run began with"):
            check_input_files({str(rows): b, str(source): bytes_digest(b"s")}, journal, Told())
        check_input_files({str(rows): a, str(source): b}, journal, Told())
        assert len(said) == 1 and "rewards.py' was changed since the run began" in said[0]
        (event,) = journal.events()
        assert event.kind == "reward_function_changed" and event.detail["now"] == b
        check_input_files({str(rows): a, str(source): b}, journal, Told())
        assert len(said) == 1, "the new one is recorded"
        source.write_text("c")
        (finding,) = verify_input_files(run, journal)
        assert not finding.stops and "a resume uses it as it is now, and records so" in finding.line()
        source.write_text("b")
        rows.write_text("b")
        (finding,) = verify_input_files(run, journal)
        assert finding.stops and "rows.jsonl' does not have the digest that it had when the run began" in finding.line()
        rows.unlink()
        assert "cannot be read" in verify_input_files(run, journal)[0].what
