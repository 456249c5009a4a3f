"""A run whose weights are served while it trains: its curve is that of a run that nobody asks, also when the server is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from pod_runs import PodRun, difference, finish

HEADER = "X-Tandem-Weight-Version"


@dataclass
class Followed:
    """What clients of a server saw of a run that it follows: the versions of ``seen`` and the answers with tokens of several, ``mixed``; ``answers``: greedy
    ones to one prompt, by version."""

    seen: set[str] = field(default_factory=set)
    mixed: list[str] = field(default_factory=list)
    answers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def follow(run: PodRun, log: Path, *arguments: str) -> Followed:
    """Trains ``run`` while a server follows it, which is killed when clients have seen two of its versions, and the run goes on."""
    training = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", "--run.name=run", *arguments)
    while not (run.directory / "config.yaml").exists():
        time.sleep(0.1)
    with log.open("wb") as sink:
        command = [sys.executable, "-m", "tandem.cli.main", "serve", str(run.directory), "--follow", "--port", "0", "--threads", "1"]
        server = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=log.parent, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = Followed()
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            text = log.read_text()
            if "http://" not in text:
                time.sleep(0.1)
                continue
            body = {"prompt": "3 1 2", "max_tokens": 4, "temperature": 0}
            try:
                answer = httpx.post(f"http://{text.split('http://')[1].split()[0]}/v1/completions", json=body, timeout=30)
            except httpx.HTTPError:
                time.sleep(0.1)
                continue
            if answer.status_code != 200:
                time.sleep(0.1)
            else:
                found.seen.add(answer.headers[HEADER])
                versions = answer.json()["weight_versions"]
                found.mixed.extend([] if len(versions) == 1 else [str(versions)])
                found.answers[answer.headers[HEADER]].add(answer.json()["choices"][0]["text"])

    client = threading.Thread(target=ask)
    client.start()
    try:
        # The run is short: its controller pauses until the server answers.
        while not (run.directory / "sft" / "model").is_dir() and training.poll() is None:
            time.sleep(0.02)
        training.send_signal(signal.SIGSTOP)
        while not found.seen and server.poll() is None:
            time.sleep(0.05)
        training.send_signal(signal.SIGCONT)
        # Two versions of the run, then the server is killed while the run goes on.
        while len(found.seen - {"0.0"}) < 2 and training.poll() is None:
            time.sleep(0.05)
        server.send_signal(signal.SIGKILL)
        server.wait()
    finally:
        ended.set()
        client.join()
        server.kill()
    done = finish(training)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(found.seen - {"0.0"}) >= 2 and found.mixed == [], (found, log.read_text()[-2000:])
    assert all(len(texts) == 1 for texts in found.answers.values()), "one version answered in two ways"
    return found


@pytest.mark.full
def test_clients_get_each_version_and_change_no_bit_and_nor_does_a_killed_server(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path / "run")
    follow(run, tmp_path / "serve.log")
    assert difference(run, undisturbed) == [] and run.events("recovery") == [] and run.left_behind() == []
