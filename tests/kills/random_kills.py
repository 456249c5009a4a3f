"""Kills of random processes at random milliseconds, from the start of the command on, and what became of the run or of the server."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from pod_runs import PodRun, difference, finish

from tandem.runtime.records.journal import Journal
from tandem.types import RunError

TREE_SHARE = 0.25
"""The share of kills that strike all processes at once."""
PROMPT = {"prompt": "345=", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: when, of what and in which phase; how it ``ended`` and what was ``wrong`` with the result (empty: nothing)."""

    at_s: float
    victim: str
    phase: str
    ended: str
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A run to kill. ``quiet``: the same one undisturbed, which took ``seconds``."""

    quiet: PodRun
    settings: tuple[str, ...]
    seconds: float

    @classmethod
    def of(cls, quiet: PodRun, *settings: str) -> "Job":
        began = time.monotonic()
        done = quiet.train(*settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return cls(quiet, settings, time.monotonic() - began)


def kill_job(job: Job, folder: Path, rng: random.Random) -> Kill:
    """Trains in ``folder``, kills at a random time, resumes until the run ends, and compares it with the undisturbed one."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    run = PodRun(folder, recipe=job.quiet.recipe, environment={"TMPDIR": str(temporary)})
    train = ("train", str(run.recipe), f"--run.directory={folder}", f"--run.name={run.name}", *job.settings)
    command, at_s = run.begin(*train), rng.uniform(0.0, job.seconds)
    time.sleep(at_s)
    victim = _kill(run, command, rng)
    phase = _phase(run.directory)
    done = finish(command)
    ended, wrong = _ended(done), _faults_of(done, victim)
    for _ in range(3):
        if done.returncode == 0:
            break
        if (run.directory / "config.yaml").exists():
            ended += ", then resumed"
            done = run.resume()
        else:
            ended += ", then started anew"
            shutil.rmtree(run.directory, ignore_errors=True)
            done = finish(run.begin(*train))
        wrong += _faults_of(done, "")
    wrong += ["the run did not end"] if done.returncode else difference(run, job.quiet)
    wrong += [f"left behind: {what}" for what in (*run.left_behind(), *(path.name for path in temporary.iterdir()))]
    return Kill(at_s, victim, phase, ended, tuple(wrong))


def kill_server(model: Path, folder: Path, text: str, seconds: float, rng: random.Random) -> Kill:
    """Serves ``model``, kills at a random time within ``seconds`` while requests come in, and asks again once the server is ready. One that has
    ended is started again at once on the same port. Every answer must be ``text``."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    run = PodRun(folder, environment={"TMPDIR": str(temporary)})
    port, wrong = _free_port(), []
    server, at_s = _serve(run, model, port), rng.uniform(0.0, seconds)
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + at_s
    phase = "start"
    with httpx.Client(timeout=LIMIT_S) as client:
        while time.monotonic() < ends:
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/readiness").status_code == 200:
                    phase = "serving"
                    wrong += _answer(client, url, text)
            time.sleep(0.02)
        victim = _kill(run, server, rng)
        ended = "replaced its engine"
        if victim in ("all processes", "serve"):
            ended = "started again on the same port"
            finish(server)
            server = _serve(run, model, port)
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            if server.poll() is not None:
                wrong.append(f"the server ended: {finish(server).stderr[-300:]}")
                break
            with contextlib.suppress(httpx.TransportError):
                # Right after the kill the server may not know of it yet; the request then moves to the next engine.
                if client.get(f"{url}/readiness").status_code == 200:
                    wrong += _answer(client, url, text)
                    break
            time.sleep(0.02)
        else:
            wrong.append("it did not serve again")
    server.send_signal(signal.SIGTERM)
    wrong += [f"the server's exit status is {status}" for status in [finish(server).returncode] if status]
    wrong += [f"left behind: {what}" for what in (*run.left_behind(), *(path.name for path in temporary.iterdir()))]
    return Kill(at_s, victim, phase, ended, tuple(wrong))


def _serve(run: PodRun, model: Path, port: int) -> "subprocess.Popen[str]":
    return run.begin("serve", str(model), "--port", str(port), "--threads", "1")


def _answer(client: httpx.Client, url: str, text: str) -> list[str]:
    response = client.post(f"{url}/v1/completions", json=PROMPT)
    if response.status_code != 200:
        return [f"status {response.status_code}: {response.text[:200]}"]
    found = response.json()["choices"][0]["text"]
    return [] if found == text else [f"another completion: {found!r}"]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _kill(run: PodRun, leader: "subprocess.Popen[str]", rng: random.Random) -> str:
    """Kills all processes of ``run``, whose first one is ``leader``, or one of them; returns which."""
    tree, is_tree = run.processes(), rng.random() < TREE_SHARE
    if leader.poll() is not None:
        return "nothing, it had ended"
    if is_tree or not tree:
        # The leader last, so that the others are struck and do not only die with it.
        for pid in [*(pid for pid in tree if pid != leader.pid), leader.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "all processes"
    pid = rng.choice(sorted(tree))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return _role(tree[pid])


def _role(command: str) -> str:
    """Returns the name of a process by its command line."""
    names = {
        "tandem.pod.trainer_worker": "trainer rank", "tandem.pod.rollout_worker": "rollout worker", "--role trainer": "trainer shim",
        "--role rollout": "rollout shim", "tandem.jobs.data_run.data_rank": "rank", "tandem.rl.rewards.worker": "reward worker",
        "engine_process": "engine", "tandem.cli.main train": "controller", "tandem.cli.main serve": "serve",
    }  # fmt: skip
    return next((name for part, name in names.items() if part in command), "a helper process")


def _phase(directory: Path) -> str:
    """Returns the newest state in the journal of the run, or ``start``."""
    for folder, stage in ((directory, ""), (directory / "sft", "sft: ")):
        with contextlib.suppress(RunError, OSError), Journal(folder / "journal.sqlite", read_only=True) as journal:
            if transitions := journal.transitions():
                return stage + transitions[-1].state
    return "start"


def _ended(done: "subprocess.CompletedProcess[str]") -> str:
    return {0: "by itself", -signal.SIGKILL: "killed"}.get(done.returncode, f"exit status {done.returncode}: {_last_line(done)}")


def _faults_of(done: "subprocess.CompletedProcess[str]", victim: str) -> list[str]:
    """Returns what is wrong with the end of a command; one that was killed itself may say nothing."""
    said = done.stdout + done.stderr
    if "Traceback" in said:
        return [f"a traceback: {said[-500:]}"]
    is_known = done.returncode in (0, -signal.SIGKILL) or victim in ("controller", "all processes")
    return [] if is_known or done.stderr.strip().splitlines()[-1:] else [f"exit status {done.returncode} without a word"]


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    return (done.stderr.strip().splitlines() or [""])[-1]


def kill_one(one: Callable[[Path, random.Random], Kill], folder: Path, seed: int, number: int) -> Kill:
    """Returns kill ``number`` of ``seed``, made in a folder of its own under ``folder``, which is removed if nothing is wrong."""
    place = folder / f"kill-{seed}-{number}"
    kill = one(place, random.Random(f"{seed} {number}"))
    print(f"{place.name}: {kill}", flush=True)
    if not kill.wrong:
        shutil.rmtree(place)
    return kill


def table(kills: Sequence[Kill]) -> list[str]:
    """Returns a Markdown table of ``kills`` by phase, victim and end."""
    counts = Counter((kill.phase, kill.victim, kill.ended, "; ".join(kill.wrong) or "nothing") for kill in kills)
    rows = [f"| {phase} | {victim} | {ended} | {wrong} | {count} |" for (phase, victim, ended, wrong), count in sorted(counts.items())]
    return ["| phase | killed | ended | wrong | kills |", "|---|---|---|---|---|", *rows]

