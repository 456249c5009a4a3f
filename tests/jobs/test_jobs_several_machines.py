"""A run on data whose ranks are in pods that joined, through a real etcd: the bits of as many ranks on one machine, whatever dies."""

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from byte_model import write_byte_model
from data_runs import command, rows
from etcd_server import WHY_SKIPPED, EtcdServer, program
from machines_of_data import DataMachines
from package_data import make_datasets
from pretrain_recipe import write_recipe
from sharded import is_same

from tandem.cluster.nodes import read_nodes
from tandem.dashboard.nodes import nodes
from tandem.dashboard.open_run import OpenRun
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize

pytestmark = [pytest.mark.full, pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)]
STEPS, LATER = 10, 60
"""Steps of a run without faults, and of one that is struck after its first checkpoint."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json", "held-out")


def write(folder: Path, data: Path, steps: int) -> None:
    write_recipe(
        folder, data, data={"train": [{"path": str(data / "json")}], "held_out": str(data / "held-out"), "global_batch_size": 6},
        trainer={"warmup_steps": 3, "micro_batch_tokens": 100}, run={"max_steps": steps}, checkpoint={"every_steps": 4, "keep": 2},
        evaluation={"every_steps": 5, "sequences": 4}, parallel={"heartbeat_timeout_s": 4.0},
    )  # fmt: skip


def on_one_machine(folder: Path, data: Path, steps: int, *arguments: str, ranks: int = 2) -> Path:
    write(folder, data, steps)
    command("train", "recipe.yaml", f"--parallel.data={ranks}", *arguments, folder=folder)
    return folder / "run"


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks on one machine, without faults."""
    return on_one_machine(tmp_path_factory.mktemp("one"), data, LATER)


@pytest.fixture
def machines(data: Path, etcd: EtcdServer, tmp_path: Path) -> Iterator[DataMachines]:
    write(tmp_path, data, LATER)
    made = DataMachines(tmp_path, etcd)
    yield made
    made.close()


def assert_same(run: Path, other: Path, steps: int) -> None:
    assert rows(run) == rows(other)
    assert (run / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()
    assert is_same(run / f"checkpoints/step-{steps}", other / f"checkpoints/step-{steps}")


@pytest.mark.parametrize("more", ["", "--parallel.zero=2"])
def test_ranks_on_two_machines_have_the_bits_of_two_on_one(more: str, data: Path, machines: DataMachines, tmp_path: Path) -> None:
    other = on_one_machine(tmp_path / "other", data, STEPS, *more.split())
    machines.settings = (f"--run.max_steps={STEPS}", *more.split())
    machines.pod("b")
    machines.train()
    machines.ended("train")
    assert "pod b trains with rank 1" in machines.ended("b")
    assert_same(machines.directory, other, STEPS)
    assert machines.events("recovery") == [] and machines.left_behind() == []


@pytest.mark.parametrize(("name", "mesh"), [("sft", ()), ("dpo", ()), ("dpo", ("--parallel.data=1", "--parallel.pipeline=2"))])
def test_examples_and_pairs_are_learned_on_two_machines_with_the_bits_of_one(name: str, mesh: tuple[str, ...], machines: DataMachines, tmp_path: Path) -> None:
    form = DocumentFormat(suffixes=(), examples=name == "sft", pairs=name == "dpo")
    write_byte_model(tmp_path / "bytes", "{% for m in messages %}{{ m.content }}{% endfor %}")
    lines = [{"prompt": f"{i}+{i}=", "completion": f"{i + i}", "chosen": f"{i + i}", "rejected": f"{i}"} for i in range(1, 9)]
    used = ("prompt", "completion") if name == "sft" else ("prompt", "chosen", "rejected")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.jsonl").write_text("".join(json.dumps({key: line[key] for key in used}) + "\n" for line in lines))
    tokenize(TokenizeSettings(str(tmp_path / "source"), str(tmp_path / "lines"), str(tmp_path / "bytes"), form, unit_bytes=200, workers=1))
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        sections = {
            "algorithm": {"name": name}, "model": {"path": str(tmp_path / "bytes")}, "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 40},
            "data": {"train": [{"path": str(tmp_path / "lines")}], "sequence_length": 24, "global_batch_size": 4}, "machine": {"threads": 1},
            "run": {"max_steps": STEPS, "directory": str(folder), "name": "run"}, "checkpoint": {"every_steps": 4},
        }  # fmt: skip
        (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    command("train", "recipe.yaml", "--parallel.data=2", *mesh, folder=tmp_path / "other")
    machines.settings = mesh
    machines.pod("b")
    machines.train()
    machines.ended("train")
    machines.ended("b")
    assert_same(machines.directory, tmp_path / "other" / "run", STEPS)
    assert machines.left_behind() == []


@pytest.mark.parametrize("what", ["rank", "machine"])
def test_a_rank_on_another_machine_or_all_of_that_machine_is_killed(what: str, machines: DataMachines, one: Path) -> None:
    machines.pod("b")
    machines.train()
    machines.wait_for_step(6)
    of_b = machines.processes("b")
    for pid in [pid for pid, line in of_b.items() if "data_rank" in line] if what == "rank" else of_b:
        os.kill(pid, signal.SIGKILL)
    if what == "machine":
        machines.commands.pop("b").wait()
        machines.pod("c")
    machines.ended("train")
    assert_same(machines.directory, one, LATER)
    assert len(machines.events("recovery")) == 1 and machines.events("resume")[0].detail["step"] >= 4
    assert machines.ended("c" if what == "machine" else "b") and machines.left_behind() == []


def test_a_spare_has_the_ranks_of_a_node_that_fails_which_is_cordoned(machines: DataMachines, one: Path) -> None:
    machines.settings = ("--cluster.spares=1",)
    machines.pod("b")
    machines.pod("c")
    machines.train()
    machines.wait_for_step(6)
    [lost] = [name for name in ("b", "c") if "trains with rank 1" in machines.said(name)]
    for pid in machines.processes(lost):
        os.kill(pid, signal.SIGKILL)
    machines.commands.pop(lost).wait()
    spare = "bc".replace(lost, "")
    machines.ended("train")
    assert "trains with rank 1" in machines.ended(spare)
    assert [(each.node, each.state) for each in read_nodes(machines.directory)] == sorted([(lost, "cordoned"), (spare, "in use")])
    shown = nodes(OpenRun("run", machines.directory))
    assert {each["node"]: each["state"] for each in shown["nodes"]} == {lost: "cordoned", spare: "in use", socket.gethostname(): "controller"}
    assert_same(machines.directory, one, LATER)
    assert machines.left_behind() == []


def test_a_spare_has_the_ranks_of_a_machine_that_computes_wrong_bits(data: Path, machines: DataMachines, tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("unshare") is None or subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("no machines with names of their own here, so a machine that computes wrong bits is NOT replaced")
    other = on_one_machine(tmp_path / "other", data, STEPS, ranks=3)
    # A third replica says which of two is wrong.
    machines.count, machines.settings = 3, (f"--run.max_steps={STEPS}", "--cluster.spares=1", "--trainer.corruption_check=1.0")
    for name in ("b", "c", "d"):
        machines.inside[name] = ("unshare", "--uts", "sh", "-c", f'hostname node-{name} && exec "$@"', "sh")
        # Of the one that comes first; the one that takes its place is pod 3.
        machines.pod(name, "--fault=pod1_trainer_rank1:flips:gradient:6")
    machines.train()
    said = machines.ended("train")
    [wrong], [cordon, *_] = machines.events("silent_corruption"), machines.events("cordon")
    assert (wrong.detail["step"], wrong.detail["ranks"], wrong.detail["checkpoint"]) == (6, [1], 4)
    node = str(cordon.detail["node"])
    assert f"spares take the places of {node}" in said
    lost = node.removeprefix("node-")
    assert {"trains with rank 1", "trains with rank 2"} <= {
        line.partition(f"pod {name} ")[2] for name in {"b", "c", "d"} - {lost} for line in machines.ended(name).splitlines()
    }
    assert rows(machines.directory) == rows(other)
    assert (machines.directory / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()


def test_a_pod_that_leaves_saves_the_step_and_another_has_its_ranks(machines: DataMachines, one: Path) -> None:
    leaving = machines.pod("b")
    machines.train()
    machines.wait_for_step(6)
    leaving.terminate()
    machines.ended("b")
    machines.pod("c")
    said = machines.ended("train")
    assert "b left the run" in said and "pod c trains with rank 1" in machines.ended("c")
    assert_same(machines.directory, one, LATER)
    assert machines.events("recovery") == [] and machines.left_behind() == []


def test_a_run_that_is_stopped_or_killed_is_resumed_with_pods_that_join_then(machines: DataMachines, one: Path) -> None:
    machines.pod("b")
    train = machines.train()
    machines.wait_for_step(6)
    train.send_signal(signal.SIGINT)
    assert "stopped after step" in machines.ended("train", status=130)
    machines.ended("b")
    machines.pod("c")
    machines.resume()
    machines.wait_for_step(len(rows(machines.directory)) + 4)
    for pid in machines.processes("resume"):
        os.kill(pid, signal.SIGKILL)
    machines.commands.pop("resume").wait()
    machines.resume()
    machines.ended("resume")
    machines.ended("c")
    assert_same(machines.directory, one, LATER)
    assert machines.left_behind() == []


def test_data_that_a_machine_does_not_have_is_one_line_that_names_the_machine(machines: DataMachines, data: Path) -> None:
    if os.geteuid() or shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here, so a path that another machine lacks is NOT tested")
    machines.inside["b"] = ("unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {data / 'json'} && exec \"$@\"", "sh")
    machines.pod("b")
    machines.train()
    last = machines.ended("train", status=2).splitlines()[-1]
    assert last.startswith("tandem: on b: ") and str(data / "json") in last
    machines.ended("b")
    assert machines.left_behind() == []


def test_a_run_that_lacks_machines_says_how_to_go_on(machines: DataMachines) -> None:
    machines.settings = ("--pods.join_timeout_s=1",)
    machines.train()
    last = machines.ended("train", status=1).splitlines()[-1]
    assert last.startswith("tandem: 1 of pods.trainer_count 2 pods that can train are there after pods.join_timeout_s (1 s); start more with 'tandem pod'")
    assert machines.left_behind() == []


def test_ctrl_c_ends_a_run_that_waits_for_machines(machines: DataMachines) -> None:
    train = machines.train()
    machines.wait_until_said("train", "waiting for")
    train.send_signal(signal.SIGINT)
    machines.ended("train", status=130)
    assert machines.left_behind() == []
