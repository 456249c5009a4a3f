"""What a tracker has of a run whose rows are appended, cut and written again, and what is said of one that fails."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from event_files import numbers, scalars, table

from tandem.config.trackers import TrackersConfig
from tandem.runtime.records.metrics import MetricsFile
from tandem.trackers import follower as follower_module
from tandem.trackers.follower import Follower, missing_rows
from tandem.trackers.open import check_trackers, open_tracker
from tandem.trackers.sent_rows import SentRows
from tandem.trackers.tensorboard import TensorBoard
from tandem.trackers.tracker import RunFacts, SampleRow, Tracker
from tandem.types import UserError


def row(step: int, life: int = 0) -> dict[str, Any]:
    return {"step": step, "reward/mean": (step + 1) / 3, "timing_s/step": 0.1 + life, "train/loss": float("inf") if step == 1 else -1e-300, "kl": None}


def follower(run: Path, made: Any = None, said: list[str] | None = None, samples: Sequence[SampleRow] = ()) -> Follower:
    """A new life of what follows ``run`` for TensorBoard."""
    facts = RunFacts("run", run, {"run": {"seed": 3}})
    say = (said if said is not None else []).append
    return Follower(facts, made or (lambda: TensorBoard(run / "tensorboard")), SentRows(run / "sent"), lambda step: samples, say, lambda: 0)


def points(run: Path) -> dict[int, dict[str, float]]:
    return {each["step"]: numbers(each) for each in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def test_event_files_have_the_bits_of_every_row_the_recipe_and_samples(tmp_path: Path) -> None:
    metrics, follows = MetricsFile(tmp_path / "metrics.jsonl"), follower(tmp_path, samples=[SampleRow("3 1", "1 3", 1 / 3, {"task": 0.5})])
    for step in range(3):
        metrics.append(row(step))
        assert follows.catch_up()
    assert scalars(tmp_path / "tensorboard") == points(tmp_path) and missing_rows(tmp_path, tmp_path / "sent") == 0
    assert table(tmp_path / "tensorboard", "samples")[2] == [["prompt", "completion", "reward", "functions"], ["3 1", "1 3", repr(1 / 3), "task 0.5"]]
    assert "seed: 3" in table(tmp_path / "tensorboard", "config")[0][1][0]


@pytest.mark.parametrize("is_new_life", [True, False])
@pytest.mark.parametrize("seen_between", [True, False])
def test_rows_that_are_cut_and_written_again_are_there_once(is_new_life: bool, seen_between: bool, tmp_path: Path) -> None:
    metrics, follows = MetricsFile(tmp_path / "metrics.jsonl"), follower(tmp_path)
    for step in range(5):
        metrics.append(row(step))
    follows.catch_up()
    metrics.cut_after(2)
    follows = follower(tmp_path) if is_new_life else follows
    if seen_between:
        follows.catch_up()
        assert scalars(tmp_path / "tensorboard") == points(tmp_path)
    for step in range(2, 6):
        metrics.append(row(step, life=1))
    follows.catch_up()
    assert scalars(tmp_path / "tensorboard") == points(tmp_path)


def test_points_that_were_written_right_before_a_kill_and_a_torn_file_are_there_once(tmp_path: Path) -> None:
    metrics, follows = MetricsFile(tmp_path / "metrics.jsonl"), follower(tmp_path)
    for step in range(4):
        metrics.append(row(step))
    follows.catch_up()
    SentRows(tmp_path / "sent").cut(2)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    follower(tmp_path).catch_up()
    assert scalars(tmp_path / "tensorboard") == points(tmp_path)


def test_a_tracker_that_fails_is_named_once_and_has_every_row_when_it_works_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "FIRST_WAIT_S", 0.0)
    metrics, said, left = MetricsFile(tmp_path / "metrics.jsonl"), list[str](), [3]

    class Unsteady(TensorBoard):
        def flush(self) -> None:
            if self._step >= 1 and left[0]:
                left[0] -= 1
                raise OSError("the disk is full")
            super().flush()

    def made() -> Tracker:
        return Unsteady(tmp_path / "tensorboard")

    follows = follower(tmp_path, made, said)
    follows._wait_s = 0.0
    for step in range(8):
        metrics.append(row(step))
        follows.catch_up()
    assert said == ["failed and is tried again, the run does not wait for it: OSError: the disk is full", "works again and has all rows"]
    assert scalars(tmp_path / "tensorboard") == points(tmp_path)


def test_the_class_in_the_document_has_each_row_once(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)^```", (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_tracker.py").write_text(source)
    metrics, config = MetricsFile(tmp_path / "metrics.jsonl"), TrackersConfig((f"{tmp_path / 'my_tracker.py'}:Lines",))
    check_trackers(config)
    for life, first in enumerate((0, 2)):
        metrics.cut_after(first)
        said = list[str]()
        follows = follower(tmp_path, lambda: open_tracker(config.names[0], config, tmp_path, print), said)
        for step in range(first, 5):
            metrics.append(row(step, life))
            assert follows.catch_up() and not said
    assert (tmp_path / "lines.jsonl").read_bytes() == (tmp_path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("tensorbord",), "'trackers.names' has 'tensorbord', which is no tracker; did you mean 'tensorboard'?"),
        (("comet",), "which is no tracker; known are tensorboard, wandb, mlflow, trackio; for another one write a class and name it as module:Class"),
        (("tensorboard", "tensorboard"), "names a tracker twice"),
    ],
)
def test_a_name_that_is_no_tracker_is_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TrackersConfig(names=names).check()
    assert message in str(caught.value)


def test_what_keeps_a_tracker_from_working_is_one_line_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"which cannot be written: .*; name another"):
        check_trackers(TrackersConfig(("tensorboard",), str(tmp_path / "file" / "below")))
    with pytest.raises(UserError, match=r"has no 'Absent'; it has "):
        check_trackers(TrackersConfig((f"{Path(__file__).parent / 'event_files.py'}:Absent",)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'tandem-rl\[tensorboard\]'"):
        check_trackers(TrackersConfig(("tensorboard",)))
