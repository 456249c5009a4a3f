"""The server's OpenAPI schema under schemathesis, and real clients."""

import subprocess
import sys
from pathlib import Path

import pytest
from server_process import Server, server

# Constraints that a schema cannot express (token ids of this vocabulary, names of this model, fields that contradict each other) are
# refused with 400 although the schema allows it.
EXCLUDED = "positive_data_acceptance"


def fuzz(running: Server, examples: int, seed: int) -> None:
    schema = running.get("/openapi.json")
    assert schema.status_code == 200
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", f"{running.url}/openapi.json",
        "--checks", "all", "--exclude-checks", EXCLUDED,
        "--max-examples", str(examples), "--seed", str(seed), "--phases", "examples,coverage,fuzzing", "--header", "Authorization: Bearer control",
        "--exclude-path-regex", "^/(sleep|pause)$", "--request-timeout", "60", "--max-response-time", "60", "--no-color", "--generation-database", "none",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, cwd=running.log.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert running.process.poll() is None and "Traceback" not in running.log.read_text(), running.log.read_text()[-4000:]
    running.wait_idle()


@pytest.mark.full
def test_schemathesis_finds_nothing(shared: Server) -> None:
    fuzz(shared, 4, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_schemathesis_finds_nothing_in_a_long_search(model: Path, tmp_path: Path, seed: int) -> None:
    with server(model, tmp_path, "--max-num-seqs", "32") as running:
        fuzz(running, 200, seed)
