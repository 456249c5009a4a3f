"""The checkpoints of a pod are copied elsewhere, and a run whose folder is lost continues from the copies with the same bits."""

import shutil
import signal
from pathlib import Path

import pytest
from pod_runs import PodRun, difference

from tandem.storage.files import open_storage
from tandem.trainer.checkpoint.remote import uploaded_steps


@pytest.mark.full
def test_run_that_was_killed_and_lost_its_folder_continues_from_its_copies_with_the_same_bits(undisturbed: PodRun, tmp_path: Path) -> None:
    run, target = PodRun(tmp_path), tmp_path / "copies"
    # Every checkpoint except the last of the run is uploaded before the death.
    done = run.train(f"--checkpoint.upload={target}", "--checkpoint.asynchronous=false", "--fault=pod:before:train:5")
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    steps = uploaded_steps(open_storage(str(target)))
    assert steps and max(steps) < 6 and {"start/config.json", "start/tokenizer.json"} < {file.name for file in open_storage(str(target)).files()}
    start = (run.directory / "sft" / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(run.directory)
    resumed = run.resume("--from", str(target))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert difference(run, undisturbed) == [] and [event.detail["from"] for event in run.events("restore")] == [str(target)]
    assert (run.directory / "sft" / "model" / "model.safetensors").read_bytes() == start and not (run.directory / "sft" / "checkpoints").exists()
    assert uploaded_steps(open_storage(str(target))) == [4, 6]
    assert run.left_behind() == []
    again = run.resume("--from", str(target))
    assert again.returncode == 2 and again.stderr.startswith(f"tandem: the run '{run.directory}' exists; 'tandem resume {run.directory}' continues it")
    second = PodRun(tmp_path, name="second").train(f"--checkpoint.upload={target}")
    assert second.returncode == 2 and "which holds a run's checkpoints; name another place" in second.stderr and len(second.stderr.splitlines()) == 1
