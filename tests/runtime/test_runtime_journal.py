import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tandem.runtime.process.faults import Fault, FaultPlan, no_fault
from tandem.runtime.records.journal import COMMITS, Journal
from tandem.runtime.records.run_lock import RunLock
from tandem.types import FinishReason, RunError, Sample, Score, ScoreState, UserError, WeightVersion


def sample(step: int, i: int) -> Sample:
    version = WeightVersion(1, step)
    return Sample(f"{step}/p/{i}", "p", i, (1, 2), (3, 4), (-0.1, -0.2), (-0.1, -0.2), (version,) * 2, FinishReason.STOP, "x")


def score(step: int, i: int, value: float | None = 0.5) -> Score:
    state = ScoreState.INFRASTRUCTURE_FAULT if value is None else ScoreState.NUMBER
    return Score(f"{step}/p/{i}", state, value, {"match": 0.5}, None)


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as opened:
        yield opened


def test_samples_and_scores_are_what_was_committed(journal, tmp_path):
    samples, scores = [sample(3, i) for i in range(4)], [score(3, i, None if i == 2 else i / 7) for i in range(4)]
    assert journal.samples(3) is None and journal.scores(3) is None
    journal.commit_samples(3, samples)
    assert journal.samples(3) == samples and journal.scores(3) is None
    journal.commit_scores(3, scores)
    with Journal(tmp_path / "journal.sqlite", read_only=True) as reader:
        assert reader.samples(3) == samples and reader.scores(3) == scores
        assert reader.journalled_steps() == [3]


def test_a_step_is_drawn_once_and_judged_once(journal):
    journal.commit_samples(0, [sample(0, 0)])
    journal.commit_samples(0, [sample(0, 0)])
    with pytest.raises(RunError, match="other samples for step 0"):
        journal.commit_samples(0, [sample(0, 1)])
    journal.commit_scores(0, [score(0, 0)])
    with pytest.raises(RunError, match="other scores for step 0"):
        journal.commit_scores(0, [score(0, 0, 0.75)])
    assert journal.samples(0) == [sample(0, 0)] and journal.scores(0) == [score(0, 0)]


def test_scores_without_samples_are_refused(journal):
    with pytest.raises(RunError, match="no samples of step 5"):
        journal.commit_scores(5, [])


def test_a_transition_has_its_times_and_an_open_one_has_no_end(journal):
    before = time.time()
    with journal.transition(2, "trainer", "train") as detail:
        assert journal.transitions()[0].ended_s is None
        detail["tokens"] = 10
    with pytest.raises(ZeroDivisionError), journal.transition(2, "trainer", "offload"):
        1 / 0  # noqa: B018
    done, failed = journal.transitions(2)
    assert before <= done.started_s <= done.ended_s <= time.time()
    assert (done.sidecar, done.state, done.detail) == ("trainer", "train", {"tokens": 10})
    assert failed.detail == {"failed": "ZeroDivisionError"} and failed.ended_s is not None


def test_a_cut_keeps_what_the_checkpoint_knows_and_every_sample(journal):
    for step in range(6):
        journal.commit_evaluation(step, "sampled", {"accuracy": step / 10})
        journal.commit_samples(step, [sample(step, 0)])
        journal.commit_scores(step, [score(step, 0)])
        with journal.transition(step, "trainer", "train"):
            pass
        if step + 1 in (2, 4, 6):
            with journal.transition(step + 1, "trainer", "checkpoint"):
                pass
            journal.commit_checkpoint(step + 1, f"digest-{step + 1}")
    journal.record_event("recovery", {"step": 5})
    with journal.transition(4, "rollout", "evaluate"):
        pass
    journal.cut_after(4)
    states = [(t.step, t.state) for t in journal.transitions()]
    assert states == [(0, "train"), (1, "train"), (2, "checkpoint"), (2, "train"), (3, "train"), (4, "checkpoint")]
    assert [step for step, _, _ in journal.evaluations()] == [0, 1, 2, 3, 4]
    assert [c.step for c in journal.checkpoints()] == [2, 4] and journal.checkpoints()[1].digest == "digest-4"
    assert journal.journalled_steps() == list(range(6)) and journal.scores(5) == [score(5, 0)]
    assert [event.kind for event in journal.events()] == ["recovery"]


def test_a_cut_to_a_checkpoint_that_only_the_disk_knows_ends_at_its_transition(journal):
    for step, state in ((0, "train"), (1, "checkpoint"), (1, "train")):
        with journal.transition(step, "trainer", state):
            pass
    journal.cut_after(1)
    assert [t.state for t in journal.transitions()] == ["train", "checkpoint"]


def test_a_cut_to_the_start_leaves_the_first_evaluation(journal):
    journal.commit_evaluation(0, "sampled", {"accuracy": 0.5})
    journal.commit_evaluation(5, "sampled", {"accuracy": 0.6})
    with journal.transition(0, "trainer", "train"):
        pass
    journal.cut_after(0)
    assert journal.transitions() == [] and journal.evaluations() == [(0, "sampled", {"accuracy": 0.5})]


def test_a_cut_done_twice_is_a_cut_done_once(journal):
    journal.commit_evaluation(3, "sampled", {})
    journal.cut_after(2)
    journal.cut_after(2)
    assert journal.evaluations() == []


def test_incarnations_only_grow_over_restarts(tmp_path):
    path = tmp_path / "journal.sqlite"
    with Journal(path) as first:
        assert [first.next_incarnation(), first.next_incarnation()] == [1, 2]
    with Journal(path) as second:
        assert second.incarnation == 2 and second.next_incarnation() == 3
        with second.transition(0, "trainer", "start"):
            pass
        assert second.transitions()[0].incarnation == 3


def test_facts_of_the_run_are_json(journal):
    journal.set("numerics", {"threads": 2})
    journal.set("numerics", {"threads": 1})
    assert journal.get("numerics") == {"threads": 1} and journal.get("nothing", 7) == 7


def test_a_file_that_is_no_journal_is_one_line(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(RunError, match=r"journal\.sqlite is damaged") as caught:
        Journal(path)
    assert "\n" not in str(caught.value)


def test_damaged_pages_are_found_when_the_journal_is_opened(tmp_path):
    path = tmp_path / "journal.sqlite"
    with Journal(path) as written:
        for step in range(50):
            written.commit_samples(step, [sample(step, i) for i in range(20)])
    data = bytearray(path.read_bytes())
    for at in range(4096, len(data), 4096):
        data[at : at + 64] = b"\xff" * 64
    path.write_bytes(data)
    with pytest.raises(RunError, match="damaged"):
        Journal(path)


def test_a_flipped_bit_in_samples_is_found_when_they_are_read(tmp_path):
    path = tmp_path / "journal.sqlite"
    with Journal(path) as written:
        written.commit_samples(0, [sample(0, 0)])
    data = bytearray(path.read_bytes())
    data[data.index(b"TDM1") + 300] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match="damaged"), Journal(path) as opened:
        opened.samples(0)


def test_a_locked_journal_says_so(tmp_path):
    path = tmp_path / "journal.sqlite"
    with Journal(path) as holder, Journal(path, busy_s=0.1) as other:
        holder._connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(RunError, match="locked by another process"):
            other.set("a", 1)


def test_a_journal_of_another_layout_is_refused(tmp_path):
    path = tmp_path / "journal.sqlite"
    with Journal(path) as written:
        written._connection.execute("PRAGMA user_version=99")
    with pytest.raises(RunError, match="has layout 99"):
        Journal(path)


def test_a_journal_in_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        Journal(tmp_path / "no" / "journal.sqlite")


def test_every_commit_and_transition_is_between_two_fault_points(tmp_path):
    heard: list[str] = []
    with Journal(tmp_path / "journal.sqlite", fault_point=heard.append) as journal:
        journal.commit_samples(2, [sample(2, 0)])
        journal.commit_scores(2, [score(2, 0)])
        journal.commit_evaluation(2, "sampled", {})
        journal.commit_checkpoint(2, "d")
        journal.record_event("warning", {"step": 2})
        with journal.transition(2, "trainer", "train"):
            heard.append("inside")
    expected = [f"{when}:{name}:2" for name in COMMITS for when in ("before", "after")]
    assert heard == [*expected, "before:train:2", "inside", "after:train:2"]


WRITER = """
    import os, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[3])
    from test_runtime_journal import sample, score
    from tandem.runtime.process.faults import FaultPlan
    from tandem.runtime.records.journal import Journal
    directory = Path(sys.argv[1])
    point = FaultPlan.parse(sys.argv[2]).point("controller", directory)
    with Journal(directory / "journal.sqlite", fault_point=point) as journal:
        for step in range(4):
            if journal.samples(step) is None:
                journal.commit_samples(step, [sample(step, 0)])
            if journal.scores(step) is None:
                journal.commit_scores(step, [score(step, 0)])
            with journal.transition(step, "trainer", "train"):
                pass
    print("done")
"""


@pytest.mark.parametrize("name", ["commit_samples", "commit_scores", "train"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_a_commit_loses_nothing_and_strikes_once(tmp_path, when, name):
    here = Path(__file__).parent
    plan = f"controller:{when}:{name}:2"
    killed = run_python(WRITER, tmp_path, plan, here)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with Journal(tmp_path / "journal.sqlite", read_only=True) as journal:
        assert journal.journalled_steps() == ([0, 1] if (when, name) == ("before", "commit_samples") else [0, 1, 2])
        judged = (when, name) not in (("before", "commit_samples"), ("after", "commit_samples"), ("before", "commit_scores"))
        assert (journal.scores(2) is not None) == judged
    resumed = run_python(WRITER, tmp_path, plan, here)
    assert resumed.stdout == "done\n", resumed.stderr
    with Journal(tmp_path / "journal.sqlite", read_only=True) as journal:
        assert [journal.samples(step) for step in range(4)] == [[sample(step, 0)] for step in range(4)]
        assert all(journal.scores(step) == [score(step, 0)] for step in range(4))


def test_a_journal_killed_at_any_moment_opens_with_whole_steps_only(tmp_path):
    code = """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from test_runtime_journal import sample
        from tandem.runtime.records.journal import Journal
        journal = Journal(Path(sys.argv[1]) / "journal.sqlite")
        step = len(journal.journalled_steps())
        while True:
            journal.commit_samples(step, [sample(step, i) for i in range(50)])
            step += 1
            print("one more", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(Path(__file__).parent)]
    seen = 0
    for round_ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(0.03 + 0.017 * round_)
            process.kill()
        with Journal(tmp_path / "journal.sqlite") as journal:
            steps = journal.journalled_steps()
            assert steps == list(range(len(steps))) and len(steps) >= seen
            assert all(len(journal.samples(step)) == 50 for step in steps)
            seen = len(steps)
    assert seen > 0


@pytest.mark.parametrize("text", ["trainer_worker:after:train", "nobody:after:train:3", "pod:during:train:3", "", "pod:after:train:-1"])
def test_a_fault_that_cannot_be_meant_is_refused(text):
    with pytest.raises(UserError, match="ROLE:before"):
        FaultPlan.parse(text)


def test_a_fault_plan_reaches_only_its_role(tmp_path):
    plan = FaultPlan.parse("trainer_worker:after:train:3, controller:before:commit_scores:2")
    assert plan.faults == (Fault("trainer_worker", "after", "train", 3), Fault("controller", "before", "commit_scores", 2))
    assert FaultPlan.parse(str(plan)) == plan
    assert plan.point("rollout_shim", tmp_path) is no_fault
    plan.point("trainer_worker", tmp_path)("after:train:2")
    assert not (tmp_path / "faults").exists()


def test_the_pod_role_kills_the_whole_process_group(tmp_path):
    code = """
        import subprocess, sys
        from pathlib import Path
        from tandem.runtime.process.faults import FaultPlan
        child = subprocess.Popen(["sleep", "60"])
        print(child.pid, flush=True)
        FaultPlan.parse("pod:before:train:0").point("controller", Path(sys.argv[1]))("before:train:0")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        child = int(process.stdout.readline())
        assert process.wait(10) == -signal.SIGKILL
    ends = time.monotonic() + 5
    while time.monotonic() < ends and _runs(child):
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_second_run_on_a_directory_is_told_who_has_it(tmp_path):
    code = "import sys; from pathlib import Path; from tandem.runtime.records.run_lock import RunLock; RunLock(Path(sys.argv[1]))"
    with RunLock(tmp_path):
        second = run_python(code, tmp_path)
        assert f"is in use by process {os.getpid()}; wait for it" in second.stderr
    assert run_python(code, tmp_path).returncode == 0


def test_a_killed_holder_leaves_the_lock_free(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from tandem.runtime.records.run_lock import RunLock
        lock = RunLock(Path(sys.argv[1]))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_python(code, tmp_path).returncode == -signal.SIGKILL
    RunLock(tmp_path).release()


def written_run(folder: Path) -> Path:
    with Journal(folder / "journal.sqlite") as journal:
        journal.commit_samples(0, [sample(0, 0)])
        journal.commit_scores(0, [score(0, 0)])
    return folder / "journal.sqlite"


@pytest.mark.parametrize("brief", [False, True], ids=["whole", "brief"])
def test_a_reader_leaves_the_folder_as_it_was(tmp_path, brief):
    path = written_run(tmp_path)
    listed = lambda: sorted((each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in tmp_path.iterdir())
    before = listed()
    with Journal(path, read_only=True, brief=brief) as journal:
        assert journal.samples(0) == [sample(0, 0)]
        assert listed() == before, "also while it reads"
    assert listed() == before


def test_a_file_that_ends_while_others_read_it_has_no_log_beside_it(tmp_path):
    """Of SQLite's connections the last one merges the log, and a reader cannot: the writer comes back for it."""
    path, code = tmp_path / "journal.sqlite", """
        import sys, time
        from pathlib import Path
        from tandem.runtime.records.journal import Journal
        with Journal(Path(sys.argv[1]), read_only=True) as journal:
            assert journal.samples(0) is not None
            print("reading", flush=True)
            sys.stdin.readline()
            time.sleep(0.3)
        """  # fmt: skip
    journal = Journal(path)
    journal.commit_samples(0, [sample(0, 0)])
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "reading\n"
        reader.stdin.write("\n")
        reader.stdin.flush()
        journal.close()
        assert reader.wait(timeout=30) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["journal.sqlite", "journal.sqlite.head"]
    with Journal(path, read_only=True) as again:
        assert again.samples(0) == [sample(0, 0)]


def test_a_reader_of_a_run_that_lives_sees_what_is_in_its_log(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.commit_samples(0, [sample(0, 0)])
        with Journal(journal.path, read_only=True) as reader:
            assert reader.samples(0) == [sample(0, 0)]
