"""Emitted topologies start: engines behind gateways and Envoy from one machine's script and as a job of a real Slurm, and the head node's script."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import yaml
from data_runs import rows
from etcd_server import program
from launched_runs import LaunchedRuns
from ray_cluster import SERVE_PACKAGES, RayCluster, descendants
from runs_on_data import write_recipe
from slurm_cluster import SlurmCluster

from tandem.cluster.etcd_process import etcd_program

pytestmark = pytest.mark.full
BIN = Path(sys.executable).parent
LIMIT_S = 240.0
MODEL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model, as the emitted commands are given it."""
    from tandem.config.model import NewModelConfig
    from tandem.model.create_model import create_model

    folder = tmp_path / "small"
    create_model(NewModelConfig(**MODEL), 0, folder)
    return folder


def free_ports(count: int) -> int:
    """Returns the first of ``count`` free ports, one after the other."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                for number in range(1, count):
                    stack.enter_context(socket.socket()).bind(("", port + number))
            except OSError:
                continue
            return int(port)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(folder), "OMP_NUM_THREADS": "1", **more}


def tandem(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run([BIN / "tandem", *map(str, arguments)], cwd=folder, capture_output=True, text=True, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    ends = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends, what()
        time.sleep(0.2)


@contextlib.contextmanager
def started(script: Path, folder: Path, **more: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a script in a process group of its own, and kills what is left of it."""
    with (folder / "script.out").open("wb") as out:
        process = subprocess.Popen([script], stdout=out, stderr=out, env=environment(folder, **more), start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answered(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        body = {"model": "small", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    return False


def ready_engines(url: str) -> int:
    with contextlib.suppress(httpx.TransportError):
        text = httpx.get(f"{url}/metrics", timeout=10).text
        return len(re.findall(r"^tandem_gateway_backend_ready\{.*\} 1\.0$", text, re.MULTILINE))
    return 0


def logs(folder: Path) -> str:
    found: Sequence[Path] = [path for path in (folder / "script.out", *sorted((folder / "logs").glob("*.out"))) if path.exists()]
    return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in found)


def processes_of(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cwd").readlink() == folder and int(path.name) != os.getpid():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_one_machines_script_serves_survives_a_killed_engine_and_ends_whole(tmp_path: Path, model: Path) -> None:
    port = free_ports(5)
    tandem(
        tmp_path, "emit", "--topology", "inference", "--on", "local", "--folder", "out", "--model", model, "--tensor-parallel", "1", "--instances", "2",
        "--gpus-per-node", "0", "--cpus-per-gpu", "1", "--port", port,
    )  # fmt: skip
    folder = tmp_path / "out"
    with started(folder / "start.sh", folder) as process:
        gateways = [f"http://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port + 2}"]
        until(lambda: all(ready_engines(url) == 2 for url in gateways), lambda: logs(folder))
        assert all(answered(url) for url in gateways), logs(folder)
        if shutil.which("envoy", path=environment(folder)["PATH"]) is not None:
            until(lambda: answered(f"http://127.0.0.1:{port}"), lambda: logs(folder))
        # Engines answer gateways alone, which have their key.
        assert httpx.post(f"http://127.0.0.1:{port + 3}/v1/completions", json={"model": "small", "prompt": [1]}).status_code == 401
        assert (folder / "engine.key").stat().st_mode & 0o077 == 0
        victims = [line.split()[0] for line in _listed(folder) if f"--port={port + 3}" in line and "keep.sh" not in line]
        os.kill(int(victims[0]), signal.SIGKILL)
        until(lambda: ready_engines(gateways[0]) == 1, lambda: logs(folder))
        assert answered(gateways[0])
        until(lambda: ready_engines(gateways[0]) == 2, lambda: logs(folder))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    until(lambda: not processes_of(folder), lambda: str(processes_of(folder)))


def _listed(folder: Path) -> list[str]:
    """Returns the id and the command line of each process in ``folder``, those that were started first before others."""
    found = []
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
        with contextlib.suppress(OSError):
            if (path / "cwd").readlink() == folder:
                found.append(f"{path.name} {(path / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')}")
    return found


def test_the_job_of_slurm_is_taken_serves_over_two_nodes_and_leaves_nothing(slurm_cluster: SlurmCluster, tmp_path: Path, model: Path) -> None:
    port = free_ports(5)
    tandem(
        tmp_path, "emit", "--topology", "inference", "--on", "slurm", "--folder", "out", "--model", model, "--tensor-parallel", "1", "--instances", "2",
        "--gpus-per-node", "0", "--cpus-per-gpu", "1", "--port", port, "--partition", "main",
    )  # fmt: skip
    folder, batch = tmp_path / "out", tmp_path / "out" / "inference.sbatch"
    inside = environment(folder, **{**slurm_cluster.environment, "PATH": f"{BIN}:{slurm_cluster.environment['PATH']}"})
    tested = subprocess.run(["sbatch", "--test-only", batch], env=inside, capture_output=True, text=True)
    assert tested.returncode == 0 and "Job" in tested.stderr, tested.stderr
    try:
        job = subprocess.run(["sbatch", "--parsable", batch], env=inside, capture_output=True, text=True, check=True).stdout.strip()
        for number in range(2):
            until(lambda number=number: (folder / "jobs" / job / f"gateway-{number}.yaml").exists(), lambda: logs(folder))
            urls = [each["url"] for each in yaml.safe_load((folder / "jobs" / job / f"gateway-{number}.yaml").read_text())["backends"]]
            assert urls == [f"http://127.0.0.1:{port + 3}", f"http://127.0.0.1:{port + 4}"]
        gateways = [f"http://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port + 2}"]
        until(lambda: all(ready_engines(url) == 2 for url in gateways), lambda: logs(folder))
        assert all(answered(url) for url in gateways), logs(folder)
        assert slurm_cluster.ask("squeue", "-h", "-j", job, "-o", "%N") == "n[1-2]"
        steps = slurm_cluster.ask("squeue", "-h", "-s", "-j", job, "-o", "%N").split()
        assert steps.count("n2") >= 2, steps
        slurm_cluster.ask("scancel", "--batch", "--signal=TERM", job)
        until(lambda: not slurm_cluster.ask("squeue", "-h", "-j", job, "-o", "%i"), lambda: logs(folder))
    finally:
        slurm_cluster.clear()
    until(lambda: not processes_of(folder), lambda: str(processes_of(folder)))


def test_slurm_takes_the_preflight_of_the_emitted_nodes_and_it_measures_them(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    tandem(
        tmp_path, "emit", "--topology", "training", "--on", "slurm", "--folder", "out", "--gpu-nodes", "n1,n2", "--gpus-per-node", "0", "--partition", "main",
        "--shared", tmp_path,
    )  # fmt: skip
    (tmp_path / "logs").mkdir()
    inside = environment(tmp_path, **{**slurm_cluster.environment, "PATH": f"{BIN}:{slurm_cluster.environment['PATH']}"})
    try:
        submit = ["sbatch", "--parsable", tmp_path / "out" / "preflight.sbatch"]
        job = subprocess.run(submit, env=inside, capture_output=True, text=True, check=True).stdout.strip()
        until(lambda: not slurm_cluster.ask("squeue", "-h", "-j", job, "-o", "%i"), lambda: (tmp_path / "logs" / f"preflight-{job}.out").read_text())
    finally:
        slurm_cluster.clear()
    said = (tmp_path / "logs" / f"preflight-{job}.out").read_text()
    assert sorted(path.name for path in (tmp_path / "logs" / f"preflight-{job}").iterdir()) == ["n1.json", "n2.json"], said
    # Both nodes of the test are this machine, which the comparison finds out by its name.
    assert said == f"tandem: node '{socket.gethostname()}' is 2 times in the list of nodes; name each once\n"


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in SERVE_PACKAGES), reason="'ray[serve]' is not installed, so engines on Ray are NOT tested"
)
def test_engines_on_ray_serve_from_two_nodes_and_move_when_one_is_killed(tmp_path: Path, model: Path) -> None:
    port = free_ports(4)
    tandem(
        tmp_path, "emit", "--topology", "inference", "--on", "ray", "--folder", "out", "--model", model, "--tensor-parallel", "1", "--instances", "2",
        "--gpus-per-node", "0", "--cpus-per-gpu", "1", "--port", port,
    )  # fmt: skip
    folder, cluster = tmp_path / "out", RayCluster("127.0.0.1").start()

    def engines_on(*nodes: str) -> list[int]:
        """Returns how many engines each of the nodes has."""
        for name in nodes:
            # A node that does not start in time on a busy machine ends.
            if cluster.processes[name].poll() is not None:
                cluster.add(name)
        counts = []
        for name in nodes:
            words = [Path(f"/proc/{pid}/cmdline") for pid in descendants(cluster.processes[name].pid)]
            counts.append(sum(b"--served-model-name" in path.read_bytes().split(b"\0") for path in words if path.exists()))
        return counts

    gateways = [f"http://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port + 2}"]
    try:
        for name in ("one", "two"):
            cluster.add(name)
        with started(folder / "start.sh", folder, RAY_ADDRESS=cluster.address, **cluster.environment) as process:
            until(lambda: "2 replicas run" in logs(folder) and all(ready_engines(url) == 1 for url in gateways), lambda: logs(folder))
            assert engines_on("one", "two") == [1, 1] and all(answered(url) for url in gateways), logs(folder)
            # Both name themselves to Prometheus, under the address of their node.
            names = [json.loads(path.read_text())[0] for path in (folder / "targets").glob("*.json")]
            assert sum(each["labels"]["job"] == "server" for each in names) == 2, names
            cluster.kill("two")
            until(lambda: answered(gateways[0]), lambda: logs(folder))
            assert engines_on("one") == [1]
            cluster.add("three")
            until(lambda: engines_on("one", "three") == [1, 1] and "2 replicas run" in logs(folder).rpartition("1 replicas run")[2], lambda: logs(folder))
            assert all(answered(url) for url in gateways), logs(folder)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0, logs(folder)
            until(lambda: engines_on("one", "three") == [0, 0], lambda: logs(folder))
    finally:
        cluster.stop()
    until(lambda: not processes_of(folder), lambda: str(processes_of(folder)))


@pytest.mark.skipif(program() is None or shutil.which("prometheus") is None, reason="etcd or Prometheus is not installed, so the head node is NOT tested")
def test_the_head_node_has_an_etcd_that_asks_for_a_password_and_a_prometheus_and_starts_again_with_both(tmp_path: Path) -> None:
    shared, ports = tmp_path / "shared", free_ports(4)
    tandem(tmp_path, "emit", "--topology", "training", "--on", "slurm", "--folder", "out", "--shared", shared, "--head", "localhost")
    script = tmp_path / "out" / "head.sh"
    # The ports of the figure are taken on a machine with other tests.
    text = script.read_text().replace("2379", str(ports)).replace("2380", str(ports + 1))
    script.write_text(text)
    binary, control = etcd_program(), etcd_program("etcdctl")
    assert binary is not None and control is not None
    path = f"{Path(binary).parent}:{BIN}:{os.environ['PATH']}"
    more = {"PATH": path, "TANDEM_ETCD_DATA": str(tmp_path / "etcd"), "UP_OPTIONS": f"--port {ports + 2} --alertmanager-port {ports + 3}"}
    folder = tmp_path / "out"

    def ask(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [control, f"--endpoints=http://127.0.0.1:{ports}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ETCDCTL_API": "3"})

    for _ in range(2):
        with started(script, folder, **more) as process:
            password = shared / "head" / "etcd.password"
            until(password.exists, lambda: logs(folder) + logs(shared))
            secret = password.read_text()
            assert password.stat().st_mode & 0o077 == 0
            until(lambda secret=secret: ask(f"--user=tandem:{secret}", "put", "/tandem/x", "1").returncode == 0, lambda: logs(folder))
            assert "permission denied" in ask(f"--user=tandem:{secret}", "put", "/other", "1").stderr
            assert "user name is empty" in ask("put", "/tandem/x", "1").stderr
            with httpx.Client(timeout=10) as client:

                def is_ready(client: httpx.Client = client) -> bool:
                    with contextlib.suppress(httpx.TransportError):
                        return client.get(f"http://127.0.0.1:{ports + 2}/-/ready").status_code == 200
                    return False

                until(is_ready, lambda: logs(folder) + logs(shared))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, logs(folder)


@pytest.mark.skipif(program() is None or shutil.which("prometheus") is None, reason="etcd or Prometheus is not installed, so the emitted run is NOT started")
def test_the_emitted_run_on_data_trains_on_both_nodes_of_slurm_through_the_etcd_of_the_head_node(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    shared, ports, runs = tmp_path / "shared", free_ports(4), LaunchedRuns(tmp_path, slurm_cluster.environment)
    recipe = write_recipe(runs, 12)
    tandem(
        tmp_path, "emit", "--topology", "training", "--on", "slurm", "--folder", "out", "--recipe", recipe, "--gpu-nodes", "n1,n2", "--gpus-per-node", "0",
        "--partition", "main", "--shared", shared, "--head", "localhost",
    )  # fmt: skip
    folder = tmp_path / "out"
    # The ports of the figure are taken on a machine with other tests, and the shared folder of one storage node is not mounted.
    for name in ("head.sh", "recipe.yaml"):
        (folder / name).write_text((folder / name).read_text().replace("2379", str(ports)).replace("2380", str(ports + 1)))
    binary = etcd_program()
    assert binary is not None
    path = f"{Path(binary).parent}:{BIN}:{slurm_cluster.environment['PATH']}"
    more = {"PATH": path, "TANDEM_ETCD_DATA": str(tmp_path / "etcd"), "UP_OPTIONS": f"--port {ports + 2} --alertmanager-port {ports + 3}"}
    try:
        with started(folder / "head.sh", folder, **more):
            until((shared / "head" / "etcd.password").exists, lambda: logs(folder) + logs(shared))
            given = {**environment(tmp_path), **slurm_cluster.environment, "PATH": path}
            one_machine = ["--run.name=two", "--metrics.host=127.0.0.1", "--cluster.min_speed=0"]
            done = subprocess.run([folder / "submit.sh", *one_machine], env=given, capture_output=True, text=True)
            assert done.returncode == 0 and "submitted job" in done.stdout, done.stdout + done.stderr
            run = shared / "runs" / "two"
            until(lambda: not slurm_cluster.ask("squeue", "-h", "-o", "%i"), lambda: logs(run))
    finally:
        slurm_cluster.clear()
    assert "trains with rank 1" in logs(run) and "preflight" not in logs(run)
    runs.tandem("train", recipe, "--run.name=local", "--parallel.data=2")
    assert rows(run) == rows(runs.directory("local"))
    assert (run / "model" / "model.safetensors").read_bytes() == (runs.directory("local") / "model" / "model.safetensors").read_bytes()
    assert [path.name for path in (shared / "checkpoints").iterdir()] != []
