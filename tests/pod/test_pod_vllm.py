"""Whole runs whose samples vLLM draws: what they record, and deaths and flipped bits of vLLM's processes in the middle of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from pod_runs import HERE, PodRun, finish
from safetensors import safe_open

sys.path.append(str(HERE.parent / "backends"))
sys.path.append(str(HERE.parent / "weight_transfer"))

from real_vllm import alive, descendants, flip_in_memory, needs_vllm

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.records.journal import Journal
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.shared_memory import Segment

pytestmark = [pytest.mark.full, needs_vllm]
VLLM = ("--rollout=vllm", "--model.create.head_dim=32")
"""Of the tiny recipe's model vLLM has no attention on a CPU: its heads are too small."""


def assert_whole(run: PodRun, steps: int) -> None:
    """Every step has each of its 16 samples once, drawn by its weights, with log-probabilities that the trainer shares up to rounding."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps))
    assert all(row["mismatch_kl"] < 1e-9 and row["mismatch_max_abs"] < 1e-3 for row in rows)
    assert all(abs(row["actor/importance_weight"] - 1) < 1e-3 for row in rows)
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        for step in range(steps):
            samples = journal.samples(step)
            assert samples is not None and len({sample.id for sample in samples}) == len(samples) == 16
            assert {version.step for sample in samples for version in sample.sampled_weight_versions} == {step}
            assert all(len(sample.token_ids) == len(sample.logprobs) for sample in samples)


def test_a_run_on_vllm_records_what_it_draws_corrects_for_importance_and_can_be_verified_and_replayed(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    # As from a command line: vLLM's server works in a folder of its own, to which the run's is not relative.
    done = run.train("--run.directory=.", *VLLM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(run, 6)
    assert run.left_behind() == [] and run.events("recovery") == []
    algorithm = yaml.safe_load((run.directory / "config.yaml").read_text())["algorithm"]
    assert (algorithm["tis_cap"], algorithm["old_logprobs"]) == (2.0, "recompute")
    command = lambda *arguments: finish(run.begin(*arguments))
    verified = command("verify", str(run.directory))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    replayed = command("replay", str(run.directory), "--step", "3")
    assert replayed.returncode == 0 and "the rollout is not replayed" in replayed.stdout, replayed.stdout + replayed.stderr
    assert "train: " in replayed.stdout and "rewards: " in replayed.stdout


def test_a_run_at_another_temperature_with_a_filter_is_corrected_by_what_was_drawn_from(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*VLLM, "--rollout.temperature=0.7", "--run.max_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    # The importance weight compares the trainer at this temperature with what was drawn from, ``mismatch_kl`` the raw ones.
    assert_whole(run, 2)
    (tmp_path / "filtered").mkdir()
    cut = PodRun(tmp_path / "filtered")
    done = cut.train(*VLLM, "--rollout.temperature=0.7", "--rollout.top_p=0.9", "--run.max_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = cut.rows()
    assert all(row["mismatch_kl"] < 1e-9 and row["mismatch_max_abs"] < 1e-3 for row in rows)
    # A filter makes what it keeps likelier than the model does.
    assert all(0.5 < row["actor/importance_weight"] < 0.999 for row in rows)


def test_vllm_draws_in_16_bits_for_a_trainer_with_weights_in_32(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*VLLM, "--trainer.precision=bf16", "--run.max_steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dtype=torch.bfloat16" in (run.directory / "logs" / "vllm.log").read_text()
    rows = run.rows()
    assert len(rows) == 3 and all(0 < row["mismatch_kl"] < 1e-2 for row in rows)
    assert all(abs(row["actor/importance_weight"] - 1) < 0.05 for row in rows)
    with safe_open(next((run.directory / "model").glob("*.safetensors")), "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118


def test_an_adapter_is_trained_on_what_vllm_draws_with_it(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    # A large rate, so that the adapter is no longer nothing after its first step.
    done = run.train(*VLLM, "--trainer.lora.rank=4", "--trainer.learning_rate=0.01", "--run.max_steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(run, 3)
    assert all(row["actor/grad_norm"] > 0 for row in run.rows())
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        texts = [[sample.token_ids for sample in journal.samples(step) or ()] for step in range(3)]
    assert texts[0] != texts[1] != texts[2]
    replayed = finish(run.begin("replay", str(run.directory), "--step", "2"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def killed_pids(process: "subprocess.Popen[str]", wanted: Callable[[str], bool]) -> dict[int, str]:
    """Kills the descendant of ``process`` whose command line is ``wanted`` as soon as there is one, and returns the command lines of those below it."""
    ends = time.monotonic() + 900
    while time.monotonic() < ends:
        for pid, line in descendants(process.pid).items():
            if wanted(line):
                below = descendants(pid)
                os.kill(pid, signal.SIGKILL)
                return below
        time.sleep(0.05)
    raise AssertionError("no such process")


@contextlib.contextmanager
def begun(run: PodRun, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}", *VLLM, *arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_step(run: PodRun, step: int, process: "subprocess.Popen[str]") -> None:
    """Waits until the row of ``step`` is written."""
    metrics, ends = run.directory / "metrics.jsonl", time.monotonic() + 900
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > step):
        assert process.poll() is None and time.monotonic() < ends, process.communicate() if process.poll() is not None else "too slow"
        time.sleep(0.02)


def test_vllms_server_its_engine_and_its_worker_are_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    run, steps = PodRun(tmp_path), 40
    victims = {1: lambda line: "EngineCore" in line, 3: lambda line: "vllm.entrypoints.cli.main" in line, 5: lambda line: '"log": "rollout_worker"' in line}
    with begun(run, f"--run.max_steps={steps}") as process:
        gone: dict[int, str] = {}
        for number, (step, wanted) in enumerate(victims.items()):
            wait_for_step(run, step, process)
            gone |= killed_pids(process, wanted)
            ends = time.monotonic() + 900
            while len(run.events("recovery")) <= number:
                assert process.poll() is None and time.monotonic() < ends, "the death was not seen"
                time.sleep(0.1)
        out, error = process.communicate(timeout=900)
    assert process.returncode == 0, out + error
    assert_whole(run, steps)
    assert [event.detail["role"] for event in run.events("recovery")] == ["rollout"] * 3
    assert run.left_behind() == []
    # By their command lines too: in the minutes of this test other processes may have got their ids.
    assert [pid for pid in alive(list(gone)) if descendants(pid).get(pid) == gone[pid]] == []


def published_norm(run: PodRun) -> list[float]:
    """Returns the first values of ``model.norm.weight`` as they are published."""
    store = EmbeddedStore(run.directory / "pod" / "store.sqlite")
    found = current(store)
    store.close()
    assert found is not None
    tensor = next(tensor for tensor in found[0].tensors if tensor.name == "model.norm.weight")
    with Segment.open(tensor.segment) as segment:
        return torch.frombuffer(bytearray(segment.memory[tensor.offset_bytes : tensor.offset_bytes + 32]), dtype=torch.float32).tolist()


def test_a_bit_that_flips_inside_vllm_is_named_and_its_samples_are_drawn_again(tmp_path: Path) -> None:
    run, steps = PodRun(tmp_path), 60
    with begun(run, f"--run.max_steps={steps}") as process:
        wait_for_step(run, 1, process)
        ends = time.monotonic() + 900
        while not run.events("recovery"):
            assert process.poll() is None and time.monotonic() < ends, "the flipped bit was not seen"
            with contextlib.suppress(OSError):
                flip_in_memory([pid for pid, line in descendants(process.pid).items() if "EngineCore" in line], published_norm(run))
        out, error = process.communicate(timeout=900)
    assert process.returncode == 0, out + error
    (event,) = run.events("recovery")
    assert "vLLM's tensor 'model.norm.weight' has changed in its memory since the update" in event.detail["reason"]
    assert_whole(run, steps)


def test_a_bit_that_flips_in_shared_memory_is_named_and_registered_again(tmp_path: Path) -> None:
    run = PodRun(tmp_path, program=(str(HERE / "damaged_memory.py"), "3", "1"))
    done = run.train(*VLLM)
    assert done.returncode == 0, done.stdout + done.stderr
    (event,) = run.events("weights_damaged")
    assert event.detail["step"] == 3 and "was read twice and does not have its digest" in event.detail["what"]
    assert_whole(run, 6)
    assert run.events("recovery") == []


def test_vllm_is_terminated_between_steps_and_starts_with_dummy_weights(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*VLLM, "--residents.plan=terminate", "--run.max_steps=2", "--evaluation.every_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(run, 2)
    states = [transition.state for transition in run.transitions() if transition.sidecar == "rollout"]
    starts = [place for place, state in enumerate(states) if state == "start_engine"]
    assert len(starts) == 3 and all(states[place + 1] == "update_weight" for place in starts)
    assert states.count("terminate_engine") >= 2
    assert run.left_behind() == []


def test_two_workers_one_step_off_are_two_servers(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*VLLM, "--rollout.workers=2", "--rollout.max_staleness=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(run.rows()) == 6 and {path.name for path in (run.directory / "logs").glob("vllm*")} == {"vllm.log", "vllm1.log"}
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        drawn = [journal.samples(step) for step in range(6)]
    assert [{version.step for sample in samples or () for version in sample.sampled_weight_versions} for samples in drawn] == [{0}, {0}, {1}, {2}, {3}, {4}]
    assert run.left_behind() == []
