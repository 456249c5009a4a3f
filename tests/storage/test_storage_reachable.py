"""An object storage that a run depends on is asked once before the run: an answer passes, everything else is one line within seconds."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.registry import RegistryConfig
from tandem.jobs.checks.check_run import check_targets
from tandem.storage.files import open_storage
from tandem.storage.reachable import check_reachable
from tandem.types import RunError

CHECK = """
import sys
from tandem.cli.main import main
sys.exit(main(["train", sys.argv[1], "--dry-run", f"--run.directory={sys.argv[2]}", "--checkpoint.upload=s3://bucket/run"]))
"""
RECIPE = Path(__file__).parents[1] / "pod" / "tiny.yaml"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers has a minute for it, also where the machine has other work."""
    monkeypatch.setattr(check_reachable, "__defaults__", (60.0,))


@pytest.mark.usefixtures("patient")
def test_a_bucket_that_answers_passes_with_and_without_objects_below_the_prefix(s3_url: str, tmp_path: Path) -> None:
    check_targets(CheckpointConfig(upload=f"{s3_url}/nothing/yet"), RegistryConfig())
    (tmp_path / "file").write_text("text")
    storage = open_storage(f"{s3_url}/prefix")
    storage.copy("inner/file", tmp_path / "file")
    check_reachable(storage)
    assert [file.name for file in storage.files()] == ["inner/file"]


@pytest.mark.usefixtures("patient")
def test_a_bucket_that_does_not_exist_is_refused_by_the_name_of_the_key(s3_url: str) -> None:
    with pytest.raises(RunError, match=r"^'checkpoint.upload': 's3://no-such-bucket/run' cannot be used: there is no such bucket .*leave the key empty$"):
        check_targets(CheckpointConfig(upload="s3://no-such-bucket/run"), RegistryConfig())


def test_a_folder_needs_no_answer(tmp_path: Path) -> None:
    check_targets(CheckpointConfig(upload=str(tmp_path / "copies")), RegistryConfig())
    assert (tmp_path / "copies").is_dir()


@pytest.mark.full
def test_an_endpoint_that_does_not_answer_is_one_line_within_seconds(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    with socket.socket() as server:
        # A port that refuses connections would end as one line too, but of s3fs's own retries, whose time is random.
        server.bind(("127.0.0.1", 0))
        server.listen()
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
        }  # fmt: skip
        command = [sys.executable, "-c", CHECK, str(RECIPE), str(tmp_path / "runs")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "'checkpoint.upload': 's3://bucket/run' did not answer within 5 s; check the address, the endpoint and the network" in done.stderr
    assert not (tmp_path / "runs").exists()
