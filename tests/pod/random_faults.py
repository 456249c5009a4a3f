"""Random faults in a run of four pods on machines of their own, and what became of it. ``benchmarks/pod_faults.py`` writes their table."""

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from four_pods import STEPS, FourPods
from pod_runs import PodRun, difference

from tandem.runtime.records.journal import Journal
from tandem.types import Sample

EACH = 5
"""Faults in one run."""
_SECONDS = (1.0, 9.0)
"""How long a fault lasts: shorter and longer than leases and heartbeats."""
_CLOCK_S = 7200.0
_SLOW_KBIT_S = 256


@dataclass(frozen=True, slots=True)
class Setup:
    """How the runs of a kind are set up: ``name`` in words, ``settings`` of the undisturbed run too, and those of ``pods``, which must change no bit."""

    name: str
    settings: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()


_BF16 = ("--trainer.dtype=bfloat16", "--trainer.learning_rate=1e-5")
_DELTAS = ("--pods.elementwise_deltas=true", "--pods.full_update_every=5", "--pods.peer_to_peer=true")
SETUPS = (
    Setup("one trainer"),
    Setup("ranks of the trainer in two pods", ("--parallel.data=2",), ("--pods.trainer_count=2",)),
    Setup("bf16, element-wise deltas from pod to pod", _BF16, _DELTAS),
    Setup("two engines a pod, without a copy", ("--rollout.weights=shared",), ("--rollout.workers=2",)),
)


@dataclass(frozen=True, slots=True)
class PodFault:
    """One fault: its ``kind``, what it struck, when (the steps that were taken) and for how long; by how many steps the run went on while it lasted and
    how its command ``ended`` before the next fault, if it did: then the run was resumed. ``recovered_s``: from the beginning of the fault until the run had
    taken a step more than ever before, its repetition of earlier ones included."""

    kind: str
    where: str
    step: int
    seconds: float
    went_on: int
    ended: str = ""
    recovered_s: float | None = None


@dataclass(frozen=True, slots=True)
class FaultyRun:
    """A run with ``faults``, in which this was ``wrong`` (empty: nothing). ``recoveries``: by what was replaced or left out; ``seconds``: of the whole run;
    ``setup``: the name of its ``Setup``."""

    seed: int
    faults: tuple[PodFault, ...]
    wrong: tuple[str, ...]
    recoveries: dict[str, int]
    seconds: float
    setup: str = SETUPS[0].name


class StepTimes:
    """Follows a run and notes when it took each step first."""

    def __init__(self, four: FourPods) -> None:
        self._four, self._at_s, self._ended = four, [time.monotonic()], threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def steps(self) -> int:
        """The most steps that the run had taken at any time."""
        return len(self._at_s) - 1

    def at_s(self, step: int) -> float:
        """Returns the monotonic seconds at which the run had taken ``step`` steps first. Waits until it has."""
        while self.steps < step and self._thread.is_alive():
            time.sleep(0.01)
        return self._at_s[step]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(0.02):
            now, rows = time.monotonic(), self._four.rows()
            self._at_s += [now] * (rows - self.steps)


Fault = Callable[[FourPods, random.Random, float], str]
"""(the run, random numbers, how long) -> what was struck. Returns when the fault is over."""


def kill_process(four: FourPods, rng: random.Random, seconds: float) -> str:
    """Kills one process of the run, of a pod, or etcd."""
    who = rng.choice(["run", "run", *four.pods, "etcd"])
    if who == "etcd":
        four.etcd.kill()
        time.sleep(min(seconds, 3.0))
        four.etcd.start()
        return "etcd"
    processes = _processes(four, who)
    if not processes:
        return f"nothing of {who}: it had ended"
    pid = rng.choice(sorted(processes))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return f"{_role(processes[pid])} of {who}"


def kill_machine(four: FourPods, rng: random.Random, seconds: float) -> str:
    """Kills all processes of a pod, or of the run's machine."""
    who = rng.choice(["run", *four.pods])
    for pid in _processes(four, who):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return f"all processes of {who}"


def cut_controller(four: FourPods, rng: random.Random, seconds: float) -> str:
    return _cut(four, rng.choice(list(four.pods)), "controller", seconds)


def cut_trainer(four: FourPods, rng: random.Random, seconds: float) -> str:
    return _cut(four, rng.choice(list(four.pods)), "trainer", seconds)


def cut_etcd(four: FourPods, rng: random.Random, seconds: float) -> str:
    return _cut(four, rng.choice([*four.pods, "run"]), "etcd", seconds)


def unplug(four: FourPods, rng: random.Random, seconds: float) -> str:
    """Pulls the wire of a pod."""
    who = rng.choice(list(four.pods))
    four.hosts[who].plug(False)
    time.sleep(seconds)
    four.hosts[who].plug(True)
    return f"{who} from all"


def fill_shared_memory(four: FourPods, rng: random.Random, seconds: float) -> str:
    """Fills the shared memory of a machine, and kills the one who has some there, so that it must be asked for again."""
    who = rng.choice(["run", *four.pods])
    processes = _processes(four, who)
    owners = sorted(pid for pid, line in processes.items() if "joining_shim" in line or "--role trainer" in line)
    inside = next((Path(f"/proc/{pid}/root/dev/shm") for pid in sorted(processes) if "cli.main" in processes[pid]), None)
    if inside is None or not owners:
        return f"nothing of {who}: it had ended"
    with contextlib.suppress(ProcessLookupError):
        os.kill(owners[0], signal.SIGKILL)
    _fill(inside, seconds)
    return f"{who}, and its shim was killed"


def fill_disk(four: FourPods, rng: random.Random, seconds: float) -> str:
    who = rng.choice(list(four.disks))
    _fill(four.disks[who], min(seconds, 5.0))
    return f"that of {'the run' if who == 'run' else 'the pods'}"


def jump_clock(four: FourPods, rng: random.Random, seconds: float) -> str:
    """Sets the wall clocks two hours ahead or back, and right again."""
    shift = rng.choice([-_CLOCK_S, _CLOCK_S])
    four.jump(shift)
    time.sleep(seconds)
    four.jump(0)
    return f"{shift / 3600:+.0f} h"


def slow_peer(four: FourPods, rng: random.Random, seconds: float) -> str:
    """Lets everything that leaves a machine through slowly."""
    who, host = rng.choice([*four.hosts.items(), ("run", four.home)])
    host.slow_down(_SLOW_KBIT_S)
    time.sleep(seconds)
    host.slow_down(0)
    return f"{who} sends at {_SLOW_KBIT_S} kbit/s"


def stop_process(four: FourPods, rng: random.Random, seconds: float) -> str:
    """Stops a process (SIGSTOP), and continues it."""
    who = rng.choice(["run", *four.pods])
    processes = _processes(four, who)
    if not processes:
        return f"nothing of {who}: it had ended"
    pid = rng.choice(sorted(processes))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    return f"{_role(processes[pid])} of {who}"


KINDS: dict[str, Fault] = {
    "kill a process": kill_process,
    "kill a machine": kill_machine,
    "cut pod - controller": cut_controller,
    "cut pod - trainer": cut_trainer,
    "cut - etcd": cut_etcd,
    "pull a pod's wire": unplug,
    "full shared memory": fill_shared_memory,
    "full disk": fill_disk,
    "clock jump": jump_clock,
    "slow peer": slow_peer,
    "stop a process": stop_process,
}


def faulty_run(quiet: PodRun, folder: Path, seed: int, steps: int = STEPS, count: int = EACH, setup: Setup = SETUPS[0]) -> FaultyRun:
    """Makes ``count`` faults that ``seed`` draws in a run of four pods with ``setup`` in ``folder``, which is removed if nothing is wrong. ``quiet``: the
    undisturbed run."""
    rng, began, faults, wrong = random.Random(f"pod faults {seed}"), time.monotonic(), list[PodFault](), list[str]()
    names = list(KINDS)
    # Every kind is struck about equally often, whatever the seeds are.
    kinds = [names[(seed * count + place) % len(names)] for place in range(count)]
    rng.shuffle(kinds)
    at_steps = sorted(rng.sample(range(steps - 2), count))
    four = FourPods(folder, steps, (*setup.settings, *setup.pods))
    times = StepTimes(four)
    try:
        four.start()
        for kind, at_step, after in zip(kinds, at_steps, [*at_steps[1:], steps], strict=True):
            four.wait_for_step(at_step)
            time.sleep(rng.uniform(0.0, 0.5))
            step, seconds, before = four.rows(), rng.uniform(*_SECONDS), len(four.ends)
            struck_s, most = time.monotonic(), times.steps
            where = KINDS[kind](four, rng, seconds)
            went_on = four.rows() - step
            four.wait_for_step(max(after, most + 1))
            # One that strikes after the last step is followed by none.
            recovered_s = round(times.at_s(most + 1) - struck_s, 1) if most < steps else None
            faults.append(PodFault(kind, where, step, round(seconds, 1), went_on, "; ".join(four.ends[before:]), recovered_s))
            print(f"seed {seed}: {faults[-1]}", flush=True)
        four.wait()
        wrong += difference(four.run, quiet)
        wrong += counts(four.run, quiet)
        wrong += [f"left behind: {what}" for what in four.left_behind()]
        recoveries = Counter(str(event.detail.get("part")) for event in four.run.events("recovery"))
    except (TimeoutError, AssertionError) as error:
        wrong.append(str(error))
        recoveries = Counter()
    finally:
        times.close()
        if wrong:
            shutil.copytree(folder, folder.with_name(f"{folder.name}-wrong"), dirs_exist_ok=True, ignore_dangling_symlinks=True)
        four.close()
    if not wrong:
        shutil.rmtree(folder)
    return FaultyRun(seed, tuple(faults), tuple(wrong), dict(recoveries), round(time.monotonic() - began, 1), setup.name)


def check_undisturbed(four: FourPods, quiet: PodRun) -> None:
    """Waits until the run is over, and compares it with the undisturbed one."""
    four.wait()
    assert difference(four.run, quiet) == [] and counts(four.run, quiet) == [] and four.left_behind() == []


def counts(run: PodRun, quiet: PodRun) -> list[str]:
    """Returns what is wrong with the samples of ``run``: each step has those of the undisturbed run, each once."""
    wrong = []
    with Journal(run.directory / "journal.sqlite", read_only=True) as found, Journal(quiet.directory / "journal.sqlite", read_only=True) as expected:
        if found.journalled_steps() != expected.journalled_steps():
            wrong.append(f"samples of the steps {found.journalled_steps()}")
        for step in expected.journalled_steps():
            if list(map(_drawn, found.samples(step) or [])) != list(map(_drawn, expected.samples(step) or [])):
                wrong.append(f"samples of step {step}")
    return wrong


def _drawn(sample: Sample) -> tuple[object, ...]:
    """What was drawn: everything of a sample but the version's incarnation, which counts the trainer's lives."""
    return sample.id, sample.prompt_id, sample.index, sample.token_ids, sample.logprobs


def _cut(four: FourPods, who: str, other: str, seconds: float) -> str:
    host = four.home if who == "run" else four.hosts[who]
    address = {"controller": four.home.addresses[0], "trainer": four.home.addresses[1], "etcd": four.etcd_host.address}[other]
    host.cut(address)
    time.sleep(seconds)
    host.heal(address)
    return f"{who} - {other}"


def _processes(four: FourPods, who: str) -> dict[int, str]:
    run = four.run if who == "run" else four.pods[who]
    return {pid: line for pid, line in run.processes().items() if "tandem" in line}


def _fill(folder: Path, seconds: float) -> None:
    """Fills the file system of ``folder`` for a while."""
    filler = folder / "filler"
    ends = time.monotonic() + seconds
    try:
        with filler.open("wb", buffering=0) as file:
            while time.monotonic() < ends:
                try:
                    file.write(bytes(2**16))
                except OSError:
                    with contextlib.suppress(OSError):
                        file.write(bytes(64))
                    time.sleep(0.05)
    finally:
        filler.unlink(missing_ok=True)


def _role(command: str) -> str:
    names = {
        "tandem.pod.trainer_worker": "trainer's worker", "tandem.pod.rollout_worker": "rollout worker", "--role trainer": "trainer's shim",
        "--role rollout": "rollout shim", "joining_shim": "rollout shim", "rewards.worker": "reward worker", "cli.main pod": "agent (tandem pod)",
        "cli.main": "controller",
    }  # fmt: skip
    return next((name for part, name in names.items() if part in command), "a helper process")


def rows_of(runs: Sequence[FaultyRun]) -> list[str]:
    """Returns a Markdown table of the faults of ``runs`` by kind and place."""
    lines = ["| seed | fault | where | after step | for s | s to the next step | steps meanwhile | the command | wrong |", 9 * "|---" + "|"]
    for run in runs:
        for fault in run.faults:
            wrong = "; ".join(run.wrong).replace("|", "/")[:200] or "nothing"
            recovered = "" if fault.recovered_s is None else f"{fault.recovered_s:.1f}"
            lines.append(
                f"| {run.seed} | {fault.kind} | {fault.where} | {fault.step} | {fault.seconds:.1f} | {recovered} | {fault.went_on} | "
                f"{fault.ended or 'went on'} | {wrong} |"
            )
    return lines
