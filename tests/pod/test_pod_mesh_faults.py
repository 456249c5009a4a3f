"""Kill anything on a 2 x 2 mesh, lose nothing: every rank of the trainer, of the supervised fine-tuning and of the engine, both shims and the
controller, at points drawn at random from all that a run has."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from fault_points import NAMED_ON_A_MESH, WRITING, every_fault_point_of_a_mesh, states, trainer_calls
from pod_runs import PodRun, difference, finish, trained

from tandem.runtime.process.faults import Fault, FaultPlan
from tandem.runtime.records.journal import Journal

RANKS, STEPS, SFT_STEPS, RUNS = 4, 4, 3, 8
SETTINGS = (
    "--parallel.data=2", "--parallel.tensor=2", "--parallel.zero=1", "--model.create.num_key_value_heads=2", f"--run.max_steps={STEPS}",
    f"--sft.steps={SFT_STEPS}",
)  # fmt: skip
EVERY_POINT = tuple(every_fault_point_of_a_mesh(RANKS, STEPS, SFT_STEPS))


def slot(fault: Fault) -> str:
    """A run has one fault of each slot: a second one in the same step might not be reached after the recovery from the first."""
    return "sft" if fault.role.startswith("rank") else f"step {min(fault.step, STEPS - 1)}"


def phase(fault: Fault) -> str | None:
    """The phase that a fault at this point proves, ``None`` for none: a call of the trainer in a rank other than the first, whose reply is the
    group's; the writing of a checkpoint, the same code in both, in the pod's trainer."""
    if slot(fault) == "sft":
        return None if fault.name in ("load", "checkpoint_stage", *WRITING, "checkpoint_prune") else f"sft {fault.name}"
    is_call = fault.name in trainer_calls(STEPS)
    return None if is_call and fault.role not in ("trainer_rank1", "trainer_rank2", "trainer_rank3") else fault.name


NAMED = set(map(phase, FaultPlan.parse(",".join(NAMED_ON_A_MESH)).faults)) - {None}
NEEDED = {needed: sum(phase(fault) == needed for fault in EVERY_POINT) for needed in set(map(phase, EVERY_POINT)) - NAMED if needed}
"""The phases that no named fault is in, with the number of their points."""


def drawn_runs() -> list[list[Fault]]:
    """The faults of ``RUNS`` runs: at random a point of each phase in ``NEEDED``, the rarest first, of a role that has few as yet; then any."""
    points = list(EVERY_POINT)
    random.Random(22).shuffle(points)
    chosen: dict[str, list[Fault]] = {name: [] for name in sorted(set(map(slot, points)))}
    of_role = Counter[str]()

    def choose(faults: Iterable[Fault]) -> None:
        fault = min(faults, key=lambda fault: (of_role[fault.role], len(chosen[slot(fault)])))
        chosen[slot(fault)].append(fault)
        of_role[fault.role] += 1

    for needed in sorted(NEEDED, key=lambda name: (NEEDED[name], name)):
        choose(fault for fault in points if phase(fault) == needed and len(chosen[slot(fault)]) < RUNS)
    for name, faults in chosen.items():
        while len(faults) < RUNS:
            choose(fault for fault in points if slot(fault) == name and fault not in faults)
    return [list(faults) for faults in zip(*chosen.values(), strict=True)]


DRAWN = drawn_runs()


@pytest.fixture(scope="module")
def undisturbed_mesh(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    return trained(tmp_path_factory.mktemp("undisturbed"), *SETTINGS)


def assert_lost_nothing(run: PodRun, undisturbed: PodRun) -> None:
    assert difference(run, undisturbed) == []
    assert [row["mismatch_kl"] for row in run.rows()] == [0.0] * STEPS
    assert run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize("faults", [",".join(map(str, faults)) for faults in DRAWN])
def test_kills_at_random_points_of_a_mesh_and_the_run_is_the_same(faults: str, undisturbed_mesh: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*SETTINGS, "--fault", faults)
    for _ in range(faults.count("pod:")):
        assert done.returncode == -9, done.stdout + done.stderr
        done = run.resume("--fault", faults)
    assert done.returncode == 0, done.stdout + done.stderr
    struck = [path.name for folder in (run.directory, run.directory / "sft") for path in (folder / "faults").iterdir()]
    assert sorted(struck) == sorted(faults.replace(":", "-").split(","))
    assert_lost_nothing(run, undisturbed_mesh)


def test_drawn_and_named_points_have_every_role_and_every_phase() -> None:
    drawn = [fault for faults in DRAWN for fault in faults]
    assert set(drawn) <= set(EVERY_POINT) and len(set(drawn)) == len(drawn)
    assert {fault.role for fault in drawn} == {fault.role for fault in EVERY_POINT}
    assert {phase(fault) for fault in drawn} - {None} >= NEEDED.keys()
    assert {fault.name for fault in drawn} | NAMED == {fault.name for fault in EVERY_POINT}


@pytest.mark.full
def test_points_of_the_pod_on_a_mesh_are_exactly_the_transitions_of_the_run(undisturbed_mesh: PodRun) -> None:
    assert {(name, step) for name, steps in states(STEPS).items() for step in steps} == {(t.state, t.step) for t in undisturbed_mesh.transitions()}
    assert all(row["actor/grad_norm"] > 0 for row in undisturbed_mesh.rows()), "equal bits mean something"
    with Journal(undisturbed_mesh.directory / "sft" / "journal.sqlite", read_only=True) as journal:
        seen = {(transition.state, transition.step) for transition in journal.transitions()}
    assert seen == {(fault.name, fault.step) for fault in EVERY_POINT if fault.role == "rank0" and fault.name in ("checkpoint", "train")}


def rows_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_engine_rank(run: PodRun, pid: int) -> None:
    """Rank 0 is the sidecar's worker, which starts the others."""
    (process,) = [number for number, line in run.processes().items() if "tandem.engine.executor.rank_worker" in line]
    os.kill(process, signal.SIGKILL)


def kill_command(run: PodRun, pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize(
    ("folder", "kill", "settings"),
    [
        (".", kill_engine_rank, ("--rollout.engine.tensor_parallel_size=2", "--machine.threads=2")),
        ("sft", kill_command, ()),
    ],
    ids=["rank 1 of the engine", "the controller in the supervised fine-tuning"],
)
def test_kill_between_two_rows_and_the_run_is_the_same(
    folder: str, kill: Callable[[PodRun, int], None], settings: tuple[str, ...], undisturbed_mesh: PodRun, tmp_path: Path
) -> None:
    run = PodRun(tmp_path)
    command = run.begin("train", str(run.recipe), f"--run.directory={tmp_path}", "--run.name=run", *SETTINGS, *settings)
    ends = time.monotonic() + 240
    while rows_of(run.directory / folder) < 2:
        assert command.poll() is None and time.monotonic() < ends
        time.sleep(0.005)
    kill(run, command.pid)
    done = finish(command)
    if kill is kill_command:
        assert done.returncode == -9
        done = run.resume()
    else:
        assert [event.detail["role"] for event in run.events("recovery")] == ["rollout"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert_lost_nothing(run, undisturbed_mesh)
