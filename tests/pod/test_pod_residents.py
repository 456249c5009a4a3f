"""Plans of a pod's residents in whole runs: the same bits under each, every move in the journal, and what faults during a move do."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pod_runs import HERE, PodRun, difference

from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import Recipe, load_config
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import saved_bytes_on_disk
from tandem.jobs.checks import check_run
from tandem.jobs.checks.check_rl import check_rl_run
from tandem.layout.residents import Residency
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.pod.residents import plan as residents_plan
from tandem.runtime.records.journal import Journal
from tandem.types import RunError

ROOT = HERE.parents[1]
WIDE = (
    "--model.create.hidden_size=512", "--model.create.num_hidden_layers=8", "--model.create.num_attention_heads=8", "--model.create.head_dim=64",
    "--model.create.intermediate_size=2048",
)  # fmt: skip


def moves(run: PodRun, step: int | None = None) -> list[tuple[str, str, int]]:
    """The moves of ``step`` (``None``: of the run) in the order of the journal: (resident, move, bytes)."""
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        found = [one for each in journal.transitions(step) for one in each.detail.get("moves", [])]
    assert all(one["seconds"] >= 0 for one in found)
    return [(one["resident"], one["move"], one["bytes"]) for one in found]


def model_bytes(run: PodRun) -> int:
    return sum(tensor.nbytes for _, tensor in read_tensors(run.directory / "model"))


@pytest.mark.full
def test_the_figures_own_order_changes_no_bit_and_the_journal_has_every_move(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--residents.plan=figure", "--residents.prefetch=false", "--run.max_steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    # All six steps and every file are compared for each plan by ``test_every_plan_has_the_same_curve_bit_for_bit``.
    assert run.rows() == undisturbed.rows()[:3] and run.events("residue") == [] and run.left_behind() == []
    weights, cache = model_bytes(run), moves(run, 2)[4][2]
    # Workers and actor are instantiated (the actor has been since the update before); saved and offloaded; workers are destroyed; the reference is
    # reloaded, and given up for its saved copy; the actor is reloaded.
    assert moves(run, 2) == [
        ("gradients", "destroy", weights), ("optimizer", "offload", 2 * weights), ("actor", "offload", weights),
        ("engine_weights", "instantiate", weights), ("kv_cache", "instantiate", cache),
        ("engine_weights", "destroy", weights), ("kv_cache", "destroy", cache),
        ("reference", "reload", weights),
        ("reference", "destroy", weights), ("actor", "reload", weights), ("optimizer", "reload", 2 * weights),
    ]  # fmt: skip
    # Two layers, keys and values, one head of 16 fp32 numbers, in the 16 sequences of a step, each of 48 tokens and a block.
    assert cache == 2 * 2 * 16 * 4 * 16 * (48 + 16)
    made = [(name, move) for name, move, _ in moves(run) if name == "reference" and move in ("instantiate", "offload")]
    assert made == [("reference", "instantiate"), ("reference", "offload")], "made for the first inference and saved once"
    disk = saved_bytes_on_disk(read_shapes(run.directory / "model"), TrainerConfig(), ParallelConfig(), Residency("figure"), reference=True)
    assert disk == 4 * weights and list((run.directory / "offload").iterdir()) == [], "the file has no name"
    row = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[2])
    assert row["memory/moved/optimizer/reload/bytes"] == 2 * weights and row["memory/moved/optimizer/reload/seconds"] > 0
    report = (run.directory / "report.html").read_text(encoding="utf-8")
    assert '{"resident":"optimizer","move":"reload","steps":2,' in report, "in every step but the first"


@pytest.mark.full
def test_a_move_to_the_memory_that_the_state_is_in_moves_nothing_and_the_dry_run_says_so(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--residents.plan=offload", "--residents.to=memory", "--run.max_steps=2", "--sft.steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    engine = {(name, move) for name in ("engine_weights", "kv_cache") for move in ("instantiate", "destroy")}
    assert {(name, move) for name, move, _ in moves(run)} == {("gradients", "destroy"), ("reference", "instantiate"), *engine}
    recipe = load_config(ROOT / "recipes" / "sort.yaml", ["--residents.plan=offload", "--residents.to=memory", f"--run.directory={tmp_path}"])
    assert isinstance(recipe, Recipe)
    assert "residents: on a CPU nothing moves to memory, because it is there already" in check_rl_run(recipe).lines()


def test_disk_without_room_for_residents_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = tmp_path / "away"
    away.mkdir()

    def checked(*overrides: str) -> list[str]:
        settings = ("residents.plan=offload", f"run.directory={tmp_path}", *overrides)
        recipe = load_config(ROOT / "recipes" / "sort.yaml", [f"--{setting}" for setting in settings])
        assert isinstance(recipe, Recipe)
        return check_rl_run(recipe).lines()

    assert any(line.startswith("of them offloaded: ") for line in checked())
    assert any(line.endswith(f"MiB in '{away}'") for line in checked(f"trainer.offload_folder={away}"))
    for module in (residents_plan, check_run):
        monkeypatch.setattr(module, "free_bytes", lambda folder: 2**20 if folder == away else 2**50)
    checked()
    with pytest.raises(RunError, match=r"GiB of disk and may take 0.00 GiB, .*what would fit: \d.\d\d GiB of disk \(residents.disk_gib\)"):
        checked(f"trainer.offload_folder={away}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.full
def test_a_disk_that_fills_during_an_offload_ends_the_run_with_one_line_and_a_resume_goes_on(undisturbed: PodRun, small_disk: Path, tmp_path: Path) -> None:
    run = PodRun(tmp_path, program=(str(HERE / "bad_disk.py"), "full", "1"))
    done = run.train("--residents.plan=figure", f"--trainer.offload_folder={small_disk}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"'{small_disk}' cannot hold the trainer's residents: No space left on device; make room" in done.stderr.replace("\n", " "), done.stderr
    assert run.left_behind() == []
    (small_disk / "filler").unlink()
    resumed = PodRun(tmp_path, marks=run.marks).resume()
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert difference(run, undisturbed) == []


@pytest.mark.full
@pytest.mark.parametrize("plan", ["offload", "terminate"])
def test_a_bit_that_changes_on_the_disk_costs_a_restart_of_the_trainer_and_changes_no_bit(plan: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path, program=(str(HERE / "bad_disk.py"), "damage", "3"))
    done = run.train(f"--residents.plan={plan}")
    assert done.returncode == 0, done.stdout + done.stderr
    (recovery,) = run.events("recovery")
    assert "came back from the disk with other bytes than were written" in recovery.detail["reason"]
    assert difference(run, undisturbed) == []


@pytest.mark.full
@pytest.mark.parametrize("plan", ["keep", "sleep", "offload", "figure", "terminate"])
def test_every_plan_has_the_same_curve_bit_for_bit(plan: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(f"--residents.plan={plan}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.events("residue") == []
    named = {(name, move) for name, move, _ in moves(run)}
    assert (("engine_weights", "destroy") in named) == (plan != "keep")
    assert (("actor", "reload") in named) == (plan in ("offload", "figure", "terminate"))
    rebuilt = [move for name, move, _ in moves(run) if name == "reference"]
    expected = {"offload": ["instantiate", "offload"] + ["reload", "destroy"] * 5, "terminate": ["instantiate", "destroy"] * 6}
    assert rebuilt == expected.get("offload" if plan == "figure" else plan, [])


DISK_MOVES = tuple(
    f"trainer_worker:{when}:{move}_{name}:3"
    for when in ("before", "after")
    for move, name in (
        ("destroy", "gradients"), ("offload", "optimizer"), ("offload", "actor"), ("reload", "actor"), ("reload", "optimizer"), ("reload", "reference"),
    )
)  # fmt: skip
"""``before``: in the middle of the move."""
OTHERS = (
    "trainer_worker:before:offload_reference:3", "trainer_worker:after:destroy_reference:3",  # given up for its saved copy
    "trainer_worker:before:offload_reference:0", "trainer_worker:after:instantiate_reference:0", "rollout_worker:before:start_engine:0",
    "trainer_worker:before:prefetch:2", "pod:before:terminate_engine:3", "pod:after:terminate_engine:3", "pod:before:onload:2", "pod:after:offload:3",
    "rollout_shim:before:stop_worker:0",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("fault", [*DISK_MOVES, *OTHERS])
def test_a_death_in_the_middle_of_a_move_changes_no_bit(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--residents.plan=figure", "--fault", fault)
    if fault.startswith("pod:"):
        assert done.returncode != 0
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run.directory / "faults").is_dir() and difference(run, undisturbed) == []
    assert run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize("fault", [
    "trainer_worker:before:destroy_reference:2", "trainer_worker:before:instantiate_reference:3", "rollout_worker:before:sleep_engine:0",
])  # fmt: skip
def test_a_death_while_something_is_destroyed_or_made_again_changes_no_bit(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(f"--residents.plan={'sleep' if 'sleep' in fault else 'terminate'}", "--fault", fault)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(run.events("recovery")) == 1 and difference(run, undisturbed) == []


@pytest.mark.full
def test_resident_memory_of_the_trainer_falls_by_what_a_phase_does_not_need(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    few = ("--run.max_steps=2", "--sft.steps=3", "--checkpoint.asynchronous=false", "--evaluation.every_steps=10", "--residents.prefetch=false")
    done = run.train("--residents.plan=figure", *WIDE, *few)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = model_bytes(run)
    assert weights > 25e6 * 4 and run.events("residue") == []
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    # Training holds weights, gradients and two moments; inference the reference alone; the rollout nothing.
    trained, waited, inferred = (rows[-1][f"memory/{phase}/measured"] for phase in ("train", "wait_rollout", "inference"))
    assert trained - waited > 3.5 * weights, (trained, waited, weights)
    assert 0.5 * weights < inferred - waited < 2 * weights, (inferred, waited, weights)
