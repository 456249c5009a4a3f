"""What the containers of a JobSet run, as processes of this machine with the files and the Secret that the launcher has made: a run over two of
them has the bits of one machine, also where its first pod is replaced. Kubernetes itself is not here."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_api import RecordedApi, recorded_api
from launched_runs import LaunchedRuns, left_behind
from pod_runs import RECIPE, PodRun, difference
from ray_cluster import descendants
from runs_on_data import MESH, assert_equal_to_local, write_recipe

from tandem.cluster.launch.kubernetes.in_pod import ADDRESS, NAME
from tandem.runtime.records.checkpoint_tiers import tiers_of
from tandem.runtime.records.journal import Journal
from tandem.trainer.checkpoint.memory.launched_keepers import FOLDER as KEEPERS

pytestmark = pytest.mark.full
Here = Callable[..., str]
START = "import sys; from pathlib import Path; from tandem.cluster.launch.kubernetes.{0} import main; sys.exit(main([sys.argv[1]], Path(sys.argv[2])))"
SAVED = 75


class Containers:
    """Starts the containers of the run ``two`` in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.directory, self._secrets = folder / "runs" / "two", folder / "mounted"
        self._started: list[subprocess.Popen[bytes]] = []

    def mount(self, values: dict[str, str]) -> None:
        self._secrets.mkdir()
        for name, value in values.items():
            (self._secrets / name).write_text(value)
            # As a Secret is mounted with fsGroup.
            (self._secrets / name).chmod(0o440)

    def start(self, part: str, address: str = "127.0.0.1") -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", START.format(part), str(self.directory), str(self._secrets)]
        environment = {**os.environ, ADDRESS: address, NAME: "node-0", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=self.directory.parents[1], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def containers(here: Here, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Containers]]:
    found = Containers(tmp_path)
    LaunchedRuns(tmp_path)

    def place(*more: str, recipe: Path = RECIPE) -> Containers:
        with recorded_api(tmp_path_factory.mktemp("api")) as api:
            monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
            api.expect("claim", "nodes", "jobset-dry-run", "secret-dry-run", "policy-dry-run", "jobset-create", "secret-create", "policy-create")
            keys = ("image=127.0.0.1:1/tandem:0.1.0", "claim=runs", f"mount_path={tmp_path}", f"user_id={os.getuid() or 1000}", "nodes=2")
            draws = ("--pods.min_count=2",) if recipe == RECIPE else ()
            here("train", recipe, "--on", "kubernetes", "--run.name=two", *draws, *(f"--kubernetes.{key}" for key in keys), *more)
            api.finished()
            found.mount(secret_of(api))
        return found

    yield place
    found.end()


def secret_of(api: RecordedApi) -> dict[str, str]:
    return dict(api.sent("POST", "secrets")[-1]["stringData"])


def test_a_run_over_two_pods_has_the_bits_of_one_machine_and_a_log_in_its_folder(containers: Callable[..., Containers], here: Here, tmp_path: Path) -> None:
    run = containers()
    pod, controller = run.start("pod"), run.start("job")
    said, _ = controller.communicate(timeout=240)
    assert controller.returncode == 0, said.decode()
    # It was released, and waits for another controller until the JobSet ends it.
    assert pod.poll() is None
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(60) == SAVED
    found = PodRun(tmp_path / "runs", name="two")
    assert [event.detail["name"] for event in found.events("membership") if "joined" in event.detail] == ["node-0"]
    (output,) = (run.directory / "logs").glob("kubernetes-*.out")
    assert output.read_bytes() == said and b"step" in said
    here("train", RECIPE, "--run.name=one")
    assert difference(found, PodRun(tmp_path / "runs", name="one")) == []


def test_a_run_on_data_over_two_pods_has_the_bits_of_one_machine(containers: Callable[..., Containers], here: Here, tmp_path: Path) -> None:
    runs = LaunchedRuns(tmp_path)
    recipe = write_recipe(runs, 12)
    run = containers(*MESH, recipe=recipe)
    pod, controller = run.start("pod"), run.start("job")
    said, _ = controller.communicate(timeout=240)
    assert controller.returncode == 0, said.decode()
    pod.send_signal(signal.SIGTERM)
    out, _ = pod.communicate(timeout=60)
    assert pod.returncode == SAVED and b"pod node-0 trains with rank 1" in out
    assert_equal_to_local(runs, "two", recipe)


def test_a_first_pod_that_is_evicted_saves_and_its_successor_goes_on_with_the_pod_that_joined_before(
    containers: Callable[..., Containers], here: Here, tmp_path: Path
) -> None:
    long = ("--run.max_steps=16", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=16", "--checkpoint.every_steps=100")
    run = containers(*long)
    pod, controller = run.start("pod"), run.start("job")
    metrics, ends = run.directory / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert controller.poll() is None and time.monotonic() < ends
        time.sleep(0.05)
    controller.send_signal(signal.SIGTERM)
    said, _ = controller.communicate(timeout=100)
    assert controller.returncode == SAVED, said.decode()
    successor = run.start("job")
    said, _ = successor.communicate(timeout=240)
    assert successor.returncode == 0 and pod.poll() is None, said.decode()
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        assert [event.detail["step"] for event in journal.events() if event.kind == "resume"][-1] >= 5
    joined = [event.detail["name"] for event in PodRun(tmp_path / "runs", name="two").events("membership") if "joined" in event.detail]
    assert joined == ["node-0", "node-0"]
    here("train", RECIPE, "--run.name=one", *long)
    # The eviction has left a checkpoint of its own, so the models are compared.
    two, one = (PodRun(tmp_path / "runs", name=name).results() for name in ("two", "one"))
    models = [{name: data for name, data in found.items() if name.startswith("model/")} for found in (two, one)]
    assert models[0] == models[1] != {}


def lose_the_first_node(run: Containers, folder: Path) -> None:
    """Runs ``run`` in ``folder``, whose first pod is lost with its node once two nodes have its newest checkpoint in memory. Its successor reads that alone,
    and nothing is left behind."""
    pod, controller = run.start("pod"), run.start("job", "127.0.0.2")
    ends = time.monotonic() + 200
    while not [tier for tier in tiers_of(run.directory) if tier.tier == "memory" and tier.step >= 5 and len(tier.where) >= 2]:
        assert controller.poll() is None and time.monotonic() < ends
        time.sleep(0.05)
    # Every process there; the etcd with the addresses of the keepers is one of them.
    for process in descendants(controller.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    successor = run.start("job", "127.0.0.3")
    said, _ = successor.communicate(timeout=240)
    assert successor.returncode == 0 and pod.poll() is None, said.decode()
    event = PodRun(folder / "runs", name="two").loaded()[0]
    assert event["tier"] == "memory" and event["step"] >= 5 and event["read_bytes"] == {"memory": event["bytes"], "folder": 0}
    assert set(event["where"].values()) == {"node-0"}
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(60) == SAVED and not (run.directory / KEEPERS).exists() and left_behind(folder) == []


def test_a_first_pod_that_is_lost_with_its_node_has_its_state_back_from_the_memory_of_the_pod_that_is_left(
    containers: Callable[..., Containers], here: Here, tmp_path: Path
) -> None:
    long = ("--run.max_steps=16", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=16", "--checkpoint.every_steps=100")
    run = containers(*long, "--checkpoint.memory_every_steps=1")
    lose_the_first_node(run, tmp_path)
    here("train", RECIPE, "--run.name=one", *long)
    assert difference(*(PodRun(tmp_path / "runs", name=name) for name in ("two", "one"))) == []


def test_a_first_pod_of_a_run_on_data_that_is_lost_with_its_node_has_its_state_back_from_memory(
    containers: Callable[..., Containers], here: Here, tmp_path: Path
) -> None:
    runs = LaunchedRuns(tmp_path)
    recipe = write_recipe(runs, 150)
    run = containers(*MESH, "--checkpoint.memory_every_steps=1", "--checkpoint.every_steps=1000", recipe=recipe)
    lose_the_first_node(run, tmp_path)
    runs.tandem("train", recipe, "--run.name=one", *MESH, "--checkpoint.every_steps=1000")
    assert runs.model("two") == runs.model("one")
