"""The ways to run and to end a pod differ in processes, not in bits."""

import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from pod_runs import PodRun, difference, finish

from tandem.cli.main import main
from tandem.config.recipe import load_config
from tandem.jobs.start import resume, train
from tandem.model.huggingface.model_folder import read_tensors
from tandem.pod.states import RolloutState
from tandem.report.run_facts import RESULT_KEY
from tandem.runtime.callback import Callback
from tandem.runtime.records.entropies import read_entropies
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.logs import readable
from tandem.runtime.records.run_lock import RunLock
from tandem.types import UserError
from tandem.types.token_entropies import unpack_halves


def wait_for_row(run: PodRun, step: int, limit_s: float = 240.0) -> None:
    """Waits until ``step`` is in ``metrics.jsonl``."""
    path, ends = run.directory / "metrics.jsonl", time.monotonic() + limit_s
    while not path.exists() or path.read_bytes().count(b"\n") <= step:
        assert time.monotonic() < ends, f"no row of step {step}"
        time.sleep(0.01)


def forget_end(run: PodRun) -> None:
    """Makes a finished run one that was killed right before its end was recorded."""
    with Journal(run.directory / "journal.sqlite") as journal:
        journal.set(RESULT_KEY, None)


def started_workers(run: PodRun, role: str) -> list[str]:
    """Returns the process ids in a worker's log, in order of appearance."""
    lines = (run.directory / "logs" / f"{role}_worker.log").read_text().splitlines()
    pids = re.findall(rf"{role}_worker\[(\d+)\]", "\n".join(map(readable, lines)))
    return list(dict.fromkeys(pids))


@pytest.mark.full
def test_engine_terminated_between_steps_gives_the_bits_of_the_one_that_stays(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--residents.plan=terminate", "--run.max_steps=4")
    assert done.returncode == 0, done.stderr
    # All six steps and every file are compared for each plan by ``test_every_plan_has_the_same_curve_bit_for_bit``.
    assert run.rows() == undisturbed.rows()[:4]
    assert run.left_behind() == []
    states = [transition.state for transition in run.transitions()]
    assert states.count(RolloutState.START_ENGINE) == 5 and states.count(RolloutState.TERMINATE_ENGINE) == 4
    assert RolloutState.KEEP_ENGINE not in states
    assert len(started_workers(run, "rollout")) == 5, "every step has an engine in a process of its own"
    assert len(started_workers(undisturbed, "rollout")) == 1


@pytest.mark.full
def test_inline_gives_the_bits_of_the_pod(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--inline")
    assert done.returncode == 0, done.stderr
    assert difference(run, undisturbed) == []
    assert run.left_behind() == []
    assert not (run.directory / "logs" / "trainer_worker.log").exists()
    for step, row in enumerate(run.rows()):
        inline, of_pod = (read_entropies(each.directory, step) for each in (run, undisturbed))
        assert {name: bytes(halves) for name, halves in inline.items()} == {name: bytes(halves) for name, halves in of_pod.items()}
        of_tokens = [value for halves in inline.values() for value in unpack_halves(halves) if not math.isnan(value)]
        assert math.fsum(of_tokens) / len(of_tokens) == pytest.approx(row["actor/entropy"], rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.full)])
def test_a_mixture_of_experts_is_trained_and_rolled_out_with_the_same_bits(architecture: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(f"--model.create.architecture={architecture}", "--model.create.num_experts=4", "--run.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in run.rows()] == [(0.0, 0.0)] * 2
    assert all(row["actor/grad_norm"] > 0 for row in run.rows())
    assert run.left_behind() == []
    names = dict(read_tensors(run.directory / "model")).keys()
    assert sum(".experts." in name for name in names) == 2 * 4 * 3


@pytest.mark.full
def test_interrupted_run_says_so_leaves_nothing_behind_and_is_resumed(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}")
    wait_for_row(run, 2)
    os.killpg(process.pid, signal.SIGINT)  # As a terminal sends it: to all foreground processes.
    done = finish(process)
    assert done.returncode == 130 and "Traceback" not in done.stderr + done.stdout
    assert done.stderr == "tandem: interrupted\n"
    steps = len(run.rows())
    assert done.stdout.count("a second signal stops at once") == 1
    last = done.stdout.splitlines()[-1]
    assert f"stopped after step {steps}, which is saved: '" in last and last.endswith(f"tandem resume {run.directory}' continues")
    assert (run.directory / "checkpoints" / f"step-{steps}" / "COMMIT").is_file()
    assert run.left_behind() == []
    resumed = run.resume()
    assert resumed.returncode == 0, resumed.stderr
    assert f"continuing after step {steps}" in resumed.stdout
    assert difference(run, undisturbed) == []


@pytest.mark.full
def test_second_signal_ends_a_pod_at_once_and_says_how_to_continue(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}", "--run.max_steps=100000")
    wait_for_row(run, 0)
    # The rollout's worker cannot finish the step.
    worker = next(pid for pid, line in run.processes().items() if "rollout_worker" in line)
    os.kill(worker, signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130 and done.stderr == "tandem: interrupted\n"
    last = done.stdout.splitlines()[-1]
    assert "stopped at once: '" in last and last.endswith(f"tandem resume {run.directory}' continues from the newest checkpoint")
    assert run.left_behind() == []


@pytest.mark.full
def test_signal_before_the_first_step_says_how_to_continue(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}")
    while not (run.directory / "models").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130 and done.stderr == "tandem: interrupted\n"
    assert f"tandem resume {run.directory}' continues" in done.stdout.splitlines()[-1] and run.left_behind() == []
    resumed = run.resume()
    assert resumed.returncode == 0, resumed.stderr
    assert difference(run, undisturbed) == []


class Heard(Callback):
    """Remembers the messages of a run."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def resumed(self, step: int, accuracy: float | None) -> None:
        self.lines.append(f"resumed {step} {accuracy}")

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.full
def test_finished_pod_with_more_steps_is_the_run_that_had_them_from_the_start(
    undisturbed: PodRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    run, heard = PodRun(tmp_path), Heard()
    train(load_config("tiny.yaml", [f"run.directory={tmp_path}", "run.name=run", "run.max_steps=4"]), inline=True)
    resume(run.directory, inline=True, callbacks=[heard], overrides=["--run.max_steps=6"])
    assert heard.lines == ["resumed 4 0.0"]
    assert run.rows() == undisturbed.rows()
    assert [each for each in run.evaluations() if each[0] != 4 or not each[1].startswith("final")] == undisturbed.evaluations()
    assert (run.directory / "model/model.safetensors").read_bytes() == (undisturbed.directory / "model/model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"'run.max_steps' is 5, and '.*' has taken 6 steps; give 6 or more"):
        resume(run.directory, inline=True, overrides=["--run.max_steps=5"])


@pytest.mark.full
def test_reached_target_is_told_and_a_higher_one_trains_further(undisturbed: PodRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    run, heard = PodRun(tmp_path), Heard()
    given = [f"run.directory={tmp_path}", "run.name=run", "rewards.accuracy_threshold=0.0", "evaluation.final_prompts=4"]
    result = train(load_config("tiny.yaml", given), inline=True, callbacks=[heard])
    assert result.steps == 2 and result.reached
    assert heard.lines == ["step 2: target reached: the held-out accuracy is 1.000, and the target 1 in 2 evaluations in a row"]
    again = resume(run.directory, inline=True, callbacks=[heard], overrides=["--run.max_steps=50"])
    assert again == result and len(run.rows()) == 2
    assert "has finished: it reached its target, a held-out accuracy of 1, after 2 steps; nothing is repeated" in heard.lines[-1]
    assert heard.lines[-1].endswith(f"'tandem resume {run.directory} --evaluation.target_accuracy=VALUE'; more steps alone change nothing")
    further = resume(run.directory, inline=True, overrides=["--evaluation.consecutive=3"])
    assert further.steps == 4 and further.reached
    assert [row["actor/grad_norm"] for row in run.rows()] == [row["actor/grad_norm"] for row in undisturbed.rows()[:4]]


def test_interrupt_while_the_model_is_fine_tuned_names_the_run_and_not_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    said: list[str] = []

    class Interrupting(Callback):
        def progress(self, name: str, done: float, total: float, text: str = "") -> None:
            if name == "sft" and not said:
                os.kill(os.getpid(), signal.SIGINT)

        def message(self, text: str) -> None:
            said.append(text)

    with pytest.raises(KeyboardInterrupt):
        train(load_config("tiny.yaml", [f"run.directory={tmp_path}", "run.name=mine"]), inline=True, callbacks=[Interrupting()])
    assert f"tandem resume {tmp_path / 'mine'}' continues" in said[-1]


@pytest.mark.full
def test_second_command_on_a_running_directory_is_refused_with_one_line(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}")
    wait_for_row(run, 0)
    # It must not end before the others have asked.
    process.send_signal(signal.SIGSTOP)
    resumed, trained = run.resume(), run.train()
    process.send_signal(signal.SIGCONT)
    assert resumed.returncode == 2 and len(resumed.stderr.splitlines()) == 1
    assert f"is in use by process {process.pid}" in resumed.stderr
    assert trained.returncode == 2 and len(trained.stderr.splitlines()) == 1
    assert f"'{run.directory}' exists" in trained.stderr
    assert finish(process).returncode == 0
    assert difference(run, undisturbed) == []


@pytest.mark.full
def test_finished_run_is_resumed_to_the_same_result_and_other_threads_are_refused(
    undisturbed: PodRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet_root: None
) -> None:
    run = PodRun(tmp_path)

    def refused(*arguments: str) -> tuple[int, str]:
        handler = signal.getsignal(signal.SIGTERM)
        status = main(["resume", str(run.directory), *arguments])
        signal.signal(signal.SIGTERM, handler)
        return status, capsys.readouterr().err

    shutil.copytree(undisturbed.directory, run.directory)
    again = run.resume("--parallel.data=2")
    assert again.returncode == 0, again.stderr
    assert "has finished: it has taken all of its 6 steps; nothing is repeated" in again.stdout and "target NOT reached after 6 steps" in again.stdout
    assert difference(run, undisturbed) == [] and run.transitions() == undisturbed.transitions()
    forget_end(run)
    again = run.resume()
    assert again.returncode == 0 and "continuing after step 6" in again.stdout, again.stderr
    assert difference(run, undisturbed) == []
    forget_end(run)
    config = run.directory / "config.yaml"
    before = config.read_bytes()
    monkeypatch.chdir(run.parent)
    with RunLock(run.directory):
        status, said = refused("--machine.call_deadline_s=7")
    assert status == 2 and "is in use by process" in said
    assert config.read_bytes() == before, "a worker of the run in use reads it when it is replaced"
    status, said = refused("--machine.threads=2")
    assert status == 2 and "thread" in said
    assert config.read_bytes() == before, "a refused resume changes nothing"
    config.write_text(config.read_text().replace("threads: 1", "threads: 2"))
    status, said = refused()
    assert status == 2
    assert "thread" in said and len(said.splitlines()) == 1
    assert difference(run, undisturbed) == [], "a refused resume changes nothing"
    config.write_text(config.read_text().replace("threads: 2", "threads: 1"))
    (run.directory / "journal.sqlite").rename(tmp_path / "journal")
    status, said = refused()
    assert status == 1 and "has checkpoints and no journal.sqlite" in said and len(said.splitlines()) == 1
    assert not (run.directory / "journal.sqlite").exists()
    (run.directory / "journal.sqlite").touch()
    status, said = refused()
    assert status == 1 and "has checkpoints and an empty journal.sqlite" in said and len(said.splitlines()) == 1
    (tmp_path / "journal").rename(run.directory / "journal.sqlite")
    for folder in (run.directory / "checkpoints").glob("step-*"):
        os.truncate(max(folder.iterdir(), key=lambda path: path.stat().st_size), 1000)
    before = {path: path.read_bytes() for path in (run.directory / "metrics.jsonl", *run.directory.glob("checkpoints/*/*"))}
    done = run.resume()
    status, said = done.returncode, done.stderr
    assert status == 1
    assert "no checkpoint of this run is whole" in said and len(said.splitlines()) == 1
    assert {path: path.read_bytes() for path in before} == before
    assert run.rows() == undisturbed.rows() and run.left_behind() == []
