"""What a run shows of its tiers of checkpoints: the same figures in the journal, for Prometheus, in ``tandem status`` and on the report page."""

import json
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.cli.main import main
from tandem.config.recipe import load_config
from tandem.dashboard.overview import overview
from tandem.dashboard.runs import Runs
from tandem.jobs.exposed.run_metrics import RunMetrics
from tandem.jobs.run_files import write_recipe
from tandem.runtime.records.checkpoint_tiers import Loaded, cut_tiers, describe_tier, read_tiers, record_loaded, record_written
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import forget_local, local_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two copies in memory, each of 30 MB and kept by two nodes, one in its folder, and a local disk that was full."""
    folder = tmp_path / "sort"
    folder.mkdir()
    write_recipe(load_config(ROOT / "recipes" / "sort.yaml", ()), folder)
    with Journal(folder / "journal.sqlite") as journal:
        assert not record_written(journal, "folder", 4, 30_000_000, 3.0, {})
        for step, seconds in ((5, 0.2), (6, 0.1)):
            assert not record_written(journal, "memory", step, 30_000_000, seconds, {"a": [0, 1], "b": [0, 1]})
        assert record_written(journal, "local", 6, 0, 0.0, {}, "no space left in '/nvme'")
        record_loaded(journal, Loaded(6, "memory", 30_000_000, 0.25, {"memory": 30_000_000, "folder": 0}, {"rank-00000.safetensors": "b"}))
    return folder


def test_the_journal_has_the_newest_copy_of_each_tier_the_sums_and_why_one_is_left_out(run: Path) -> None:
    with Journal(run / "journal.sqlite") as journal:
        memory, local, folder = read_tiers(journal)
        assert (memory.step, memory.copies, memory.all_bytes, memory.all_seconds) == (6, 2, 60_000_000, pytest.approx(0.3))
        assert memory.megabytes_per_s == pytest.approx(300) and folder.megabytes_per_s == pytest.approx(10)
        assert describe_tier(memory, memory.time_s + 7) == "step 6, 7 s old, 30.0 MB in 0.10 s (300 MB/s), kept by a (ranks 0, 1), b (ranks 0, 1)"
        assert local.left_out and describe_tier(local, time.time()) == "left out: no space left in '/nvme'"
        assert [event.detail["tier"] for event in journal.events() if event.kind == "checkpoint_tier_left_out"] == ["local"]
        # The steps after 5 are taken again: what is newer is none of this run any more.
        cut_tiers(journal, 5)
        memory, _, folder = read_tiers(journal)
        assert describe_tier(memory, time.time()) == "no whole copy" and memory.copies == 2 and folder.step == 4


def test_prometheus_status_and_report_show_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = RunMetrics("sort", "grpo", True)
    metrics.started(str(run), 10, None)
    values = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            values[sample.name, sample.labels.get("tier"), sample.labels.get("node")] = sample.value
    assert values["tandem_checkpoint_copies_total", "memory", None] == 2 and values["tandem_checkpoint_written_bytes_total", "memory", None] == 6e7
    assert values["tandem_checkpoint_write_seconds_total", "folder", None] == 3 and values["tandem_checkpoint_step", "memory", None] == 6
    assert 0 <= values["tandem_checkpoint_age_seconds", "memory", None] < 600 and ("tandem_checkpoint_age_seconds", "local", None) not in values
    assert values["tandem_checkpoint_kept_ranks", "memory", "b"] == 2
    assert [values["tandem_checkpoint_tier_left_out", tier, None] for tier in ("memory", "local", "folder")] == [0, 1, 0]
    main(["status", str(run)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoints in tier")]
    assert [line.split()[3] for line in lines] == ["memory:", "local:", "folder:"] and "kept by a (ranks 0, 1), b (ranks 0, 1)" in lines[0]
    main(["status", str(run), "--json"])
    told = json.loads(capsys.readouterr().out)["checkpoint_tiers"]
    assert [(tier["tier"], tier["step"]) for tier in told] == [("memory", 6), ("local", -1), ("folder", 4)] and told[0]["megabytes_per_s"] == 300
    shown = {tier["tier"]: tier for tier in overview(Runs(run.parent).open(run.name))["tiers"]}
    assert shown["memory"]["where"] == {"a": [0, 1], "b": [0, 1]} and shown["local"]["left_out"].startswith("no space left in '/nvme'")
    assert [(shown[tier]["loads"], shown[tier]["load_seconds"]) for tier in ("memory", "folder")] == [(1, 0.25), (0, 0)]


def test_another_run_of_the_same_name_and_one_that_distrusts_its_checkpoints_have_another_local_folder(tmp_path: Path) -> None:
    with Journal(tmp_path / "one.sqlite") as one, Journal(tmp_path / "two.sqlite") as two:
        assert local_folder("", tmp_path / "run", one) is None
        mine, other = local_folder(str(tmp_path), tmp_path / "run", one), local_folder(str(tmp_path), tmp_path / "run", two)
        assert mine is not None and mine == local_folder(str(tmp_path), tmp_path / "run", one) and mine != other and mine.parent == tmp_path
        mine.mkdir()
        forget_local(str(tmp_path), one)
        assert not mine.exists() and local_folder(str(tmp_path), tmp_path / "run", one) != mine
