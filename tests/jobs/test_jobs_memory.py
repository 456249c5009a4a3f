"""The resident memory of ranks: predicted, measured by the kernel, and checked before a run."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_jobs_ranks import data, write_ranks_recipe  # noqa: F401 - a fixture too

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.estimate.processes import CONTROLLER_BYTES, FORK_SERVER_BYTES, FORKED_RANK_BYTES, SHARED_BYTES, TRAINING_PROCESS_BYTES
from tandem.jobs.checks import check_run
from tandem.jobs.checks.check_data import check_data_run
from tandem.types import RunError

ROOT = Path(__file__).parents[2]


def measured(folder: Path, *arguments: str) -> dict[int, tuple[float, list[float]]]:
    """Returns (predicted, peaks of the ranks) in MiB by ZeRO stage, as measured by ``benchmarks/zero_memory.py``."""
    command = [sys.executable, str(ROOT / "benchmarks" / "zero_memory.py"), "--out", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=580)
    (report,) = folder.glob("zero-memory-*.md")
    cells = [line.strip("| ").replace(",", "").split(" | ") for line in report.read_text().splitlines() if line[:3] in ("| 0", "| 1", "| 2", "| 3")]
    return {int(stage): (float(predicted), [float(peak) for peak in peaks]) for stage, _, predicted, *peaks, _ in cells}


@pytest.mark.full
def test_peak_of_a_rank_is_within_a_quarter_of_the_prediction_for_a_model_that_is_small_beside_the_process(tmp_path: Path) -> None:
    ((predicted, peaks),) = measured(tmp_path, "--model", "1M", "--stages", "3").values()
    assert len(peaks) == 2 and all(predicted / 1.25 < peak < 1.25 * predicted for peak in peaks), (predicted, peaks)


@pytest.mark.full
def test_peak_of_each_stage_is_within_a_quarter_of_the_prediction_and_each_stage_is_smaller_than_the_one_before(tmp_path: Path) -> None:
    found = measured(tmp_path, "--model", "100M")
    for predicted, peaks in found.values():
        assert all(predicted / 1.25 < peak < 1.25 * predicted for peak in peaks), found
    largest = [max(found[stage][1]) for stage in range(4)]
    assert largest[0] > largest[1] > largest[2] > largest[3], largest


def checked(folder: Path, data: Path, *overrides: str) -> list[str]:  # noqa: F811
    write_ranks_recipe(folder, data)
    recipe = load_config(folder / "recipe.yaml", list(overrides))
    assert isinstance(recipe, PretrainRecipe)
    return check_data_run(recipe)


def test_every_rank_that_starts_on_this_machine_is_counted_whatever_ranks_per_node_says(data: Path, tmp_path: Path) -> None:  # noqa: F811
    def predicted(*overrides: str) -> int:
        (line,) = [line for line in checked(tmp_path, data, *overrides, "machine.memory_gib=8") if line.startswith("predicted memory")]
        assert ("for the 4 ranks that start on this machine" in line) == ("parallel.data=4" in overrides)
        return int(line.split()[2].replace(",", ""))

    one, two, four = (predicted(*ranks) for ranks in ((), ("parallel.data=2",), ("parallel.data=4", "parallel.ranks_per_node=1")))
    # The first rank beside others brings a controller and a fork server; every further one what it does not share with that.
    alone, rank = TRAINING_PROCESS_BYTES >> 20, FORKED_RANK_BYTES - SHARED_BYTES >> 20
    assert alone < one < alone + 100 and rank < (four - two) / 2 < rank + 100
    assert two - (four - two) == pytest.approx(CONTROLLER_BYTES + FORK_SERVER_BYTES >> 20, abs=20)
    short = f"machine.memory_gib={(four - 5) / 1024}"
    checked(tmp_path, data, "parallel.data=2", short)
    with pytest.raises(RunError, match=r"for the 4 ranks that start on this machine and 0\.\d\d GiB are available") as caught:
        checked(tmp_path, data, "parallel.data=4", "parallel.ranks_per_node=1", short)
    assert len(str(caught.value).splitlines()) == 1


def test_more_ranks_than_cores_is_a_warning_that_says_the_cost(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(check_run, "available_cores", lambda: 2)
    (warning,) = [line for line in checked(tmp_path, data, "parallel.data=4", "machine.memory_gib=4") if line.startswith("warning")]
    assert "4 ranks share 2 cores: a step takes about 2.0 times as long" in warning
    assert not [line for line in checked(tmp_path, data, "parallel.data=2", "machine.memory_gib=4") if line.startswith("warning")]
