"""``tandem quantize``: every method, its table, its refusals, and a killed command that is repeated."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers_cli import COMMAND, ROOT


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} {n * 7 % 10} = {n * n % 97} "}) + "\n" for n in range(200)))
    return path


@pytest.mark.parametrize(
    ("method", "bits"), [("int8", 8 + 1.0), ("fp8", 8 + 1.0), ("rtn", 4 + 1.2), ("gptq", 4 + 2.5), ("awq", 4 + 1.0)]
)
def test_a_model_is_quantised_measured_and_generates(command, model: Path, text: Path, tmp_path: Path, method: str, bits: float) -> None:
    target = tmp_path / method
    done = command(
        "quantize", model, target, "--method", method, "--group-size", "32", "--calibration", text, "--samples", "8", "--sequence-length", "48"
    )
    assert done.code == 0, done.err
    header, before, after = (line.split() for line in done.out.splitlines())
    assert header[0] == "weights"
    assert (before[0], after[0]) == ("float", method)
    report = json.loads((target / "quantization_report.json").read_text())
    assert report["before"]["bits"] == 32
    assert report["after"]["bits"] < bits + 3
    assert report["after"]["file_bytes"] < 0.6 * report["before"]["file_bytes"]
    assert report["after"]["memory_bytes"] < 0.8 * report["before"]["memory_bytes"]
    assert 0.8 < report["after"]["perplexity"] / report["before"]["perplexity"] < 1.25
    assert report["after"]["tokens_per_s"] > 0
    answer = command("generate", target, "--prompt", "1 2", "--max-tokens", "4")
    assert answer.code == 0, answer.err


def test_without_text_there_is_no_perplexity(command, model: Path, tmp_path: Path) -> None:
    done = command("quantize", model, tmp_path / "out", "--method", "int8", "--json")
    report = json.loads(done.out)
    assert report["before"]["perplexity"] is None
    assert report["method"] == "int8"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--method", "hqq"), "--method is 'hqq'"),
        (("--method", "gptq"), "--calibration FILE"),
        (("--method", "awq", "--calibration", "nowhere.txt"), "nowhere.txt"),
        (("--method", "gptq", "--bits", "3"), "--bits is 3"),
        (("--method", "rtn", "--group-size", "7"), "--group-size is 7"),
        (("--method", "int8", "--sequence-length", "100000"), "--sequence-length is 100000"),
        (("--method", "int8", "--samples", "0"), "--samples is 0"),
        ((), "--method"),
    ],
)
def test_what_cannot_be_quantised_is_one_line(command, model: Path, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in command("quantize", model, tmp_path / "out", *arguments).refusal()
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_exists_and_a_source_that_is_quantised_are_refused(command, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert command("quantize", model, target, "--method", "int8").code == 0
    assert "already exists" in command("quantize", model, target, "--method", "int8").refusal()
    assert "is quantized" in command("quantize", target, tmp_path / "again", "--method", "int8").refusal()


@pytest.mark.full
def test_a_run_that_is_killed_leaves_no_folder_and_can_be_started_again(command, model: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    arguments = ["quantize", model, target, "--method", "gptq", "--group-size", "32", "--calibration", text, "--sequence-length", "24"]
    for _ in range(3):
        process = subprocess.Popen([COMMAND, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (tmp_path / ".out.partial").exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not target.exists()
    assert command(*arguments).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
