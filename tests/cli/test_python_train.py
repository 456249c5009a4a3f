"""``train`` and ``resume`` from Python: recipes in every form, callbacks, progress, and the result."""

import importlib
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import tandem
from tandem.jobs.callbacks import EVENTS, Callbacks
from tandem.jobs.notebook_display import NotebookDisplay
from tandem.jobs.result import RunResult
from tandem.runtime.records.metrics import VOLATILE
from tandem.types import RunError, UserError

STEPS = 4


class Recorder(tandem.Callback):
    """Records the names and the values of all events."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[tuple[int, str]] = []
        self.directory = ""

    def started(self, run_directory: str, max_steps: int, target: float | None) -> None:
        self.directory = run_directory

    def row(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def evaluated(self, step: int, accuracy: float, count: int, kind: str) -> None:
        self.evaluations.append((step, kind))


class Fails(tandem.Callback):
    """Raises in the events after step 1."""

    def __init__(self) -> None:
        self.calls = 0

    def row(self, row: Mapping[str, Any]) -> None:
        if row["step"] == 1:
            self.calls += 1
            raise ConnectionError("the tracker\nis away")

    def evaluated(self, step: int, accuracy: float, count: int, kind: str) -> None:
        self.calls += step > 1


def sections(recipe: Path, **run: Any) -> dict[str, Any]:
    """Returns the sections of ``recipe`` for a run of ``STEPS`` steps."""
    data: dict[str, Any] = yaml.safe_load(recipe.read_text())
    data["run"] |= {"max_steps": STEPS, **run}
    return data


def steady(rows: Any) -> list[dict[str, Any]]:
    """Returns ``rows`` without what differs between equal runs."""
    return [{name: value for name, value in row.items() if not name.startswith(VOLATILE)} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, Recorder, str]:
    """A finished run, what its callback was told, and its progress."""
    folder, told = tmp_path_factory.mktemp("undisturbed"), Recorder()
    with pytest.MonkeyPatch.context() as patch:
        shown = io.StringIO()
        patch.setattr(sys, "stderr", shown)
        result = tandem.train(sections_of(folder), callbacks=[told], inline=True)
    return result, told, shown.getvalue()


def sections_of(folder: Path) -> dict[str, Any]:
    return {
        "model": {"create": {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32,
        }},
        "task": {"name": "sort"}, "sft": {"steps": 2, "warmup_steps": 1, "batch_size": 2, "max_accuracy": 1.0},
        "rollout": {"prompts_per_step": 2, "max_tokens": 8}, "algorithm": {"group_size": 2}, "evaluation": {"prompts": 4, "final_prompts": 4},
        "run": {"max_steps": STEPS, "directory": str(folder)}, "machine": {"threads": 1},
    }  # fmt: skip


def test_a_recipe_is_a_file_a_name_a_mapping_or_what_load_config_returns(recipe: Path) -> None:
    small = {**sections(recipe), "machine": {"memory_gib": 0.001}}
    recipe.write_text(yaml.safe_dump(small))
    for given in (recipe, str(recipe), small, tandem.load_config(recipe)):
        with pytest.raises(UserError, match="GiB"):
            tandem.train(given)
    with pytest.raises(UserError, match=r"did you mean 'task\.name'"):
        tandem.train({**small, "task": {"nam": "sort"}})
    with pytest.raises(UserError, match=r"recipe 'sorted' does not exist; did you mean 'sort'"):
        tandem.train("sorted")
    assert tandem.load_config("sort") == tandem.load_config(Path(tandem.__file__).parents[1] / "recipes" / "sort.yaml")


def test_callbacks_receive_the_rows_that_the_result_has_as_a_table(undisturbed: tuple[RunResult, Recorder, str]) -> None:
    result, told, shown = undisturbed
    assert told.directory == str(result.directory) and {(0, "greedy"), (STEPS, "final")} <= set(told.evaluations)
    table = result.metrics
    assert list(table) == told.rows and len(table) == STEPS and table["step"] == list(range(STEPS)) and table[-1]["step"] == STEPS - 1
    frame = table.to_pandas()
    assert list(frame.index) == table["step"] and frame["reward/mean"].tolist() == table["reward/mean"]
    with pytest.raises(KeyError, match="no metric 'reward'"):
        table["reward"]
    assert f"step {STEPS - 1}: reward" in shown and "final accuracy" in shown
    assert repr(result).startswith(f"RunResult(target NOT reached after {STEPS} steps") and str(result.model) in repr(result)
    assert repr(table).splitlines()[0].split()[:2] == ["step", "reward/mean"] and f"{STEPS} steps, " in repr(table)


def test_a_table_says_that_pandas_is_missing(undisturbed: tuple[RunResult, Recorder, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        undisturbed[0].metrics.to_pandas()


def test_a_callback_that_raises_ends_the_run_with_one_line_and_a_checkpoint_that_resumes(
    undisturbed: tuple[RunResult, Recorder, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, told = Fails(), Recorder()
    says = r"^Fails\.row raised ConnectionError: the tracker is away; the run is saved, and '.*tandem resume .*' continues it$"
    with pytest.raises(RunError, match=says) as caught:
        tandem.train(sections_of(tmp_path), callbacks=[fails, told], inline=True, progress=False)
    assert isinstance(caught.value.__cause__, ConnectionError) and fails.calls == 1
    run = tmp_path / "run"
    assert (run / "checkpoints" / "step-2" / "COMMIT").is_file() and len(told.rows) == 2 and not (run / "model").exists()
    result = tandem.resume(run, callbacks=[told], inline=True, progress=False)
    whole = undisturbed[0]
    assert steady(result.metrics) == steady(whole.metrics) == steady(told.rows)
    assert (result.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    assert capsys.readouterr().out == ""


class Stops(tandem.Callback):
    def __init__(self) -> None:
        self.steps = 0

    def row(self, row: Mapping[str, Any]) -> None:
        self.steps += 1

    def wants_stop(self) -> bool:
        return self.steps == 1


@pytest.mark.full
def test_a_callback_may_stop_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Stops\.wants_stop stopped the run, which is saved: '.*tandem resume .*' continues it"):
        tandem.train(sections_of(tmp_path), callbacks=[Stops()], inline=True, progress=False)
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "COMMIT").is_file()


def test_what_is_no_callback_and_methods_that_would_never_be_called_are_named(recipe: Path) -> None:
    class Misnamed(tandem.Callback):
        def on_log(self, *_: Any) -> None: ...

    class Trainer:
        def on_step_end(self, *_: Any) -> None: ...

    for given, says in (
        (Misnamed(), "callbacks[0], Misnamed, has a method 'on_log', which is never called; name it 'row'"),
        (Recorder, "callbacks[0] is the class Recorder; give an instance: Recorder()"),
        (Trainer(), "which is not a tandem.Callback; derive it from tandem.Callback, whose methods are started"),
    ):
        with pytest.raises(UserError) as caught:
            tandem.train(recipe, callbacks=[given])  # type: ignore[list-item]
        assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not Path(yaml.safe_load(recipe.read_text())["run"]["directory"]).exists()


def test_every_event_reaches_every_callback() -> None:
    heard: list[tuple[str, tuple[Any, ...]]] = []

    class Hears(tandem.Callback):
        def __getattribute__(self, name: str) -> Any:
            return (lambda *values: heard.append((name, values))) if name in EVENTS else super().__getattribute__(name)

    both = Callbacks([Hears(), Hears()])
    for event in EVENTS:
        getattr(both, event)(event, 1)
    assert heard == [(event, (event, 1)) for event in EVENTS for _ in range(2)] and {"started", "row", "evaluated", "message"} <= set(EVENTS)


def test_a_notebook_has_one_output_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[str] = []
    handle = SimpleNamespace(update=lambda shown: updates.append(shown._repr_html_()))
    shown_first: list[Any] = []

    def display(shown: Any, display_id: bool) -> Any:
        shown_first.append(shown)
        return handle

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    chosen = importlib.import_module("tandem.jobs.display").python_display()
    assert isinstance(chosen, NotebookDisplay)
    with chosen as shown:
        shown.started("runs/<b>", 10, None)
        shown.row({"step": 3, "reward/mean": 0.5, "perf/tokens_per_s": 10.0, "timing_s/step": 0.1})
        shown.progress("rollout", 2, 8, "prompts")
    assert shown_first == [shown] and "&lt;b&gt;" in updates[0] and "<b>runs" not in updates[0]
    assert 'value="4" max="10"' in updates[-1] and "finished" in updates[-1] and "step 3: reward 0.500" in updates[-1]


@pytest.mark.full
def test_a_program_without_a_main_guard_trains_in_a_pod_and_generates_on_two_ranks(recipe: Path, tmp_path: Path) -> None:
    import subprocess

    program = tmp_path / "program.py"
    program.write_text(
        "import sys, tandem\n"
        "result = tandem.train(sys.argv[1], progress=False)\n"
        "with tandem.LLM(result.model, tensor_parallel_size=2) as llm:\n"
        "    print(len(llm.generate('21=', tandem.SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))\n"
    )
    recipe.write_text(recipe.read_text().replace("num_key_value_heads: 1", "num_key_value_heads: 2"))
    done = subprocess.run([sys.executable, str(program), str(recipe)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


@pytest.mark.full
def test_a_cell_of_a_notebook_shows_the_run_in_one_output(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed, so no notebook is run")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed, so no notebook is run")
    import nbformat

    cells = [
        "import asyncio, json, tandem\nfrom pathlib import Path",
        f"result = tandem.train({sections_of(tmp_path)!r})",
        "with tandem.AsyncLLM(tandem.EngineArgs(model=str(result.model))) as engine:\n"
        "    print([o.finished async for o in engine.generate('21=', tandem.SamplingParams(max_tokens=2, ignore_eos=True), '0')][-1])",
        "result",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300).execute()
    _, trained, generated, last = (cell.outputs for cell in notebook.cells)
    (output,) = trained
    assert f'value="{STEPS}" max="{STEPS}"' in output.data["text/html"] and "final accuracy" in output.data["text/html"]
    assert [each.text for each in generated] == ["True\n"]
    assert last[0].data["text/plain"].startswith("RunResult(target NOT reached")
