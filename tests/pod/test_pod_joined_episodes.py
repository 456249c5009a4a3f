"""Pods that are started elsewhere run agents and tools, continue partial rollouts and draw with adapters: every number is that of one pod."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer
from joined_machines import Machines, needs_etcd
from pod_runs import HERE, PodRun, difference, finish

pytestmark = [pytest.mark.full, needs_etcd]
HELPER = '''
import time


def slowly(value):
    time.sleep(0.02)
    return value
'''
AGENT = '''
from openai import OpenAI

from helper_of_the_agent import slowly
from tandem.examples.calculator_agent import TOOLS, run

client = OpenAI()


def answer(question):
    """Uses the calculator, and then asks anew with the result in the question."""
    create = lambda messages: client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0].message
    message = create([{"role": "user", "content": slowly(question)}])
    if message.tool_calls:
        message = create([{"role": "user", "content": question + " " + run(message.tool_calls[0].function)}])
    return message.content
'''
TOOL = '''
from helper_of_the_agent import slowly
from tandem.data.tools.calculator import calculator as exact


def calculator(expression: str) -> str:
    """Computes slowly.

    Args:
        expression: What.
    """
    return slowly(exact(expression))
'''
LORA = "--trainer.lora={rank: 4, alpha: 8, target_modules: [q_proj, v_proj, down_proj]}"


@pytest.fixture
def machines(etcd_server: EtcdServer, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path, etcd_server)
    yield made
    made.close()


def with_functions(folder: Path, recipe: str, old: str, new: str) -> Path:
    """Writes the functions to ``folder``, and the recipe that names them."""
    folder.mkdir()
    for name, text in {"helper_of_the_agent": HELPER, "agent": AGENT, "slow": TOOL}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "recipe.yaml").write_text((HERE / recipe).read_text().replace(old, new))
    return folder / "recipe.yaml"


def compare_with_one_pod(machines: Machines, *settings: str) -> None:
    """Trains in one pod, and then with a pod that was started elsewhere, which has no file of the user: every bit is the same."""
    alone = PodRun(machines.run.parent, machines.recipe, name="alone")
    done = alone.train(*settings)
    assert done.returncode == 0, done.stdout + done.stderr
    machines.settings = settings
    pod, train = machines.pod("a"), machines.train("--pods.min_count=2")
    done = finish(train)
    assert done.returncode == 0, done.stdout + done.stderr
    assert finish(pod).returncode == 0 and machines.members() == [("joined", "a")], done.stdout
    assert difference(machines.run, alone) == [] and machines.left_behind() == []
    rows = [json.loads(line) for line in (machines.run.directory / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["perf/rollout_groups/a"] for row in rows) > 0, "it drew groups"


def test_the_episodes_of_an_agent_are_those_of_one_pod_wherever_they_are_played(machines: Machines) -> None:
    machines.recipe = with_functions(machines.run.parent, "agent.yaml", "tandem.examples.calculator_agent:answer", "agent.py:answer")
    compare_with_one_pod(machines)
    assert sorted(path.name for path in (machines.pods["a"].parent / "files" / "functions" / "0").glob("*.py")) == ["agent.py", "helper_of_the_agent.py"]


def test_the_episodes_of_a_tool_are_those_of_one_pod_wherever_they_are_played(machines: Machines) -> None:
    machines.recipe = with_functions(machines.run.parent, "calculator.yaml", "[calculator]", "['slow.py:calculator']")
    compare_with_one_pod(machines)


def test_partial_rollouts_are_continued_in_another_pod(machines: Machines) -> None:
    compare_with_one_pod(machines, "--rollout.budget_tokens=4")


@pytest.mark.parametrize("more", [(), ("--trainer.lora.quantization=nf4",)], ids=["fp32", "nf4"])
def test_adapters_are_drawn_with_in_another_pod_over_weights_that_are_sent_once(more: tuple[str, ...], machines: Machines) -> None:
    compare_with_one_pod(machines, LORA, *more)
    (kept,) = (machines.pods["a"].parent / "files" / "base").iterdir()
    assert kept.read_bytes() == (machines.run.directory / "sft" / "model" / "model.safetensors").read_bytes()


def test_the_next_life_of_a_pod_has_the_weights_that_are_not_trained(machines: Machines) -> None:
    machines.settings = (LORA, "--run.max_steps=20")
    alone = PodRun(machines.run.parent, name="alone")
    assert alone.train(*machines.settings).returncode == 0
    pod, train = machines.pod("a"), machines.train("--pods.min_count=2")
    machines.wait_for("a", "weights of step 2 ", train)
    (kept,) = (machines.pods["a"].parent / "files" / "base").iterdir()
    written = kept.stat().st_mtime_ns, kept.stat().st_ino
    os.kill(next(pid for pid, line in machines.pods["a"].processes().items() if "joining_shim" in line), signal.SIGKILL)
    done = finish(train)
    assert done.returncode == 0 and difference(machines.run, alone) == [], done.stdout + done.stderr
    assert machines.members() == [("joined", "a"), ("joined", "a")]
    assert (kept.stat().st_mtime_ns, kept.stat().st_ino) == written, "nothing was sent again"
    assert finish(pod).returncode == 0 and machines.left_behind() == []


def test_a_function_that_a_pod_does_not_have_is_said_and_the_run_goes_on_without_it(machines: Machines) -> None:
    recipe = with_functions(machines.run.parent, "agent.yaml", "tandem.examples.calculator_agent:answer", "agent:answer")
    machines.recipe = recipe
    machines.run.environment = {"PYTHONPATH": os.pathsep.join([str(recipe.parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    pod, train = machines.pod("a"), machines.train()
    done = finish(train)
    assert done.returncode == 0, done.stdout + done.stderr
    (refused,) = {event.detail["reason"] for event in machines.run.events("membership")}
    assert "agent 'agent:answer' cannot be loaded: ModuleNotFoundError" in refused or "No module named 'agent'" in refused
    pod.terminate()
    finish(pod)
    assert machines.left_behind() == []


def test_the_stacks_of_a_stuck_pod_are_in_the_report_of_the_watchdog(machines: Machines, undisturbed: PodRun) -> None:
    machines.settings = ("--watchdog.min_deadline_s=8",)
    pod, train = machines.pod("a", "--fault", "pod1_rollout_worker:stall:rollout:4"), machines.train("--pods.min_count=2")
    done = finish(train)
    assert done.returncode == 0 and difference(machines.run, undisturbed) == [], done.stdout + done.stderr
    reports = [path.read_text() for path in sorted((machines.run.directory / "logs").glob("stacks-*.txt"))]
    (text,) = [report for report in reports if "a, rollout_worker (process " in report]
    for party in ("the controller", "trainer_worker", "a, the rollout shim", "a, rollout_worker"):
        assert f"\n{party} (process " in text, text
    assert "_sleep" in text.split("\na, rollout_worker (process ")[1].split("(process")[0], "the stack of the stuck worker says where it is"
    assert finish(pod).returncode == 0 and machines.left_behind() == []


def test_a_pod_that_is_stopped_is_named_in_the_report_of_the_watchdog(machines: Machines, undisturbed: PodRun) -> None:
    machines.settings = ("--pods.heartbeat_timeout_s=4", "--coordination.lease_s=30")
    pod, train = machines.pod("a", "--fault", "rollout_shim:stall:rollout:3"), machines.train("--pods.min_count=2")
    marker, ends = machines.pods["a"].parent / "files" / "faults" / "rollout_shim-stall-rollout-3", time.monotonic() + 240
    while not marker.exists():
        assert time.monotonic() < ends and train.poll() is None
        time.sleep(0.02)
    shim = next(pid for pid, line in machines.pods["a"].processes().items() if "joining_shim" in line)
    os.kill(shim, signal.SIGSTOP)
    while not (reports := list((machines.run.directory / "logs").glob("stacks-*.txt"))):
        assert time.monotonic() < ends and train.poll() is None
        time.sleep(0.05)
    os.kill(shim, signal.SIGCONT)
    done = finish(train)
    assert done.returncode == 0 and difference(machines.run, undisturbed) == [], done.stdout + done.stderr
    text = reports[0].read_text()
    assert text.startswith("the controller waits for pod 1 (a) in 'rollout' since "), text
    assert "\na, the pod\npod 1 (a) is stuck in 'stacks': no sign of life" in text, text
    assert finish(pod).returncode == 0 and machines.left_behind() == []
